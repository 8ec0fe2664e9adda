"""The tiny model: its tokenizer, its files, and that a seed gives the same weights every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import tiny_model
from launch.model_dir import MANIFEST, ModelBuildError
from launch.tiny_model_config import TinyModelConfig
from orchestrator.rollouts.reverse_text import INSTRUCTION
from orchestrator.rollouts.tokenizer import PromptTokenizer

pytestmark = pytest.mark.slow  # torch and transformers


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps instead of hundreds; any reward will do."""
    short = {"steps_reversed": 2, "steps_mixed": 1, "batch_size": 4}
    monkeypatch.setattr(tiny_model, "_WARM_UP", tiny_model._WARM_UP | short)
    monkeypatch.setattr(tiny_model, "_USEFUL_REWARD", (0.0, 1.0))


@pytest.mark.usefixtures("short_warm_up")
def test_a_seed_gives_the_same_weights_and_the_files_that_engines_want(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, again, other = (
        tiny_model.ensure_tiny_model(tmp_path / name, seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    weights = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    manifest = json.loads((first / MANIFEST).read_text())
    assert manifest["recipe"]["seed"] == 0
    assert manifest["facts"]["num_parameters"] == 329_472

    ours, theirs = PromptTokenizer(first), AutoTokenizer.from_pretrained(first)
    user = INSTRUCTION + "abc"
    chat = [{"role": "user", "content": user}]
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    prompt = ours.encode_prompt(user)
    assert prompt == list(rendered)
    assert len(prompt) == 2 + 1 + 3
    end = theirs.eos_token_id
    assert ours.decode([*ours.encode_text("cba"), end]) == "cba"
    assert ours.decode(ours.encode_text("tab\t, umlaut \u00fc")) == "tab\t, umlaut \u00fc"
    model = AutoModelForCausalLM.from_pretrained(first)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end


@pytest.mark.usefixtures("short_warm_up")
def test_a_model_with_nothing_to_learn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny_model, "_USEFUL_REWARD", (0.99, 1.0))
    with pytest.raises(ModelBuildError, match=r"of seed 0 is outside 0\.99 to 1\.0; choose"):
        tiny_model.ensure_tiny_model(tmp_path / "a", 0)
    assert tiny_model.run(TinyModelConfig(output_dir=tmp_path / "a", seed=0)) == 1
    assert "muster tiny-model: mean reward" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
