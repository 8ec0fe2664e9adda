"""Put staged tensors into the model that vLLM serves, all of them or loudly not.

vLLM may have repacked, fused and sharded what a checkpoint calls its parameters, so staged tensors
go through the model's own loader, layer by layer, into the memory that compiled graphs know. A load
that fails half-way leaves a model that holds no version; its structure is put in order again, so
that a complete later load succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)


class LoadMismatch(ValueError):
    """The tensors are not the model's."""


def load_staged(
    model: torch.nn.Module, model_config: Any, tensors: Iterator[tuple[str, torch.Tensor]]
) -> int:
    """Load checkpoint-named `tensors`; returns how many. Raises LoadMismatch when some parameter of
    the model is not covered, and whatever the model's loader raises."""
    seen: list[str] = []
    # Before the reload: it gives tied parameters a name each, and they come once.
    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(_noting(tensors, seen))
        _check_complete(expected, loaded, is_quantized=model_config.quantization is not None)
    except BaseException:
        _forget_partial_layers(model)
        raise
    finally:
        finalize_layerwise_reload(model, model_config)
    return len(seen)


def _noting(
    tensors: Iterator[tuple[str, torch.Tensor]], seen: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        seen.append(name)
        yield name, tensor


def _check_complete(expected: set[str], loaded: set[str] | None, *, is_quantized: bool) -> None:
    """A quantized checkpoint has fewer tensors than the model has parameters; some models do not
    say what they loaded. Neither can be checked."""
    if loaded is None or is_quantized:
        return
    missing = sorted(expected - loaded)
    if missing:
        shown = ", ".join(missing[:5])
        raise LoadMismatch(f"{len(missing)} parameters got no weights: {shown}")


def _forget_partial_layers(model: torch.nn.Module) -> None:
    """Layers that still wait for tensors get their old ones back when the reload is finalized."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
