"""Where each parameter's bytes lie, in memory and on the wire. Pure: no group, device or clock.

All parameters lie one after the other in one flat range of bytes, each start aligned to 64. The
wire carries that range in buckets of at most `bucket_bytes`: neighbouring small parameters share
buckets, a parameter of `DIRECT_BYTES` or more has its own (as many as it needs), so that it can be
sent from where it lies. Either kind may be split over buckets. A receiver that has room for the
flat range receives in place and reads parameters as views; a sender needs no more than the buckets
in flight.

The sender's manifest (names, dtypes, shapes, in wire order) is all a receiver needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch

ALIGNMENT = 64
DIRECT_BYTES = 1 << 20  # copying less costs less than another broadcast


class ParamMeta(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype (torch's name without `torch.`) and shape of one parameter."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> ParamMeta:
        """Meta of `tensor`, as it looks after a cast to `dtype`."""
        return cls(name, str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it. Raises ValueError for a name that is none."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            message = f"parameter {self.name!r} has unknown dtype {self.dtype!r}"
            raise ValueError(message)  # noqa: TRY004
        return dtype

    @property
    def nbytes(self) -> int:
        """Size without padding."""
        return math.prod(self.shape) * int(self.torch_dtype.itemsize)


class Segment(NamedTuple):
    """`nbytes` bytes from `param_start` of a parameter lie at `bucket_start` of a bucket."""

    param: int
    param_start: int
    bucket_start: int
    nbytes: int


class Plan(NamedTuple):
    """The whole layout. `offsets[p]` is where parameter p starts in the flat range of `flat_bytes`;
    bucket b carries bytes [start, end) = `buckets[b]` of it."""

    params: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]
    flat_bytes: int
    buckets: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """Payload on the wire."""
        return sum(end - start for start, end in self.buckets)

    @property
    def max_bucket_bytes(self) -> int:
        """Size of the largest bucket."""
        return max((end - start for start, end in self.buckets), default=0)

    def segments(self) -> Iterator[tuple[Segment, ...]]:
        """Per bucket, the pieces of parameters in it. Gaps between pieces are padding."""
        first = 0
        for start, end in self.buckets:
            while first < len(self.params) and self._end(first) <= start:
                first += 1
            pieces = []
            param = first
            while param < len(self.params) and self.offsets[param] < end:
                low, high = max(start, self.offsets[param]), min(end, self._end(param))
                if low < high:
                    at = self.offsets[param]
                    pieces.append(Segment(param, low - at, low - start, high - low))
                param += 1
            yield tuple(pieces)

    def _end(self, param: int) -> int:
        return self.offsets[param] + self.params[param].nbytes


def make_plan(params: Sequence[ParamMeta], bucket_bytes: int) -> Plan:
    """Lay out `params` in order. Raises ValueError for a bucket size that is not a positive
    multiple of the alignment, or for a name that occurs twice."""
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise ValueError(f"bucket_bytes {bucket_bytes} is not a positive multiple of {ALIGNMENT}")
    if len({meta.name for meta in params}) != len(params):
        raise ValueError("parameter names are not unique")
    offsets: list[int] = []
    runs: list[tuple[int, int]] = []  # [start, end) of a large parameter or a run of small ones
    end, is_open = 0, False
    for meta in params:
        offsets.append(end)
        stop = end + meta.nbytes
        is_small = meta.nbytes < DIRECT_BYTES
        if is_small and is_open:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((end, stop))
        is_open = is_small
        end = -(-stop // ALIGNMENT) * ALIGNMENT
    buckets = tuple(
        (low, min(low + bucket_bytes, high))
        for start, high in runs
        for low in range(start, high, bucket_bytes)
    )
    return Plan(tuple(params), tuple(offsets), end, buckets)


def encode_manifest(params: Sequence[ParamMeta]) -> bytes:
    """Parameters -> bytes."""
    return msgspec.msgpack.encode(list(params))


def decode_manifest(data: bytes) -> tuple[ParamMeta, ...]:
    """Inverse of `encode_manifest`. Raises msgspec.DecodeError for other bytes."""
    return tuple(msgspec.msgpack.decode(data, type=list[ParamMeta]))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as flat uint8 [nbytes]; a view where it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def read_param(flat: torch.Tensor, plan: Plan, param: int) -> torch.Tensor:
    """Parameter `param` as a view of the flat uint8 range."""
    meta, start = plan.params[param], plan.offsets[param]
    return flat[start : start + meta.nbytes].view(meta.torch_dtype).view(meta.shape)
