"""Rank 0's half of a transfer: stream parameters as buckets.

    params (one at a time) -> pack the next bucket while earlier ones are on the wire -> digest

Memory: the buckets in flight and the parameters in them, never a copy of the model. A bucket that
is one stretch of a parameter goes out straight from the parameter's memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from transfer.bucket import ParamMeta, Plan, Segment, byte_view, encode_manifest, make_plan
from transfer.digest import Digest
from transfer.errors import TransferError, TransferMismatch
from transfer.group import NUM_IN_FLIGHT, Pending, TransferGroup
from transfer.wire import Header, encode_header


class SendResult(NamedTuple):
    """What went out. `digest` covers all buckets and equals each receiver's."""

    num_bytes: int
    num_buckets: int
    duration_s: float
    digest: str


def send(
    group: TransferGroup,
    params: Iterator[tuple[str, torch.Tensor]],
    manifest: Sequence[ParamMeta],
    *,
    version: int,
    bucket_bytes: int,
    timeout_s: float,
) -> SendResult:
    """Broadcast `params` (in the order, dtypes and shapes of `manifest`) as policy `version`.

    A yielded tensor must stay unchanged until `send` returns. On any error the group is aborted, so
    that no receiver stays blocked, and the error is raised.
    """
    start = time.monotonic()
    sender = _Sender(group, make_plan(manifest, bucket_bytes), start + timeout_s)
    try:
        digest = sender.run(params, version, bucket_bytes)
    except TransferError as exc:
        group.abort(exc.detail)
        raise
    except BaseException as exc:  # the source of parameters failed; the receivers must not wait
        group.abort(f"sender failed: {exc!r}")
        raise
    plan = sender.plan
    return SendResult(plan.num_bytes, len(plan.buckets), time.monotonic() - start, digest)


class _Sender:
    def __init__(self, group: TransferGroup, plan: Plan, deadline: float) -> None:
        self.group = group
        self.plan = plan
        self.deadline = deadline
        self.in_flight: list[Pending] = []
        self.digest = Digest()
        self._buffers: dict[int, torch.Tensor] = {}

    def run(
        self, params: Iterator[tuple[str, torch.Tensor]], version: int, bucket_bytes: int
    ) -> str:
        """The whole wire sequence; returns the digest as hex."""
        manifest = encode_manifest(self.plan.params)
        header = Header(
            generation=self.group.generation,
            version=version,
            manifest_bytes=len(manifest),
            num_bytes=self.plan.num_bytes,
            bucket_bytes=bucket_bytes,
        )
        self._post(encode_header(header).to(self.group.device))
        self._post(torch.frombuffer(bytearray(manifest), dtype=torch.uint8).to(self.group.device))
        source = _Source(self.group, self.plan, params)
        for bucket, segments in enumerate(self.plan.segments()):
            data = self._fill(bucket, segments, source)
            self._post(data)
            self.digest.update(data)
        self._post(
            torch.frombuffer(bytearray(self.digest.digest()), dtype=torch.uint8).to(
                self.group.device
            )
        )
        while self.in_flight:
            self.in_flight.pop(0).wait(self.deadline)
        return self.digest.hexdigest()

    def _post(self, data: torch.Tensor) -> None:
        left = self.deadline - time.monotonic()
        self.in_flight.append(self.group.post(data, timeout_s=left))
        while len(self.in_flight) >= NUM_IN_FLIGHT:
            self.in_flight.pop(0).wait(self.deadline)

    def _fill(self, bucket: int, segments: tuple[Segment, ...], source: _Source) -> torch.Tensor:
        start, end = self.plan.buckets[bucket]
        if len(segments) == 1 and segments[0].nbytes == end - start:
            piece = source.read(segments[0])
            if piece.device == self.group.device and piece.data_ptr() % 8 == 0:
                return piece
        data = self._buffer(bucket)[: end - start]
        filled = 0
        for segment in segments:
            data[filled : segment.bucket_start].zero_()  # padding: equal bytes, equal digest
            filled = segment.bucket_start + segment.nbytes
            data[segment.bucket_start : filled].copy_(source.read(segment))
        data[filled:].zero_()
        return data

    def _buffer(self, bucket: int) -> torch.Tensor:
        """A packing buffer that no operation in flight uses."""
        slot = bucket % NUM_IN_FLIGHT
        if slot not in self._buffers:
            self._buffers[slot] = torch.empty(
                self.plan.max_bucket_bytes, dtype=torch.uint8, device=self.group.device
            )
        return self._buffers[slot]


class _Source:
    """Reads segments out of a stream of parameters, holding one parameter at a time."""

    def __init__(
        self, group: TransferGroup, plan: Plan, params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._group = group
        self._plan = plan
        self._params = iter(params)
        self._index = -1
        self._data = torch.empty(0, dtype=torch.uint8)

    def read(self, segment: Segment) -> torch.Tensor:
        """uint8 view of the segment; segments are asked for in wire order."""
        while self._index < segment.param:
            self._advance()
        return self._data[segment.param_start : segment.param_start + segment.nbytes]

    def _advance(self) -> None:
        self._index += 1
        expected = self._plan.params[self._index]
        name, tensor = next(self._params, ("", torch.empty(0)))
        if ParamMeta.of(name, tensor) != expected:
            detail = f"expected parameter {expected}, got {ParamMeta.of(name, tensor)}"
            raise self._group.error(TransferMismatch, detail, "pack")
        self._data = byte_view(tensor)
