"""The policy: a Hugging Face causal LM, sharded by FSDP2, and its parameters one layer at a time.

Master weights are float32. On CUDA the forward pass runs in bfloat16 (gradients are reduced in
float32); on the CPU everything is float32. `wire` weights are what engines load and checkpoints
hold: names are Hugging Face's, tied parameters appear once (loaders tie them again).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from protocol.config import ModelConfig
from trainer.world import World
from transfer.bucket import ParamMeta

_LAYER = re.compile(r"^.*?\.\d+\.")


def wire_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """dtype of weights on the wire, in checkpoints and in the engines."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def load_model(path: Path, world: World) -> nn.Module:
    """The model in `path`, sharded over all ranks, in training mode. Raises OSError."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is no Hugging Face model directory: no config.json")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True
    )
    model.config.use_cache = False
    model.to(world.device)
    policy = MixedPrecisionPolicy()
    if world.device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer_classes = set(getattr(model, "_no_split_modules", None) or [])
    for module in list(model.modules()):
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    return model.train()


def wire_metas(model: nn.Module, dtype: torch.dtype) -> list[ParamMeta]:
    """Name, dtype and full shape of every parameter, in the order of `wire_layers`."""
    return [ParamMeta.of(name, param, dtype) for name, param in model.named_parameters()]


def wire_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Full parameters of one layer after the other, as they go to engines.

    Collective: every rank must advance it equally far. Holds one layer at a time.
    """
    for _, layer in groupby(model.named_parameters(), key=lambda item: _layer_of(item[0])):
        yield [(name, _full(param).to(dtype)) for name, param in layer]


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name


def _full(param: torch.Tensor) -> torch.Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or of its optimizer state."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
