"""Cut the TCP connections of one Gloo group from outside.

Why: Gloo's own `abort()` does not free an operation that is blocked in a socket, and a peer that
merely stopped reading keeps it blocked until the operation's timeout. Shutting the sockets down
makes the operation fail at once, here and on the peer. Gloo does not hand out its sockets, but each
rank's device has one listening address, and every connection of the group ends at one of them, so
the connections can be told apart from all others of the process by address alone.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import NamedTuple

_FD_DIR = "/proc/self/fd"


class Address(NamedTuple):
    """IP and port of a listening socket."""

    host: str
    port: int


def _open_sockets() -> list[socket.socket]:
    """Duplicates of all sockets of this process. The caller closes them."""
    found = []
    for name in os.listdir(_FD_DIR) if os.path.isdir(_FD_DIR) else []:
        with suppress(OSError):  # the descriptor may vanish between two calls
            if os.readlink(f"{_FD_DIR}/{name}").startswith("socket:"):
                found.append(socket.socket(fileno=os.dup(int(name))))
    return found


def _address(raw: object) -> Address | None:
    if isinstance(raw, tuple) and len(raw) >= 2:
        return Address(str(raw[0]).removeprefix("::ffff:"), int(raw[1]))
    return None


def listening() -> set[Address]:
    """All addresses that this process listens on."""
    addresses = set()
    for sock in _open_sockets():
        with sock, suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                address = _address(sock.getsockname())
                if address is not None:
                    addresses.add(address)
    return addresses


def cut(listeners: frozenset[Address]) -> int:
    """Shut down every connection with an end in `listeners`; returns how many."""
    return _visit(listeners, shut_down=True)


def count(listeners: frozenset[Address]) -> int:
    """Number of this process's connections with an end in `listeners`."""
    return _visit(listeners, shut_down=False)


def _visit(listeners: frozenset[Address], *, shut_down: bool) -> int:
    num_found = 0
    for sock in _open_sockets() if listeners else []:
        with sock, suppress(OSError):  # getpeername fails on a listening socket
            if {_address(sock.getsockname()), _address(sock.getpeername())} & listeners:
                num_found += 1
                if shut_down:
                    sock.shutdown(socket.SHUT_RDWR)
    return num_found
