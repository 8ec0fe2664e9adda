"""Ports of one run, chosen so that two runs on one machine never share one.

A port is ours when three things hold: it lies below the range that the system hands out for
outgoing connections (an outgoing connection can never take it away between choice and use), we
hold an exclusive `flock` on its lock file (another run that starts in the same second skips it),
and a bind to it succeeds now (nobody else listens). The lock is held until `release`, so a port
stays ours while an engine behind it is relaunched. The kernel drops the locks of a killed run.

Candidates are tried in ascending order: same machine state, same ports.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from launch.locks import try_lock, unlock

CanBind = Callable[[str, int], bool]
_EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Linux's default, for systems that do not publish theirs.
_EPHEMERAL_RANGE_DEFAULT = (32768, 60999)
# Not what TMPDIR says: two runs must look for one another's locks in the same place.
_RUNTIME_ROOT = Path("/tmp")


class PortsExhausted(RuntimeError):
    """The allowed range has too few free ports."""


def ephemeral_range(path: Path = _EPHEMERAL_RANGE_FILE) -> tuple[int, int]:
    """Ports (both ends included) that the system uses for outgoing connections."""
    try:
        low, high = path.read_text().split()
    except (OSError, ValueError):
        return _EPHEMERAL_RANGE_DEFAULT
    return int(low), int(high)


def candidates(first: int, last: int, ephemeral: tuple[int, int]) -> Iterable[int]:
    """Ports `first` to `last` in ascending order, without the ephemeral ones."""
    return (port for port in range(first, last + 1) if not ephemeral[0] <= port <= ephemeral[1])


def can_bind(host: str, port: int) -> bool:
    """Whether a server could listen on `host:port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: old connections in TIME_WAIT do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def runtime_dir_path() -> Path:
    """Where this user's locks and short-lived files are."""
    return _RUNTIME_ROOT / f"muster-{os.getuid()}"


def runtime_dir() -> Path:
    """`runtime_dir_path`, made on first use. PermissionError when somebody else owns it."""
    path = runtime_dir_path()
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} exists and is not a directory of user {os.getuid()}")
    return path


@dataclass
class PortLease:
    """Ports by name, held until `release`. Use as a context manager."""

    ports: Mapping[str, int]
    _locks: dict[Path, int] = field(repr=False)

    def release(self) -> None:
        """Give the ports back and remove the lock files. Idempotent."""
        for path, fd in self._locks.items():
            unlock(path, fd)
        self._locks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def free_ports(
    names: Sequence[str], ports: Iterable[int], *, host: str, is_free: CanBind = can_bind
) -> dict[str, int]:
    """A free port for each name, held by nobody: for plans that are only looked at."""
    free = [port for port, _ in zip((p for p in ports if is_free(host, p)), names, strict=False)]
    if len(free) < len(names):
        raise _exhausted(len(free), len(names))
    return dict(zip(names, free, strict=True))


def lease_ports(
    names: Sequence[str],
    ports: Iterable[int],
    *,
    directory: Path | None = None,
    host: str = "127.0.0.1",
    is_free: CanBind = can_bind,
) -> PortLease:
    """Hold one port of `ports` for each of `names`; the first free ones, in order.

    Lock files are `directory/port-<number>.lock`; all runs of a machine must use the same
    directory, which is the default. Raises PortsExhausted, holding nothing.
    """
    if directory is None:
        directory = runtime_dir() / "ports"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lease = PortLease({}, {})
    chosen: dict[str, int] = {}
    waiting = list(reversed(names))
    try:
        for port in ports:
            if not waiting:
                break
            path = directory / f"port-{port}.lock"
            fd = try_lock(path)
            if fd is None:
                continue
            lease._locks[path] = fd
            if is_free(host, port):
                chosen[waiting.pop()] = port
            else:
                unlock(path, lease._locks.pop(path))
        if waiting:
            raise _exhausted(len(chosen), len(names))
    except BaseException:
        lease.release()
        raise
    lease.ports = chosen
    return lease


def _exhausted(num_free: int, num_needed: int) -> PortsExhausted:
    return PortsExhausted(
        f"only {num_free} of {num_needed} ports are free in the allowed range: "
        "widen deployment.first_port and deployment.last_port, or end other runs"
    )
