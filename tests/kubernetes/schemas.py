"""Checks objects against the schemas of Kubernetes and KubeRay, more strictly than these do.

Unknown fields are refused everywhere. Kubernetes' schemas do not say which words a field may have,
so those that the chart uses are listed here.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from tests.kubernetes.chart import ROOT

Schema = dict[str, Any]
KUBERNETES: Final = "1.37.0"
_DATA: Final = Path(os.environ.get("KVRELAY_TEST_DATA", ROOT.parent / "shared" / "data"))
CRD: Final = _DATA / "kuberay" / "ray.io_rayclusters.yaml.gz"
_CORE: Final = "io.k8s.api.core.v1."
_WORDS: Final[dict[str, list[str]]] = {
    _CORE + "Capabilities.drop": ["ALL"],
    _CORE + "Capabilities.add": ["IPC_LOCK"],
    _CORE + "Container.imagePullPolicy": ["Always", "IfNotPresent", "Never"],
    _CORE + "EmptyDirVolumeSource.medium": ["", "Memory", "HugePages"],
    _CORE + "HTTPGetAction.scheme": ["HTTP", "HTTPS"],
    _CORE + "PodSecurityContext.fsGroupChangePolicy": ["Always", "OnRootMismatch"],
    _CORE + "SeccompProfile.type": ["RuntimeDefault", "Unconfined", "Localhost"],
    _CORE + "ServicePort.protocol": ["TCP", "UDP", "SCTP"],
    _CORE + "ServiceSpec.type": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"],
    _CORE + "Toleration.effect": ["NoSchedule", "PreferNoSchedule", "NoExecute"],
    _CORE + "Toleration.operator": ["Equal", "Exists", "Lt", "Gt"],
    _CORE + "TopologySpreadConstraint.whenUnsatisfiable": ["DoNotSchedule", "ScheduleAnyway"],
    "io.k8s.api.networking.v1.NetworkPolicyPort.protocol": ["TCP", "UDP", "SCTP"],
    "io.k8s.api.networking.v1.NetworkPolicySpec.policyTypes": ["Ingress", "Egress"],
}
_QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"
_NAMES: Final = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA: Final = {"type": "object", "required": ["name"]}


def _object(required: str, **properties: Any) -> Schema:
    fields = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**fields, "required": required.split()}


_TEXT: Final = {"type": "string"}
_DURATION: Final = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
_TEXTS: Final = {"type": "array", "items": _TEXT, "minItems": 1}
_OPERATORS: Final[dict[str, Schema]] = {
    # The fields that the chart uses of cert-manager's v1 and the Prometheus operator's v1.
    "Certificate": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "cert-manager.io/v1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            "secretName issuerRef dnsNames usages",
            secretName=_TEXT,
            issuerRef=_object(
                "name", group=_TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, name=_TEXT
            ),
            duration={"type": "string", "pattern": "^[0-9]+h$"},
            renewBefore={"type": "string", "pattern": "^[0-9]+h$"},
            privateKey=_object(
                "",
                algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
                size={"enum": [256, 384, 521]},
                rotationPolicy={"enum": ["Never", "Always"]},
            ),
            usages={"type": "array", "items": {"enum": ["server auth", "client auth"]}},
            dnsNames=_TEXTS,
            ipAddresses=_TEXTS,
        ),
    ),
    "ScrapeConfig": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "monitoring.coreos.com/v1alpha1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            "jobName httpSDConfigs",
            jobName=_TEXT,
            httpSDConfigs={"type": "array", "items": _object("url", url=_TEXT)},
        ),
    ),
    "PrometheusRule": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            "groups",
            groups={
                "type": "array",
                "items": _object(
                    "name rules",
                    name=_TEXT,
                    interval=_DURATION,
                    rules={
                        "type": "array",
                        "items": _object(
                            "expr",
                            record=_TEXT,
                            alert=_TEXT,
                            expr=_TEXT,
                            labels=_NAMES,
                            annotations=_NAMES,
                            **{"for": _DURATION, "keep_firing_for": _DURATION},
                        ),
                    },
                ),
            },
        ),
    ),
    "PodMonitor": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            "selector podMetricsEndpoints",
            selector=_object("matchLabels", matchLabels=_NAMES),
            podTargetLabels=_TEXTS,
            podMetricsEndpoints={"type": "array", "items": _object("port", port=_TEXT)},
        ),
    ),
}


def violations(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with an object, each with the path of the field; empty if nothing."""
    kind = manifest["kind"]
    if kind in _OPERATORS:
        return _errors(jsonschema.Draft202012Validator(_OPERATORS[kind]), manifest)
    if kind == "RayCluster":
        found = _errors(jsonschema.Draft202012Validator(_ray_cluster()), manifest)
        groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
        template = _kubernetes("podtemplatespec-v1")
        for number, group in enumerate(groups):
            found += [f"pods {number}: {error}" for error in _errors(template, group["template"])]
        return found
    group, _, version = manifest["apiVersion"].rpartition("/")
    parts = [kind.lower(), *([group.partition(".")[0]] if group else []), version]
    return _errors(_kubernetes("-".join(parts)), manifest)


def _errors(validator: Any, instance: Any) -> list[str]:
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(instance)
    ]


@functools.cache
def _ray_cluster() -> Schema:
    """KubeRay's schema of its version v1. Skips the test where it is not there."""
    if not CRD.is_file():
        pytest.skip(f"KubeRay's schemas are not in {CRD}")
    crd = yaml.load(
        gzip.decompress(CRD.read_bytes()), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    [schema] = [
        version["schema"]["openAPIV3Schema"]
        for version in crd["spec"]["versions"]
        if version["name"] == "v1"
    ]
    # The API server knows what these are.
    schema["properties"]["metadata"] = _METADATA
    _close(schema)
    return dict(schema)


def _close(schema: Any) -> None:
    """Let a schema refuse fields that it does not name, at every depth."""
    if isinstance(schema, list):
        for inner in schema:
            _close(inner)
    if not isinstance(schema, dict):
        return
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and not open_ended and schema["properties"] is not _METADATA:
        schema.setdefault("additionalProperties", False)
    for inner in schema.values():
        if inner is not _METADATA:
            _close(inner)


@functools.cache
def _folder() -> Path:
    found = importlib.util.find_spec("kubernetes_validate")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "kubernetes-json-schema" / f"v{KUBERNETES}-local-strict"


@functools.cache
def _definitions() -> Registry[Any]:
    definitions = json.loads((_folder() / "_definitions.json").read_text())
    of_type = definitions["$defs"]
    for field, words in _WORDS.items():
        owner, _, name = field.rpartition(".")
        schema = of_type[owner]["properties"][name]
        schema.get("items", schema)["enum"] = words
    of_type["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {
        "anyOf": [{"type": "string", "pattern": _QUANTITY}, {"type": "number"}]
    }
    resource: Resource[Any] = Resource.from_contents(definitions)
    return resource @ Registry()


@functools.cache
def _kubernetes(name: str) -> Any:
    schema = json.loads((_folder() / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions())
