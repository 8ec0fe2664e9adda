"""Whole transfers over Gloo, and what happens when they break off at each stage."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.ranks import joined
from transfer.bucket import ParamMeta
from transfer.digest import Digest
from transfer.errors import TransferAborted, TransferError, TransferMismatch
from transfer.group import TransferGroup
from transfer.receive import Staged, Staging, receive
from transfer.send import SendResult, send

PROMPT_S = 10.0
BUCKET_BYTES = 4096

Params = list[tuple[str, torch.Tensor]]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def groups(pool: ThreadPoolExecutor) -> Iterator[list[TransferGroup]]:
    made = joined(pool, 3)
    yield made
    for group in made:
        group.close()


def make_params(seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    odd = torch.randn(1000, generator=generator).to(torch.bfloat16)
    return [
        ("norm", torch.randn(7, generator=generator)),
        ("large", torch.randn(600_000, generator=generator)),  # its own buckets, not packed
        ("strided", torch.randn(40, 50, generator=generator).t()),
        ("empty", torch.empty(0, 3)),
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("offset", odd[1:]),  # its memory starts at no multiple of 8
        ("ids", torch.arange(5000)),
    ]


def start_send(
    pool: ThreadPoolExecutor, group: TransferGroup, params: Params, *, version: int = 7
) -> Future[SendResult]:
    return pool.submit(
        send,
        group,
        iter(params),
        [ParamMeta.of(name, tensor) for name, tensor in params],
        version=version,
        bucket_bytes=BUCKET_BYTES * 64,
        timeout_s=60,
    )


def assert_equal(staged: Staged, params: Params) -> None:
    received = dict(staged.tensors())
    assert list(received) == [name for name, _ in params]
    for name, tensor in params:
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_receivers_hold_what_was_sent(
    pool: ThreadPoolExecutor, groups: list[TransferGroup]
) -> None:
    staging = Staging()
    for version in (7, 8):  # a generation carries many versions, staging is used again
        params = make_params(version)
        first = pool.submit(receive, groups[1], version=version, timeout_s=60, staging=staging)
        second = pool.submit(receive, groups[2], version=version, timeout_s=60)
        result = start_send(pool, groups[0], params, version=version).result(PROMPT_S)
        for staged in (first.result(PROMPT_S), second.result(PROMPT_S)):
            assert_equal(staged, params)
            assert staged.version == version
            assert staged.digest == result.digest
            assert staged.num_bytes == result.num_bytes
    assert result.num_bytes >= sum(tensor.nbytes for _, tensor in params)
    assert result.num_buckets == 12


def test_dropped_staging_is_not_read_again(
    pool: ThreadPoolExecutor, groups: list[TransferGroup]
) -> None:
    futures = [pool.submit(receive, group, version=7, timeout_s=60) for group in groups[1:]]
    start_send(pool, groups[0], make_params()).result(PROMPT_S)
    staged = futures[0].result(PROMPT_S)
    staged.drop()
    with pytest.raises(RuntimeError, match="dropped"):
        next(staged.tensors())


def test_other_version_is_refused_before_any_payload(
    pool: ThreadPoolExecutor, groups: list[TransferGroup]
) -> None:
    staging = Staging()
    wrong = pool.submit(receive, groups[1], version=8, timeout_s=60, staging=staging)
    right = pool.submit(receive, groups[2], version=7, timeout_s=60)
    # More than the sockets buffer: the sender cannot have finished.
    params = [("big", torch.zeros(8 << 20))]
    sender = start_send(pool, groups[0], params)
    error = wrong.exception(PROMPT_S)
    assert isinstance(error, TransferMismatch)
    assert str(error) == "generation 1, rank 1, header: header says version 7, expected 8"
    assert isinstance(sender.exception(PROMPT_S), TransferError)
    assert isinstance(right.exception(PROMPT_S), TransferError)
    assert staging.take(0).untyped_storage().nbytes() == 0


@pytest.mark.parametrize("aborting", [0, 1, 2])
@pytest.mark.parametrize("num_params_before", [0, 1, 2, 3])
def test_abort_at_each_stage_frees_all(
    pool: ThreadPoolExecutor,
    groups: list[TransferGroup],
    aborting: int,
    num_params_before: int,
) -> None:
    params = [(f"p{index}", torch.zeros(1 << 20)) for index in range(3)]
    metas = [ParamMeta.of(name, tensor) for name, tensor in params]

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(params):
            if index == num_params_before:
                groups[aborting].abort("operator says so")
            yield item

    receivers = [pool.submit(receive, group, version=7, timeout_s=60) for group in groups[1:]]
    sender = pool.submit(
        send,
        groups[0],
        stream(),
        metas,
        version=7,
        bucket_bytes=1 << 20,
        timeout_s=60,
    )
    if num_params_before == len(params):
        sender.result(PROMPT_S)
        groups[aborting].abort("operator says so")
    futures = [sender, *receivers]
    errors = [future.exception(PROMPT_S) for future in futures]
    assert all(error is None or isinstance(error, TransferError) for error in errors)
    if num_params_before < len(params):
        assert isinstance(errors[0], TransferError)
        # An aborting receiver may have had its last bytes already; it must not hang, that is all.
        assert aborting == 0 or errors[aborting] is None or "operator" in str(errors[aborting])


def test_failing_source_is_raised_and_frees_receivers(
    pool: ThreadPoolExecutor, groups: list[TransferGroup]
) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(4)
        raise OSError("gather failed")

    metas = [ParamMeta("a", "float32", (4,)), ParamMeta("b", "float32", (1 << 20,))]
    receivers = [pool.submit(receive, group, version=7, timeout_s=60) for group in groups[1:]]
    with pytest.raises(OSError, match="gather failed"):
        send(groups[0], stream(), metas, version=7, bucket_bytes=4096, timeout_s=60)
    for receiver in receivers:
        assert isinstance(receiver.exception(PROMPT_S), TransferError)
    assert groups[0].is_aborted


def test_source_that_does_not_follow_the_manifest_is_refused(
    pool: ThreadPoolExecutor, groups: list[TransferGroup]
) -> None:
    metas = [ParamMeta("a", "float32", (4,)), ParamMeta("b", "float32", (4,))]
    receivers = [pool.submit(receive, group, version=7, timeout_s=60) for group in groups[1:]]
    params = iter([("a", torch.zeros(4)), ("c", torch.zeros(4))])
    with pytest.raises(TransferMismatch, match=r"expected parameter .*'b'.* got .*'c'"):
        send(groups[0], params, metas, version=7, bucket_bytes=4096, timeout_s=60)
    for receiver in receivers:
        assert isinstance(receiver.exception(PROMPT_S), TransferError)


def test_payload_that_does_not_match_its_digest_is_refused(
    pool: ThreadPoolExecutor, groups: list[TransferGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherDigest(Digest):
        def digest(self) -> bytes:
            return bytes(16)

    monkeypatch.setattr("transfer.send.Digest", OtherDigest)
    receivers = [pool.submit(receive, group, version=7, timeout_s=60) for group in groups[1:]]
    start_send(pool, groups[0], make_params()).exception(PROMPT_S)
    errors = [receiver.exception(PROMPT_S) for receiver in receivers]
    assert any(isinstance(error, TransferMismatch) for error in errors)
    assert all(isinstance(error, TransferError) for error in errors)


def test_send_on_an_aborted_group_fails_at_once(groups: list[TransferGroup]) -> None:
    groups[0].abort("over")
    with pytest.raises(TransferAborted, match="over"):
        send(groups[0], iter([]), [], version=1, bucket_bytes=64, timeout_s=60)
