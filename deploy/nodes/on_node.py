"""Facts that a worker learns only on its node: its address, network devices, labels."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvrelay.deploy.nodes.local_ray import ray
from kvrelay.deploy.nodes.model_copy import local_copy
from kvrelay.deploy.options.environment import Environment, set_network_devices
from kvrelay.engine.config import WorkerConfig
from kvrelay.net.addresses import is_loopback

NODES_ADDRESS: Final = ""
"""The value of a worker's `host` or `metrics_host` that means the address of its node."""
_RDMA: Final = Path("/sys/class/infiniband")
_GET_ADDRESSES: Final = 0x8912  # SIOCGIFCONF of linux/sockios.h
_ENTRY: Final = struct.Struct("16s4x4s16x")  # ifreq of linux/if.h: a name and an IPv4 address
_MOST_ADDRESSES: Final = 1024


def on_this_node(config: WorkerConfig) -> WorkerConfig:
    """Complete a worker's configuration with facts that are known only on its node. Blocks.

    This also sets UCX's devices in the environment, before NIXL is imported.

    Raises:
        TlsFileError: the certificate here does not name the host that it is checked against.
        ModelError: the model cannot be copied to this node.
        OSError: the copy cannot be written.
    """
    if config.host == NODES_ADDRESS:
        host = address_here(config.advertised)
        config = replace(config, host=host, metrics_host=config.metrics_host or host)
        if config.tls is not None:
            config.tls.check(config.tls.name or host)
    if config.near:
        labels = ray.get_runtime_context().get_node_labels()
        config = replace(config, locality=labels.get(config.near, ""))
    config = with_local_model(config)
    devices = network_devices(config.host)
    if devices is not None:
        set_network_devices(devices)
    return replace(config, threads=min(config.threads, len(os.sched_getaffinity(0))))


def with_local_model(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration with this node's own checkpoints, copied here if need be."""
    if config.model_files:
        cache = Environment.read().cache_home / "kvrelay" / "copies"
        config = replace(
            config, model_path=local_copy(config.model_path, config.model_files, cache)
        )
        if config.draft_model_path is not None:
            draft = local_copy(config.draft_model_path, config.draft_model_files, cache)
            config = replace(config, draft_model_path=draft)
    return config


def address_here(advertised: Mapping[str, str]) -> str:
    """Return the host at which workers listen here: as advertised, or the node's address in Ray."""
    address: str = ray.util.get_node_ip_address()
    names = (address, socket.gethostname(), "")
    return next((advertised[name] for name in names if name in advertised), address)


def network_devices(host: str) -> str | None:
    """Return the devices that UCX is to use for KV; None: all, or those that the environment names.

    Without a choice UCX listens on every interface. Shared memory is no network device: it is
    used in any case. With RDMA, UCX chooses among all devices: they have addresses of their own.
    """
    if is_loopback(host):
        return "lo"
    if _RDMA.is_dir() and any(_RDMA.iterdir()):
        return None
    return _interface_of(host)


def _interface_of(host: str) -> str | None:
    """Return the interface with this address; None if there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = {str(address[0]) for _, _, _, _, address in found}
    for _, name in socket.if_nameindex():
        if addresses & {*_ipv4(name), *_ipv6(name)}:
            return name
    return None


def _ipv4(interface: str) -> list[str]:
    room = array.array("B", bytes(_MOST_ADDRESSES * _ENTRY.size))
    address, size = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _GET_ADDRESSES, struct.pack("iP", size, address))
        except OSError:
            return []
    used, _ = struct.unpack("iP", answer)
    return [
        socket.inet_ntop(socket.AF_INET, one)
        for label, one in _ENTRY.iter_unpack(room[:used])
        if label.rstrip(b"\0").partition(b":")[0] == interface.encode()
    ]


def _ipv6(interface: str) -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(one[0]))
        for one in fields
        if one[-1] == interface
    ]
