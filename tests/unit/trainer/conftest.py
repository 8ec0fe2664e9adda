"""One rank of the trainer in the test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import build_tiny_qwen3
from trainer.config import RankEnvironment
from trainer.world import World


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture
def world() -> Iterator[World]:
    """A world of one rank."""
    made = World(RankEnvironment(0, 0, 1), timeout_s=60, has_rendezvous=False)
    yield made
    made.close()
