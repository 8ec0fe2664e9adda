"""Put staged tensors into the model that vLLM serves, all of them or loudly not.

vLLM may have repacked, fused and sharded what a checkpoint calls its parameters, so staged tensors
go through the model's own loader, layer by layer, into the memory that compiled graphs know. A load
that fails half-way leaves a model that holds no version; its structure is put in order again, so
that a complete later load succeeds.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise

# It warns of every layer that gets no tensors, tied and rotary ones included; we check ourselves.
logging.getLogger(layerwise.__name__).setLevel(logging.ERROR)


class LoadMismatch(ValueError):
    """The tensors are not the model's."""


def load_staged(
    model: torch.nn.Module, model_config: Any, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Load checkpoint-named `tensors`. Raises LoadMismatch when some parameter of the model is not
    covered, and whatever the model's loader raises."""
    aliases = _aliases(model)
    layerwise.initialize_layerwise_reload(model)
    waiting: list[torch.nn.Module] = []
    try:
        expected = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(tensors)
        if loaded is not None and model_config.quantization is None:
            # Else it cannot be checked: a quantized checkpoint has fewer tensors than the model has
            # parameters, and some models do not say what they loaded.
            _check_complete(expected, _with_aliases(loaded, aliases))
        waiting = [layer for layer in model.modules() if _got_nothing(layer)]
    except BaseException:
        _forget_partial_layers(model)
        raise
    finally:
        layerwise.finalize_layerwise_reload(model, model_config)
    _process_tied(model, waiting)


def _aliases(model: torch.nn.Module) -> list[set[str]]:
    """Names of parameters that are one tensor (tied embeddings)."""
    names: dict[int, set[str]] = defaultdict(set)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].add(name)
    return [group for group in names.values() if len(group) > 1]


def _with_aliases(loaded: set[str], aliases: list[set[str]]) -> set[str]:
    return loaded.union(*(group for group in aliases if group & loaded))


def _check_complete(expected: set[str], loaded: set[str]) -> None:
    missing = sorted(expected - loaded)
    if missing:
        raise LoadMismatch(f"{len(missing)} parameters got no weights: {', '.join(missing[:5])}")


def _got_nothing(layer: torch.nn.Module) -> bool:
    info = layerwise.get_layerwise_info(layer)
    return info.can_load() and info.load_numel == 0


def _process_tied(model: torch.nn.Module, waiting: list[torch.nn.Module]) -> None:
    """Layers that got nothing themselves but share a tensor with one that did (a tied output layer)
    must pack the new values anew: on CPUs they compute with a packed copy."""
    shared = {id(p) for p in _shared_parameters(model)}
    for layer in waiting:
        method = getattr(layer, "quant_method", None)
        own = {id(param) for param in layer.parameters(recurse=False)}
        if isinstance(method, QuantizeMethodBase) and own & shared:
            method.process_weights_after_loading(layer)


def _shared_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    counts: dict[int, int] = defaultdict(int)
    params = [param for _, param in model.named_parameters(remove_duplicate=False)]
    for param in params:
        counts[id(param)] += 1
    return [param for param in params if counts[id(param)] > 1]


def _forget_partial_layers(model: torch.nn.Module) -> None:
    """Layers that still wait for tensors get their old ones back when the reload is finalized."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
