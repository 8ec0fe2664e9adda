from __future__ import annotations

import pytest
import torch

from transfer.bucket import ParamMeta, encode_manifest
from transfer.wire import Header, decode_header, decode_plan, empty_header, encode_header

PARAMS = [ParamMeta("a", "float32", (4, 4)), ParamMeta("b", "bfloat16", (3,))]
HEADER = Header(generation=3, version=7, manifest_bytes=10, num_bytes=70, bucket_bytes=128)


def test_header_round_trip() -> None:
    words = encode_header(HEADER)
    assert words.shape == empty_header().shape
    assert decode_header(words, generation=3, version=7) == HEADER


@pytest.mark.parametrize(
    ("generation", "version", "message"),
    [
        (4, 7, "header says generation 3, expected 4"),
        (3, 8, "header says version 7, expected 8"),
    ],
)
def test_foreign_header_is_refused(generation: int, version: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_header(encode_header(HEADER), generation=generation, version=version)


def test_other_bytes_are_no_header() -> None:
    with pytest.raises(ValueError, match="header starts with 0x0"):
        decode_header(empty_header(), generation=3, version=7)
    with pytest.raises(ValueError, match="header starts with"):
        decode_header(torch.ones_like(empty_header()), generation=3, version=7)


def test_plan_is_rebuilt_from_the_manifest() -> None:
    plan = decode_plan(HEADER, encode_manifest(PARAMS))
    assert plan.params == tuple(PARAMS)
    assert plan.num_bytes == 70


def test_manifest_that_disagrees_with_the_header_is_refused() -> None:
    with pytest.raises(ValueError, match="manifest has 64 bytes, header 70"):
        decode_plan(HEADER, encode_manifest(PARAMS[:1]))
    with pytest.raises(ValueError, match="manifest does not decode"):
        decode_plan(HEADER, b"\xff\xff")
