"""Find and end what a process left running. Standard library only, synchronous.

A process of a run carries a mark in its environment, `_MUSTER_LAUNCH=<launch id>/<name>.<life>/`,
and so do all its descendants, whatever session they moved to. Sessions, process groups and parents
can be left; the environment a process was started with stays readable in /proc. So a mark names
exactly what one launch started: nothing of another run, nothing by name.

Rules: a leftover gets SIGTERM, then time, then SIGKILL. Python's resource tracker goes last: it
unlinks the shared memory of the dead, ignores SIGTERM and ends by itself when the others are gone.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK_VARIABLE = "_MUSTER_LAUNCH"
_TRACKER = b"multiprocessing.resource_tracker"
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Found:
    """A living process that carries a mark."""

    pid: int
    argv: bytes

    @property
    def is_tracker(self) -> bool:
        """Whether this is a resource tracker of Python's multiprocessing."""
        return _TRACKER in self.argv

    def __str__(self) -> str:
        """Pid and what it runs, for messages."""
        words = self.argv.replace(b"\0", b" ").decode(errors="replace").strip()
        return f"{self.pid} ({words[:80] or '?'})"


def find_marked(mark: str, *, ignore: Sequence[int] = ()) -> list[Found]:
    """Living processes whose mark starts with `mark`, by pid. Zombies do not live."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir(_PROC):
        if not name.isdigit() or int(name) in ignore:
            continue
        folder = _PROC / name
        try:
            environ = (folder / "environ").read_bytes()
            if not any(item.startswith(wanted) for item in environ.split(b"\0")):
                continue
            found.append(Found(int(name), (folder / "cmdline").read_bytes()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or somebody else's
    return sorted(found, key=lambda process: process.pid)


def end_marked(mark: str, *, grace_s: float, ignore: Sequence[int] = ()) -> list[Found]:
    """End every process whose mark starts with `mark`; returns what had been left running.

    Takes at most about three times `grace_s`, nothing at all when nothing is left.
    """
    first = find_marked(mark, ignore=ignore)
    if not first:
        return []
    _signal_all((p.pid for p in first if not p.is_tracker), signal.SIGTERM)
    wait_gone([p.pid for p in first], grace_s)
    rest = find_marked(mark, ignore=ignore)
    _signal_all((p.pid for p in rest if not p.is_tracker), signal.SIGKILL)
    wait_gone([p.pid for p in rest], grace_s)
    rest = find_marked(mark, ignore=ignore)
    _signal_all((p.pid for p in rest), signal.SIGKILL)
    wait_gone([p.pid for p in rest], grace_s)
    return first


def wait_gone(pids: Iterable[int], timeout_s: float) -> bool:
    """Wait until none of `pids` runs any more; False when time was up first."""
    poller = select.poll()
    fds: set[int] = set()
    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            fds.add(fd)
            poller.register(fd, select.POLLIN)
        waiting = set(fds)
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            for fd, _ in poller.poll(left_s * 1000):
                poller.unregister(fd)
                waiting.discard(fd)
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
