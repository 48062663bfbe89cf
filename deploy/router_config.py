"""The configuration of a router, from the options of a cluster."""

from __future__ import annotations

from kvrelay.deploy.nodes.models import ModelFolder
from kvrelay.deploy.options.serve_options import ServeOptions
from kvrelay.options.declaration import values_for
from kvrelay.router.config import RouterConfig, RouterOptions


def router_config(options: ServeOptions, model: ModelFolder) -> RouterConfig:
    """Return the router's part of the options."""
    asked = values_for(RouterOptions, options)
    return RouterConfig(
        model_name=model.name,
        model_aliases=options.model_names[1:],
        model_path=model.path,
        dtype=options.dtype,
        grpc_address=str(options.grpc),
        http_address=str(options.http),
        metrics_address=str(options.metrics),
        admin_address=str(options.admin),
        latency_targets=options.latency_targets,
        worker_tls=options.cluster_tls,
        front_tls=options.front_tls,
        admin_tls=options.admin_tls,
        **{**asked, "chat_template": options.chat_template or model.chat_template},
    )
