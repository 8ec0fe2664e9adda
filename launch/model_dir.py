"""Model directories that are built on this machine: whole or not there, built once.

A directory is built beside its final place and renamed; the manifest that is written last says what
it was built from. It is skipped when the manifest asks for nothing else. Two builders of the same
directory wait for one another.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.locks import try_lock, unlock

MANIFEST = "muster_model.json"
_LOCK_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.2

Progress = Callable[[str], None]


class ModelBuildError(RuntimeError):
    """A model cannot be built; the message says what to do about it."""


def ensure_model_dir(
    target: Path,
    recipe: dict[str, Any],
    build: Callable[[Path], dict[str, Any]],
    progress: Progress,
) -> Path:
    """Directory `target` built by `build(empty directory) -> facts`, unless one of the same
    `recipe` (JSON values) is there already. Returns `target` as an absolute path.

    Raises ModelBuildError when `target` holds something that was not built here.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, progress):
        if read_recipe(target) == recipe:
            progress(f"{target}: there already")
            return target
        if target.exists() and not (target / MANIFEST).is_file() and any(target.iterdir()):
            raise ModelBuildError(
                f"{target} is not empty and was not built by this command; name another directory"
            )
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            facts = build(partial)
            manifest = {"recipe": recipe, "facts": facts}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            _replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def read_recipe(target: Path) -> dict[str, Any] | None:
    """What `target` was built from; None when there is no whole model built here."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    recipe = manifest.get("recipe") if isinstance(manifest, dict) else None
    return recipe if isinstance(recipe, dict) else None


def _replace(partial: Path, target: Path) -> None:
    """Put `partial` in the place of `target`. A directory cannot be renamed over a full one."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    path = target.with_name(f".{target.name}.lock")
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    fd = try_lock(path)
    if fd is None:
        progress(f"waiting for another process that builds {target}")
    while fd is None:
        if time.monotonic() >= deadline:
            raise ModelBuildError(f"another process has held {path} for {_LOCK_TIMEOUT_S:g} s")
        time.sleep(_LOCK_POLL_S)
        fd = try_lock(path)
    try:
        yield
    finally:
        unlock(path, fd)
