"""Addresses in the form ``host:port``, as processes tell them to each other."""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """Join a host and a port to the form that gRPC and URLs take; IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to this name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
