from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.bucket import (
    ALIGNMENT,
    DIRECT_BYTES,
    ParamMeta,
    Plan,
    byte_view,
    decode_manifest,
    encode_manifest,
    make_plan,
    read_param,
)

DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int8", "uint8", "bool")

metas = st.lists(
    st.builds(
        ParamMeta,
        name=st.uuids().map(str),
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda meta: meta.name,
)


def test_small_parameters_share_a_bucket_and_large_ones_have_their_own() -> None:
    large = DIRECT_BYTES // 4
    plan = make_plan(
        [
            ParamMeta("a", "float32", (3,)),
            ParamMeta("b", "float32", (5,)),
            ParamMeta("c", "float32", (large + 16,)),
            ParamMeta("d", "float32", ()),
        ],
        DIRECT_BYTES,
    )
    assert plan.offsets == (0, 64, 128, 128 + DIRECT_BYTES + 64)
    assert plan.buckets == (
        (0, 84),
        (128, 128 + DIRECT_BYTES),
        (128 + DIRECT_BYTES, 128 + DIRECT_BYTES + 64),
        (192 + DIRECT_BYTES, 196 + DIRECT_BYTES),
    )
    assert [[tuple(piece) for piece in pieces] for pieces in plan.segments()] == [
        [(0, 0, 0, 12), (1, 0, 64, 20)],
        [(2, 0, 0, DIRECT_BYTES)],
        [(2, DIRECT_BYTES, 0, 64)],
        [(3, 0, 0, 4)],
    ]


def test_nothing_to_send_is_no_bucket() -> None:
    for params in ([], [ParamMeta("empty", "float32", (0, 4))]):
        plan = make_plan(params, 64)
        assert plan.buckets == ()
        assert plan.num_bytes == plan.flat_bytes == 0
        assert list(plan.segments()) == []


@pytest.mark.parametrize("bucket_bytes", [0, -64, 63, 65])
def test_bucket_size_must_be_aligned(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes {bucket_bytes} is not a positive multiple"):
        make_plan([], bucket_bytes)


def test_names_must_be_unique() -> None:
    meta = ParamMeta("twice", "float32", (1,))
    with pytest.raises(ValueError, match="not unique"):
        make_plan([meta, meta], 64)


def test_unknown_dtype_is_an_error_that_names_the_parameter() -> None:
    with pytest.raises(ValueError, match="parameter 'x' has unknown dtype 'nn'"):
        make_plan([ParamMeta("x", "nn", (1,))], 64)


@given(metas)
def test_manifest_round_trip(params: list[ParamMeta]) -> None:
    assert decode_manifest(encode_manifest(params)) == tuple(params)


@settings(deadline=None)
@given(metas, st.integers(1, 6).map(lambda count: count * ALIGNMENT))
def test_every_byte_of_every_parameter_travels_once_and_comes_back(
    params: list[ParamMeta], bucket_bytes: int
) -> None:
    plan = make_plan(params, bucket_bytes)
    generator = torch.Generator().manual_seed(0)
    sent = [_random(meta, generator) for meta in params]
    flat = _travel(plan, [byte_view(tensor) for tensor in sent])
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)
    assert all(0 < end - start <= bucket_bytes for start, end in plan.buckets)
    for index, tensor in enumerate(sent):
        received = read_param(flat, plan, index)
        assert received.dtype == tensor.dtype
        assert received.shape == tensor.shape
        assert torch.equal(byte_view(received), byte_view(tensor))


def _random(meta: ParamMeta, generator: torch.Generator) -> torch.Tensor:
    data = torch.randint(0, 2, (meta.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(meta.torch_dtype).view(meta.shape)


def _travel(plan: Plan, sent: list[torch.Tensor]) -> torch.Tensor:
    """What a receiver's flat range holds after all buckets."""
    flat = torch.full((plan.flat_bytes,), 0xEE, dtype=torch.uint8)
    counts = [torch.zeros_like(data) for data in sent]
    for (start, end), pieces in zip(plan.buckets, plan.segments(), strict=True):
        bucket = torch.zeros(end - start, dtype=torch.uint8)
        for param, param_start, bucket_start, nbytes in pieces:
            piece = slice(param_start, param_start + nbytes)
            bucket[bucket_start : bucket_start + nbytes] = sent[param][piece]
            counts[param][piece] += 1
        flat[start:end] = bucket
    assert all(bool((count == 1).all()) for count in counts)
    return flat
