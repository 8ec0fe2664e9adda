from __future__ import annotations

import pytest
import torch

from transfer.digest import Digest

ROW_BYTES = 2048


def digest(*buckets: torch.Tensor) -> str:
    running = Digest()
    for bucket in buckets:
        running.update(bucket)
    return running.hexdigest()


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("count", [0, 1, 7, 8, ROW_BYTES - 1, ROW_BYTES, 5 * ROW_BYTES + 13])
def test_equal_bytes_have_equal_digests(count: int) -> None:
    assert digest(random_bytes(count)) == digest(random_bytes(count).clone())
    assert digest(random_bytes(count)) != digest(random_bytes(count), random_bytes(0))


@pytest.mark.parametrize("index", [0, 3000, 4 * ROW_BYTES + 5])
def test_one_bit_changes_it(index: int) -> None:
    data = random_bytes(4 * ROW_BYTES + 100)
    other = data.clone()
    other[index] ^= 1
    assert digest(data) != digest(other)


def test_rows_in_other_places_change_it() -> None:
    data = random_bytes(4 * ROW_BYTES)
    assert digest(data) != digest(data.roll(ROW_BYTES))
    assert digest(data) != digest(data.roll(64))


def test_order_of_buckets_changes_it() -> None:
    first, second = random_bytes(100, 1), random_bytes(100, 2)
    assert digest(first, second) != digest(second, first)
