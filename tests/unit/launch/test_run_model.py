"""Where a run's model is, and what happens when it has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config import RunConfig
from launch.run_model import ModelError, ensure_model, model_dir


def _config(path: str) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": path}})


def _python(tmp_path: Path, code: str) -> str:
    """A stand-in for the interpreter that builds models."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_built_models_live_beside_the_runs_and_others_where_they_are(tmp_path: Path) -> None:
    assert model_dir(_config("tiny"), tmp_path / "run") == tmp_path / "models" / "tiny"
    assert model_dir(_config(str(tmp_path / "m")), tmp_path / "run") == tmp_path / "m"


def test_a_directory_with_a_model_is_taken_as_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    config = _config(str(tmp_path))
    with pytest.raises(ModelError, match=r"has no config\.json: not a model"):
        ensure_model(config, tmp_path / "run", mark="m/", say=said.append)
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(config, tmp_path / "run", mark="m/", say=said.append) == tmp_path
    assert said == []


def test_a_named_model_is_built_by_a_process_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    python = _python(tmp_path, 'echo "$@"')
    target = ensure_model(
        _config("tiny"), tmp_path / "run", mark="m/", say=said.append, python=python
    )
    assert target == tmp_path / "models" / "tiny"
    assert said[0].startswith(f"model tiny in {target}, built if need be")
    assert (tmp_path / "run" / "logs" / "model.log").read_text() == (
        f"-m launch.cli tiny-model --kind tiny --output-dir {target}\n"
    )


def test_a_failed_build_says_how_it_ended(tmp_path: Path) -> None:
    python = _python(tmp_path, "echo no room left; exit 3")
    with pytest.raises(ModelError, match=r"failed, exit code 3; log: .*/model\.log\n    no room"):
        ensure_model(
            _config("tiny"), tmp_path / "run", mark="m/", say=lambda _: None, python=python
        )
