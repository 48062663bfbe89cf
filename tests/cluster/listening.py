"""Where processes can be reached from other machines."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address

import psutil


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses and ports at which a process takes connections, or datagrams.

    Of one that has ended: none.
    """
    try:
        sockets = process.net_connections("inet")
    except psutil.NoSuchProcess:
        return set()
    return {
        (sock.laddr.ip, sock.laddr.port)
        for sock in sockets
        if sock.status == psutil.CONN_LISTEN
        or (sock.type == socket.SOCK_DGRAM and sock.laddr and not sock.raddr)
    }


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it; ``::ffff:127.0.0.1`` is IPv4's."""
    found = ip_address(address)
    if isinstance(found, IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped.is_loopback
    return found.is_loopback
