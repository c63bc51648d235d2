"""The socket that clients connect to, and how many of them this process may serve.

Knows: addresses, socket options, the limit of open files. Must not know: HTTP. Light to import: the port is bound
before anything is loaded.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping
from types import MappingProxyType

from pinnate.core.errors import ConfigError

MAX_DESCRIPTORS = 65536

# A client whose machine or network is gone never says so; it is noticed after two minutes.
_PROBES: Mapping[str, int] = MappingProxyType({"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4})


def open_listener(host: str, port: int) -> socket.socket:
    """Bound, not yet listening. Connections inherit its options.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener


def raise_descriptor_limit() -> int:
    """As many open files as the system lets this process have, up to MAX_DESCRIPTORS; returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
