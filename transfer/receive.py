"""A receiver's half of a transfer: buckets into staging memory, nothing loaded yet.

    header, manifest -> checked -> room for all bytes -> later buckets arrive while one is digested

Bytes land in one flat staging range, in place where the group's device is the staging device, else
through a ring of device buckets. `Staged.tensors()` are views of it. A transfer that fails leaves
nothing but reusable memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice

import torch

from transfer.bucket import Plan, read_param
from transfer.digest import DIGEST_BYTES, Digest
from transfer.errors import TransferError, TransferMismatch
from transfer.group import NUM_IN_FLIGHT, Pending, TransferGroup
from transfer.wire import decode_header, decode_plan, empty_header


class Staging:
    """Memory for one staged version, kept from transfer to transfer. One user at a time."""

    def __init__(self, device: torch.device | str = "cpu", *, pin: bool | None = None) -> None:
        self.device = torch.device(device)
        wants_pin = torch.cuda.is_available() if pin is None else pin
        self._pin = wants_pin and self.device.type == "cpu"
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes]; overwrites what was taken before."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free before the new one is made
            self._memory = torch.empty(
                num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self._pin
            )
        return self._memory[:num_bytes]

    def free(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class Staged:
    """A complete, checked version in staging memory."""

    def __init__(self, *, generation: int, version: int, plan: Plan, digest: str) -> None:
        self.generation = generation
        self.version = version
        self.num_bytes = plan.num_bytes
        self.digest = digest
        self._plan = plan
        self._flat: torch.Tensor | None = None

    def bind(self, flat: torch.Tensor) -> Staged:
        """Attach the memory that holds the bytes."""
        self._flat = flat
        return self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view of staging memory) in wire order. Raises RuntimeError after `drop`."""
        if self._flat is None:
            raise RuntimeError("staged tensors were dropped")
        for index, meta in enumerate(self._plan.params):
            yield meta.name, read_param(self._flat, self._plan, index)

    def drop(self) -> None:
        """Let go of the memory; `tensors` is over. Idempotent."""
        self._flat = None


def receive(
    group: TransferGroup,
    *,
    version: int,
    timeout_s: float,
    staging: Staging | None = None,
) -> Staged:
    """Receive policy `version` into `staging` (host memory when None).

    Raises TransferMismatch for another generation, version, layout or content, and TransferError
    for all other failures; the group is aborted then, so that the sender does not stay blocked.
    """
    try:
        return _receive(group, version, time.monotonic() + timeout_s, staging or Staging())
    except TransferError as exc:
        group.abort(exc.detail)
        raise
    except BaseException as exc:  # no memory, for instance; the sender must not wait for us
        group.abort(f"receiver failed: {exc!r}")
        raise


def _receive(group: TransferGroup, version: int, deadline: float, staging: Staging) -> Staged:
    try:
        header = decode_header(
            _broadcast(group, empty_header(), deadline),
            generation=group.generation,
            version=version,
        )
        manifest = _broadcast(
            group, torch.empty(header.manifest_bytes, dtype=torch.uint8), deadline
        )
        plan = decode_plan(header, manifest.numpy().tobytes())
    except ValueError as exc:
        raise group.error(TransferMismatch, str(exc), "header") from exc
    flat = staging.take(plan.flat_bytes)
    digest = _Receiver(group, plan, flat, deadline).run()
    sent = _broadcast(group, torch.empty(DIGEST_BYTES, dtype=torch.uint8), deadline)
    if sent.numpy().tobytes() != digest.digest():
        detail = f"received {digest.hexdigest()}, sender has {sent.numpy().tobytes().hex()}"
        raise group.error(TransferMismatch, detail, "digest")
    return Staged(
        generation=group.generation, version=version, plan=plan, digest=digest.hexdigest()
    ).bind(flat)


def _broadcast(group: TransferGroup, data: torch.Tensor, deadline: float) -> torch.Tensor:
    """One small broadcast; the result is on the CPU."""
    data = data.to(group.device)
    group.post(data, timeout_s=deadline - time.monotonic()).wait(deadline)
    return data.cpu()


class _Receiver:
    """Payload loop: later buckets are posted before the oldest is waited for and digested."""

    def __init__(
        self, group: TransferGroup, plan: Plan, flat: torch.Tensor, deadline: float
    ) -> None:
        self._group = group
        self._plan = plan
        self._flat = flat
        self._deadline = deadline
        self._in_place = flat.device == group.device
        num_buffers = 0 if self._in_place else min(NUM_IN_FLIGHT, len(plan.buckets))
        self._buffers = [
            torch.empty(plan.max_bucket_bytes, dtype=torch.uint8, device=group.device)
            for _ in range(num_buffers)
        ]

    def run(self) -> Digest:
        """All buckets; returns their digest."""
        digest = Digest()
        in_flight: deque[tuple[torch.Tensor, Pending]] = deque()
        not_posted = iter(range(len(self._plan.buckets)))
        for start, end in self._plan.buckets:
            room = NUM_IN_FLIGHT - len(in_flight)
            in_flight.extend(map(self._post, islice(not_posted, room)))
            data, pending = in_flight.popleft()
            pending.wait(self._deadline)
            digest.update(data)
            if not self._in_place:
                self._flat[start:end].copy_(data)
        return digest

    def _post(self, bucket: int) -> tuple[torch.Tensor, Pending]:
        start, end = self._plan.buckets[bucket]
        if self._in_place:
            data = self._flat[start:end]
        else:
            # Its last user was digested and copied: no more than the ring's length are in flight.
            data = self._buffers[bucket % NUM_IN_FLIGHT][: end - start]
        return data, self._group.post(data, timeout_s=self._deadline - time.monotonic())
