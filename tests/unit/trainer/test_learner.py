from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.config import ModelConfig
from protocol.records import TrainBatch
from tests.batches import make_batch
from tests.models import build_tiny_qwen3
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.learner import Learner
from trainer.model import load_model, wire_dtype, wire_layers, wire_metas
from trainer.world import World
from transfer.bucket import ParamMeta

# AdamW's first step is the gradient's sign unless epsilon is large: rounding would decide.
SMOOTH = {"epsilon": 1e-2}


def make_learner(path: Path, world: World, **changes: object) -> Learner:
    config = TrainerConfig.model_validate({"optimizer": SMOOTH, **changes})
    return Learner(load_model(path, world), world, config)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for layer in wire_layers(learner.model, torch.float32)
        for name, tensor in layer
    }


def reference_step(path: Path, batch: TrainBatch, config: OptimizerConfig) -> dict[str, object]:
    """One step in plain transformers: no FSDP, one unpadded sample at a time, PPO written out."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    num_tokens = sum(len(sample.logprobs) for sample in batch.samples)
    loss = torch.zeros(())
    for sample in batch.samples:
        tokens = torch.tensor([sample.token_ids])
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None])[sample.num_prompt_tokens - 1 :, 0]
        ratio = (chosen - torch.tensor(sample.logprobs)).exp().clamp(max=10.0)
        advantage = torch.tensor(sample.advantage)
        clipped = ratio.clamp(0.8, 1.28)
        loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum() / num_tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    ).step()
    return {
        "loss": loss.item(),
        "grad_norm": norm.item(),
        "weights": {name: param.detach() for name, param in model.named_parameters()},
    }


def test_step_equals_plain_transformers(model_path: Path, world: World) -> None:
    batch = make_batch(0)
    learner = make_learner(model_path, world)
    values = learner.train(batch)
    expected = reference_step(model_path, batch, OptimizerConfig(**SMOOTH))
    assert learner.version == 1
    assert values["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert values["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    torch.testing.assert_close(weights(learner), expected["weights"], atol=1e-7, rtol=1e-5)


def test_packing_does_not_change_the_step(model_path: Path, world: World) -> None:
    together = make_learner(model_path, world)
    apart = make_learner(model_path, world, micro_batch_tokens=32, model={"max_model_len": 32})
    batch = make_batch(0)
    values, split_values = together.train(batch), apart.train(batch)
    assert split_values["num_micro_batches"] > values["num_micro_batches"] == 1
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "ratio_max", "clip_fraction"):
        assert split_values[name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), name
    torch.testing.assert_close(weights(together), weights(apart), atol=1e-7, rtol=1e-5)


def test_mismatch_is_zero_when_the_engine_is_the_trainer(model_path: Path, world: World) -> None:
    learner = make_learner(model_path, world)
    batch = make_batch(0)
    samples = []
    for sample in batch.samples:
        tokens = torch.tensor([sample.token_ids])
        with torch.no_grad():
            logprobs = learner.model(tokens).logits[0, :-1].log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None])[sample.num_prompt_tokens - 1 :, 0]
        samples.append(msgspec.structs.replace(sample, logprobs=chosen.tolist()))
    values = learner.train(TrainBatch("test", 0, samples))
    assert values["logprob_mismatch"] < 1e-5
    assert values["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert values["clip_fraction"] == 0
    assert values["on_policy_fraction"] == 1


def test_learning_rate_zero_leaves_the_weights(model_path: Path, world: World) -> None:
    learner = make_learner(model_path, world, optimizer={"learning_rate": 0.0})
    before = weights(learner)
    learner.train(make_batch(0))
    torch.testing.assert_close(weights(learner), before, atol=0, rtol=0)
    assert learner.version == 1


def test_warmup_rises_linearly(model_path: Path, world: World) -> None:
    learner = make_learner(model_path, world, optimizer={"learning_rate": 0.004, "warmup_steps": 4})
    rates = [learner.train(make_batch(step))["learning_rate"] for step in range(6)]
    assert rates == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004, 0.004])


def test_wire_names_dtypes_and_order(model_path: Path, world: World) -> None:
    model = load_model(model_path, world)
    layers = list(wire_layers(model, torch.bfloat16))
    flat = [item for layer in layers for item in layer]
    assert [ParamMeta.of(*item) for item in flat] == wire_metas(model, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in flat)
    names = [name for name, _ in flat]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names  # tied: sent once
    assert [len({name.split(".")[2] for name, _ in layer}) for layer in layers] == [1, 1, 1, 1]


def test_untied_head_is_sent_too(world: World, tmp_path: Path) -> None:
    path = build_tiny_qwen3(tmp_path, seed=1, tie_word_embeddings=False)
    names = [meta.name for meta in wire_metas(load_model(path, world), torch.float32)]
    assert names[-1] == "lm_head.weight"


@pytest.mark.parametrize(
    ("wanted", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float32", "cuda", torch.float32),
    ],
)
def test_wire_dtype(wanted: str, device: str, dtype: torch.dtype) -> None:
    config = ModelConfig.model_validate({"dtype": wanted})
    assert wire_dtype(config, torch.device(device)) == dtype


def test_directory_without_a_model_is_an_error(tmp_path: Path, world: World) -> None:
    with pytest.raises(FileNotFoundError, match="is no Hugging Face model directory"):
        load_model(tmp_path, world)
