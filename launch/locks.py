"""Lock files: exclusive between processes, dropped by the kernel when the holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """File descriptor that holds the lock of `path`, or None where another process does."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # A holder that released between our open and our lock has removed this file: what we
        # locked has no name any more and would protect nothing.
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def unlock(path: Path, fd: int) -> None:
    """Remove the lock file and drop the lock. Removed while still locked: see `try_lock`."""
    path.unlink(missing_ok=True)
    os.close(fd)
