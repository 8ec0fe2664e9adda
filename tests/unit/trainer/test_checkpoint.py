from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.batches import make_batch
from trainer.checkpoint import MANIFEST, CheckpointError, Checkpoints, newest, read_manifest
from trainer.config import TrainerConfig
from trainer.learner import Learner
from trainer.model import load_model, wire_layers
from trainer.world import World


def make_learner(path: Path, world: World) -> Learner:
    return Learner(load_model(path, world), world, TrainerConfig())


def make_checkpoints(root: Path, world: World, model_path: Path, *, keep: int = 2) -> Checkpoints:
    return Checkpoints(root, world, model_path=model_path, keep=keep)


def wire_weights(learner: Learner, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor for layer in wire_layers(learner.model, dtype) for name, tensor in layer}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_file_bytes", [1 << 30, 1000])
def test_transformers_loads_what_engines_hold(
    model_path: Path,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: torch.dtype,
    max_file_bytes: int,
) -> None:
    monkeypatch.setattr("trainer.checkpoint._MAX_FILE_BYTES", max_file_bytes)
    learner = make_learner(model_path, world)
    learner.train(make_batch(0))
    path = make_checkpoints(tmp_path, world, model_path).save(learner, run_id="r", dtype=dtype)
    assert path == tmp_path / "v000001"
    num_files = len(list(path.glob("*.safetensors")))
    assert num_files == (1 if max_file_bytes > 1000 else 4)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert loaded.dtype == dtype
    expected = wire_weights(learner, dtype)
    torch.testing.assert_close(dict(loaded.named_parameters()), expected, atol=0, rtol=0)
    manifest = read_manifest(path, check_hashes=True)
    assert manifest is not None
    assert (manifest.run_id, manifest.version, manifest.num_ranks) == ("r", 1, 1)
    assert set(manifest.files) == {item.name for item in path.iterdir()} - {MANIFEST}


def test_resume_is_exact(model_path: Path, world: World, tmp_path: Path) -> None:
    straight = make_learner(model_path, world)
    for step in range(4):
        straight.train(make_batch(step))
    first = make_learner(model_path, world)
    for step in range(2):
        first.train(make_batch(step))
    checkpoints = make_checkpoints(tmp_path, world, model_path)
    # Wire weights in bfloat16: the master weights must come from elsewhere.
    checkpoints.save(first, run_id="r", dtype=torch.bfloat16)
    second = make_learner(model_path, world)
    assert checkpoints.restore(second) == 2
    assert second.version == 2
    for step in range(2, 4):
        second.train(make_batch(step))
    torch.testing.assert_close(wire_weights(second), wire_weights(straight), atol=0, rtol=0)


def test_nothing_to_resume(model_path: Path, world: World, tmp_path: Path) -> None:
    learner = make_learner(model_path, world)
    assert make_checkpoints(tmp_path / "none", world, model_path).restore(learner) is None
    assert learner.version == 0


def test_keeps_the_newest(model_path: Path, world: World, tmp_path: Path) -> None:
    learner = make_learner(model_path, world)
    checkpoints = make_checkpoints(tmp_path, world, model_path, keep=2)
    for version in range(4):
        learner.version = version
        checkpoints.save(learner, run_id="r", dtype=torch.float32)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["v000002", "v000003"]


def test_saving_a_version_again_changes_nothing(
    model_path: Path, world: World, tmp_path: Path
) -> None:
    learner = make_learner(model_path, world)
    checkpoints = make_checkpoints(tmp_path, world, model_path)
    path = checkpoints.save(learner, run_id="r", dtype=torch.float32)
    before = (path / MANIFEST).stat()
    checkpoints.save(learner, run_id="other", dtype=torch.float32)
    assert (path / MANIFEST).stat() == before


def _truncate(path: Path) -> None:
    target = path / "rank0.pt"
    target.write_bytes(target.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)


def _rename_version(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "version": 9}))


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        _rename_version,
        lambda path: (path / "config.json").unlink(),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / MANIFEST).write_text('{"version"'),
        lambda path: path.rename(path.with_name(".v000002.partial")),
    ],
)
def test_incomplete_checkpoint_is_passed_over(
    model_path: Path, world: World, tmp_path: Path, damage: object
) -> None:
    learner = make_learner(model_path, world)
    checkpoints = make_checkpoints(tmp_path, world, model_path)
    for version in (1, 2):
        learner.version = version
        checkpoints.save(learner, run_id="r", dtype=torch.float32)
    damage(tmp_path / "v000002")  # type: ignore[operator]
    found = newest(tmp_path)
    assert found is not None
    assert found[0] == tmp_path / "v000001"
    learner.version = 2  # it can be written again
    checkpoints.save(learner, run_id="r", dtype=torch.float32)
    again = newest(tmp_path)
    assert again is not None
    assert again[1].version == 2


def test_other_number_of_ranks_is_an_error_that_says_what_to_set(
    model_path: Path, world: World, tmp_path: Path
) -> None:
    learner = make_learner(model_path, world)
    checkpoints = make_checkpoints(tmp_path, world, model_path)
    path = checkpoints.save(learner, run_id="r", dtype=torch.float32)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "num_ranks": 4}))
    with pytest.raises(CheckpointError, match=r"by 4 ranks.* set trainer.num_ranks = 4"):
        checkpoints.restore(learner)


def test_other_model_is_an_error(model_path: Path, world: World, tmp_path: Path) -> None:
    learner = make_learner(model_path, world)
    checkpoints = make_checkpoints(tmp_path, world, model_path)
    path = checkpoints.save(learner, run_id="r", dtype=torch.float32)
    state = torch.load(path / "rank0.pt", weights_only=True)
    state["model.extra.weight"] = {"param": torch.zeros(1)}
    torch.save(state, path / "rank0.pt")
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["files"]["rank0.pt"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"other parameters: \['model.extra.weight'\]"):
        checkpoints.restore(learner)
