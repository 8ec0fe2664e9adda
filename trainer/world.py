"""The trainer's own ranks: how they meet, what rank 0 tells the others.

Apart from the transfer generations, which have groups of their own. Every rank makes the same calls
in the same order; control bytes travel over Gloo on the CPU, tensors of a CUDA model over NCCL.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import RankEnvironment


class World:
    """All ranks of one trainer. `close` when done."""

    def __init__(self, place: RankEnvironment, *, timeout_s: float, has_rendezvous: bool) -> None:
        """Meet the other ranks; blocks up to `timeout_s`. Raises torch's DistError."""
        self.rank = place.rank
        self.size = place.world_size
        self.device = torch.device("cpu")
        backend = "gloo"
        if torch.cuda.is_available():
            self.device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        if self.size == 1 or not has_rendezvous:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            dist.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=timeout)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def share_int(self, value: int = 0) -> int:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    def share_bytes(self, data: bytes = b"") -> bytes:
        """Rank 0's `data` on every rank."""
        if self.size == 1:
            return data
        size = self.share_int(len(data))
        tensor = torch.empty(size, dtype=torch.uint8)
        if self.is_first and size:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return bytes(tensor.numpy().tobytes())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of a float64 CPU tensor."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks of a float64 CPU tensor."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1, dtype=torch.float64))

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()
