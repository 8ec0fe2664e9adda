"""The output directory of one run: who owns it, and the files that the launcher writes there.

| file | content |
|---|---|
| `run.lock` | pid of the launcher; locked while the run is alive |
| `admin_token` | bearer token of the admin routes, mode 0600 |
| `plan/*.json` | resolved config of each process, and `plan.json`: what is started |
| `groups.json` | `protocol.launcher_api.GroupsView` |
| `processes.json` | name, pid, start time and life of everything that runs |
| `logs/` | one file a process and life |
| `earlier/` | the journal of the run before, which this one must not go on with |

Rules: files that others read while we write change by atomic rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from launch.locks import try_lock, unlock
from launch.run_secrets import write_secret

# Files of an earlier run that this one would otherwise append to or be misread with.
STALE_FILES = ("groups.json", "processes.json", "admin_token")


class RunIsAlive(RuntimeError):
    """Another launcher owns the output directory."""


class RunDir:
    """An output directory that this launcher owns until `release`."""

    def __init__(self, path: Path) -> None:
        """Take ownership. Raises RunIsAlive, naming the pid, when another run has it."""
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock_path = path / "run.lock"
        fd = try_lock(self._lock_path)
        if fd is None:
            pid = self._lock_path.read_text().strip() or "unknown"
            raise RunIsAlive(f"{path} belongs to a run that is alive: muster run, pid {pid}")
        self._fd: int | None = fd
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        for name in STALE_FILES:
            (path / name).unlink(missing_ok=True)
        _set_aside(sorted(path.glob("journal*.jsonl")), path / "earlier")

    def write(self, name: str, text: str) -> None:
        """Replace file `name` (relative) by `text`, in one step for its readers."""
        write_atomic(self.path / name, text)

    def write_token(self, token: str) -> None:
        """Leave the admin token to whoever may read the owner's files."""
        write_secret(self.path / "admin_token", token)

    def release(self) -> None:
        """Give the directory back. The token dies with the run. Idempotent."""
        if self._fd is not None:
            (self.path / "admin_token").unlink(missing_ok=True)
            unlock(self._lock_path, self._fd)
            self._fd = None


def _set_aside(files: list[Path], directory: Path) -> None:
    """Move `files` to `directory`, in place of what is there."""
    if not files:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for file in files:
        file.rename(directory / file.name)


def write_plan_files(path: Path, files: Mapping[str, str]) -> None:
    """Write `files` (name to text) under `path`/plan."""
    for name, text in files.items():
        write_atomic(path / "plan" / name, text)


def write_atomic(path: Path, text: str) -> None:
    """Replace `path`; a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
