"""The model that a run starts from: a directory that exists, or one that is built on first use.

`tiny` and `smollm2` are built beside the output directories of the runs, so that runs share them,
by a process of their own: building imports torch, the launcher does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launch.processes import tail
from launch.sweep import MARK_VARIABLE

if TYPE_CHECKING:
    from launch.config import RunConfig

BUILT_MODELS = ("tiny", "smollm2")
_COMMAND = "tiny-model"
_BUILD_TIMEOUT_S = 900.0
_NUM_LOG_LINES = 5


class ModelError(RuntimeError):
    """The run has no model to start from."""


def model_dir(config: RunConfig, output_dir: Path) -> Path:
    """Where the model of a run is, or will be once it is built."""
    name = config.model.path
    if name in BUILT_MODELS:
        return output_dir.parent / "models" / name
    return Path(name).expanduser().resolve()


def ensure_model(
    config: RunConfig,
    output_dir: Path,
    *,
    mark: str,
    say: Callable[[str], None],
    python: str = sys.executable,
) -> Path:
    """Directory of the model, built where it is missing or out of date. Raises ModelError.

    `mark` is put on the process that builds it, so that it does not outlive the launcher.
    """
    name = config.model.path
    target = model_dir(config, output_dir)
    if name not in BUILT_MODELS:
        if not (target / "config.json").is_file():
            raise ModelError(f"model.path = {name}: {target} has no config.json: not a model")
        return target
    log = output_dir / "logs" / "model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"model {name} in {target}, built if need be; log: {log}")
    flags = ("--kind", name, "--output-dir", str(target))
    try:
        with log.open("ab") as output:
            code = subprocess.run(
                [python, "-m", "launch.cli", _COMMAND, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK_VARIABLE: mark},
                timeout=_BUILD_TIMEOUT_S,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"building model {name} took more than {_BUILD_TIMEOUT_S:g} s; log: {log}"
        ) from None
    if code != 0:
        lines = "\n".join(f"    {line}" for line in tail(log, _NUM_LOG_LINES))
        raise ModelError(f"building model {name} failed, exit code {code}; log: {log}\n{lines}")
    return target
