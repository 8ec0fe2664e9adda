"""`muster run` before anything is started: what is refused, what processes inherit."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config import RunConfig
from launch.local import base_environment, run
from launch.run_dir import RunDir


def _config(tmp_path: Path, **sections: object) -> RunConfig:
    return RunConfig.model_validate({"output_dir": tmp_path / "run", **sections})


def test_a_directory_whose_run_is_alive_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = RunDir(tmp_path / "run")
    assert run(_config(tmp_path)) == 1
    assert "belongs to a run that is alive: muster run, pid" in capsys.readouterr().out
    owner.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_missing_model_is_refused_and_leaves_no_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path, model={"path": str(tmp_path / "nothing")})
    assert run(config) == 1
    assert "has no config.json: not a model" in capsys.readouterr().out
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == ["plan"]


def test_a_dry_run_beside_a_live_run_is_fine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = RunDir(tmp_path / "run")
    assert run(_config(tmp_path), dry_run=True) == 0
    owner.release()
    assert '"run_id": "muster-dry-run"' in capsys.readouterr().out


def test_processes_inherit_the_environment_without_settings_of_the_command() -> None:
    inherited = {
        "PATH": "/bin",
        "MUSTER_SEED": "3",
        "muster_seed": "3",
        "MUSTER_API_KEY": "k",
        "MUSTER_ADMIN_TOKEN": "of the user",
    }
    assert base_environment(inherited, "fresh") == {
        "PATH": "/bin",
        "MUSTER_API_KEY": "k",
        "MUSTER_ADMIN_TOKEN": "fresh",
    }
