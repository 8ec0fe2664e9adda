"""What a run may leave behind on its machine, looked for after its end.

Processes by mark (`launch.sweep`), ports by binding them, shared memory by a ledger: which files of
`/dev/shm` processes of this launch were seen to use. One that still exists after the end, and that
no living process uses, is ours to remove. Nothing is judged by its name, so nothing of another
program is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.ports import CanBind, can_bind
from launch.sweep import Found, end_marked, find_marked

_SHM = Path("/dev/shm")
_PROC = Path("/proc")
_DELETED = " (deleted)"
_END_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What was found after the end. Processes and shared memory have been removed by then."""

    processes: tuple[Found, ...] = ()
    ports: tuple[str, ...] = ()
    shm: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for the user."""
        parts = []
        if self.processes:
            parts.append("ended " + ", ".join(str(found) for found in self.processes))
        if self.ports:
            parts.append("still in use: port " + ", ".join(self.ports))
        if self.shm:
            parts.append("removed " + ", ".join(f"/dev/shm/{name}" for name in self.shm))
        return "; ".join(parts) or "no process, port or shared memory left behind"


class ShmLedger:
    """Shared memory files that the processes of one launch use."""

    def __init__(self, mark: str, directory: Path = _SHM) -> None:
        self._mark = mark
        self._directory = directory
        self._seen: set[str] = set()

    def note(self) -> None:
        """Take down what is in use now. Reads /proc: call it off the event loop."""
        pids = [found.pid for found in find_marked(self._mark)]
        self._seen |= used_files(self._directory, pids)

    def orphans(self) -> list[str]:
        """Names taken down that still exist and that nobody uses any more, sorted."""
        left = sorted(name for name in self._seen if (self._directory / name).exists())
        if not left:
            return []
        used = used_files(self._directory, _all_pids())
        return [name for name in left if name not in used]

    def remove_orphans(self) -> list[str]:
        """Remove `orphans()`; returns their names."""
        names = self.orphans()
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
        return names


def settle(
    mark: str,
    ports: Mapping[str, int],
    ledger: ShmLedger,
    *,
    host: str,
    is_free: CanBind = can_bind,
) -> Leftovers:
    """Account for everything that the launch `mark` used; end and remove what is left."""
    processes = end_marked(mark, grace_s=_END_GRACE_S)
    busy = [f"{port} ({name})" for name, port in ports.items() if not is_free(host, port)]
    return Leftovers(tuple(processes), tuple(busy), tuple(ledger.remove_orphans()))


def used_files(directory: Path, pids: Iterable[int]) -> set[str]:
    """Names of existing files in `directory` that one of `pids` has open or mapped."""
    prefix = f"{directory}/"
    used: set[str] = set()
    for pid in pids:
        folder = _PROC / str(pid)
        try:
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                _, found, name = line.partition(prefix)
                if found:
                    used.add(name)
            # A list, not an iterator: the process may end while its links are read.
            for name in os.listdir(folder / "fd"):
                target = os.readlink(folder / "fd" / name)
                if target.startswith(prefix):
                    used.add(target.removeprefix(prefix))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended while we looked, or somebody else's
    return {name for name in used if not name.endswith(_DELETED)}


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
