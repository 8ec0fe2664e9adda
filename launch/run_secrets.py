"""Secrets of one run. Made anew each time, passed by environment, never in argv or a log."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

# Names are part of the contract between the launcher and every process it starts.
ADMIN_TOKEN_VARIABLE = "MUSTER_ADMIN_TOKEN"
API_KEY_VARIABLE = "MUSTER_API_KEY"
_TOKEN_BYTES = 24


def new_admin_token() -> str:
    """Bearer token of the admin routes of one run."""
    return secrets.token_hex(_TOKEN_BYTES)


def new_run_id(name: str) -> str:
    """Id of one run: its name and eight random digits."""
    return f"{name}-{secrets.token_hex(4)}"


def write_secret(path: Path, secret: str) -> None:
    """Write `secret` for the owner's eyes only, whatever was at `path` before."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret + "\n")
