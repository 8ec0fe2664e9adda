from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.config import (
    ADMIN_TOKEN_VARIABLE,
    LossConfig,
    TrainerConfig,
    admin_token,
    rank_environment,
)
from trainer.main import resolve_backend, run


@pytest.fixture(autouse=True)
def _no_rank_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", ADMIN_TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_no_token_no_trainer() -> None:
    with pytest.raises(ValueError, match="MUSTER_ADMIN_TOKEN is not set"):
        run(TrainerConfig())
    assert not dist.is_initialized()


def test_no_model_no_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "secret")
    config = TrainerConfig.model_validate({"model": {"path": str(tmp_path)}})
    with pytest.raises(FileNotFoundError, match="no Hugging Face model directory"):
        run(config)
    assert not dist.is_initialized()


def test_token_and_place_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_environment() == (0, 0, 1)
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "secret")
    assert rank_environment() == (3, 1, 4)
    assert admin_token() == "secret"


@pytest.mark.parametrize(
    ("wanted", "device", "backend"),
    [("auto", "cpu", "gloo"), ("auto", "cuda", "nccl"), ("gloo", "cuda", "gloo")],
)
def test_backend(wanted: str, device: str, backend: str) -> None:
    config = TrainerConfig.model_validate({"weight_broadcast": {"backend": wanted}})
    assert resolve_backend(config, torch.device(device)) == backend


def test_nccl_without_cuda_is_an_error() -> None:
    config = TrainerConfig.model_validate({"weight_broadcast": {"backend": "nccl"}})
    with pytest.raises(ValueError, match="needs CUDA, this machine has none"):
        resolve_backend(config, torch.device("cpu"))


def test_config_that_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_tokens = 64 is below model\.max_model_len"):
        TrainerConfig.model_validate({"micro_batch_tokens": 64})
    with pytest.raises(ValueError, match=r"ratio_cap = 1\.2 must be above"):
        LossConfig(ratio_cap=1.2)
