"""Ship the current weights over a generation: all trainer ranks gather, rank 0 sends.

Before each layer rank 0 tells the others whether to go on, so that a transfer which fails on rank 0
ends on all ranks at the same layer and nobody waits in a gather that never comes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from trainer.model import wire_layers, wire_metas
from trainer.world import World
from transfer.bucket import make_plan
from transfer.group import TransferGroup
from transfer.send import SendResult, send

_GO_ON = 1
_OVER = 0


class Sender:
    """Sends the weights of `model` as they are at the call."""

    def __init__(
        self, model: nn.Module, world: World, *, dtype: torch.dtype, bucket_bytes: int
    ) -> None:
        self._model = model
        self._world = world
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self.manifest = wire_metas(model, dtype)

    @property
    def num_bytes(self) -> int:
        """Payload of one transfer."""
        return make_plan(self.manifest, self._bucket_bytes).num_bytes

    def send(self, group: TransferGroup, *, version: int, timeout_s: float) -> SendResult:
        """Rank 0. Blocks; raises TransferError, and all ranks are free again either way."""
        stream = _Stream(self._model, self._dtype, self._world)
        try:
            return send(
                group,
                stream,
                self.manifest,
                version=version,
                bucket_bytes=self._bucket_bytes,
                timeout_s=timeout_s,
            )
        finally:
            stream.close()  # tells the other ranks when the transfer ended early

    def follow(self) -> None:
        """The other ranks, at the same time as `send`: take part in the gathers."""
        layers = wire_layers(self._model, self._dtype)
        while self._world.share_int() == _GO_ON:
            next(layers)


class _Stream(Iterator[tuple[str, torch.Tensor]]):
    """Full parameters in manifest order. `close` must be called, however far it came.

    The number of layers is known beforehand, so rank 0 need not ask for a layer that is not there.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, world: World) -> None:
        self._layers = wire_layers(model, dtype)
        self._num_left = len(wire_metas(model, dtype))
        self._world = world
        self._ready: list[tuple[str, torch.Tensor]] = []
        self._is_over = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        """The next parameter; gathers a layer when the last one is used up."""
        if self._num_left == 0:
            raise StopIteration
        if not self._ready:
            self._world.share_int(_GO_ON)
            self._ready = next(self._layers)
        self._num_left -= 1
        return self._ready.pop(0)

    def close(self) -> None:
        """Let the other ranks go. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._world.share_int(_OVER)
