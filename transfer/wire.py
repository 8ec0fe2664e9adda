"""What precedes and follows the buckets: header, manifest, digest.

    header (64 bytes) | manifest | bucket 0 | ... | bucket n-1 | digest of all buckets

The header is checked before any payload is accepted, so bytes of another generation or version
never reach a staging buffer.
"""

from __future__ import annotations

import msgspec
import torch

from transfer.bucket import ParamMeta, Plan, decode_manifest, make_plan

_MAGIC = 0x4D5553544552_0001  # "MUSTER", format 1
_HEADER_WORDS = 8


class Header(msgspec.Struct, frozen=True):
    """Fixed-size head of one transfer."""

    generation: int
    version: int
    manifest_bytes: int
    num_bytes: int
    bucket_bytes: int


def encode_header(header: Header) -> torch.Tensor:
    """Header -> int64 [8] on the CPU."""
    words = [_MAGIC, *msgspec.structs.astuple(header)]
    return torch.tensor(words + [0] * (_HEADER_WORDS - len(words)), dtype=torch.int64)


def empty_header() -> torch.Tensor:
    """Room for a header."""
    return torch.zeros(_HEADER_WORDS, dtype=torch.int64)


def decode_header(words: torch.Tensor, *, generation: int, version: int) -> Header:
    """Inverse of `encode_header`. Raises ValueError for what is not the expected transfer."""
    magic, *fields, _, _ = words.tolist()
    if magic != _MAGIC:
        raise ValueError(f"header starts with {magic:#x}, not {_MAGIC:#x}")
    header = Header(*fields)
    if header.generation != generation:
        raise ValueError(f"header says generation {header.generation}, expected {generation}")
    if header.version != version:
        raise ValueError(f"header says version {header.version}, expected {version}")
    return header


def decode_plan(header: Header, manifest: bytes) -> Plan:
    """Layout of the payload. Raises ValueError when header and manifest disagree."""
    try:
        params: tuple[ParamMeta, ...] = decode_manifest(manifest)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"manifest does not decode: {exc}") from exc
    plan = make_plan(params, header.bucket_bytes)
    if plan.num_bytes != header.num_bytes:
        raise ValueError(f"manifest has {plan.num_bytes} bytes, header {header.num_bytes}")
    return plan
