"""Accounting: only what our own processes used, and only once nobody uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launch.accounting import Leftovers, ShmLedger, settle, used_files
from launch.sweep import Found

_HOLD = """
import mmap, sys
files = [open(name, "r+b") for name in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 1) for file in files]
files[0].close()
print("up", flush=True)
sys.stdin.readline()
"""


def _files(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(b"x")


def _holder(mark: str, *paths: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "_MUSTER_LAUNCH": mark},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_only_files_that_our_processes_used_are_orphans(tmp_path: Path) -> None:
    mark = f"test-{os.urandom(4).hex()}/"
    _files(tmp_path, "mapped", "open", "foreign", "shared")
    ledger = ShmLedger(mark, tmp_path)
    ours = _holder(f"{mark}a.0/", tmp_path / "mapped", tmp_path / "open", tmp_path / "shared")
    other = _holder("somebody-else/", tmp_path / "foreign", tmp_path / "shared")
    try:
        ledger.note()
        assert ledger.orphans() == []
        _end(ours)
        assert ledger.remove_orphans() == ["mapped", "open"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "shared"]
    finally:
        _end(ours)
        _end(other)


def test_a_deleted_file_is_not_in_use(tmp_path: Path) -> None:
    _files(tmp_path, "gone")
    holder = _holder("x/", tmp_path / "gone")
    try:
        assert used_files(tmp_path, [holder.pid]) == {"gone"}
        (tmp_path / "gone").unlink()
        assert used_files(tmp_path, [holder.pid]) == set()
    finally:
        _end(holder)


def test_settle_names_what_it_found(tmp_path: Path) -> None:
    mark = f"test-{os.urandom(4).hex()}/"
    left = settle(
        mark,
        {"router": 1, "trainer": 2},
        ShmLedger(mark, tmp_path),
        host="127.0.0.1",
        is_free=lambda host, port: port != 2,
    )
    assert str(left) == "still in use: port 2 (trainer)"
    found = Leftovers(processes=(Found(7, b"python\0-c\0pass\0"),), shm=("a",))
    assert str(found) == "ended 7 (python -c pass); removed /dev/shm/a"
    assert str(Leftovers()) == "no process, port or shared memory left behind"
