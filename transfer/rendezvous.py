"""The store where the ranks of one generation meet.

`listen` binds port 0 before anything is published, so the port is ours from the first moment. The
store lives as long as its generation; every generation has its own store, and its keys carry the
generation as a prefix, so a process of an older generation cannot register by accident.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore

_BACKLOG = 1024
STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(slots=True)
class Rendezvous:
    """A listening store: `host`, `port` are what the other ranks need."""

    host: str
    port: int
    store: TCPStore | None

    def close(self) -> None:
        """Stop listening. Idempotent; a group that still uses the store keeps it alive."""
        self.store = None


def listen(host: str) -> Rendezvous:
    """Bind a free port of `host` and serve a store on it. Raises OSError when it cannot bind."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
        port = int(sock.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=sock.detach(),
        )
    return Rendezvous(host, port, store)


def connect(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Client of a listening store; blocks up to `timeout_s`. Raises torch's DistNetworkError."""
    return TCPStore(
        host,
        port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def local_address(host: str, port: int) -> str:
    """Our own IP on the route to `host`, where the group's sockets should listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, port))  # a datagram socket only picks a route, nothing is sent
        return str(sock.getsockname()[0])
