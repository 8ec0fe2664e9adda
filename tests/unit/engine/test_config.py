from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine.config import EngineConfig, InferenceConfig, read_secrets


def test_defaults_are_valid_and_round_trip() -> None:
    config = EngineConfig()
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


def test_slot() -> None:
    assert EngineConfig(group=2, index=1).slot.engine_id == "g2e1"


def test_every_field_is_described() -> None:
    for section in (EngineConfig, InferenceConfig):
        for name, field in section.model_fields.items():
            assert field.description, name


@pytest.mark.parametrize("name", ["port", "weight-transfer-config", "max_num_seqs", "api_key"])
def test_extra_args_cannot_repeat_ours(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name.replace('_', '-')} cannot be set here"):
        InferenceConfig(extra_args={name: 1})


def test_extra_args_take_both_spellings() -> None:
    assert InferenceConfig(extra_args={"block_size": 16}).extra_args == {"block-size": 16}


def test_fork_with_several_ranks_is_refused() -> None:
    with pytest.raises(ValidationError, match="works with one rank only"):
        InferenceConfig(core_start="fork", tensor_parallel_size=2)


def test_secrets_come_from_the_environment_and_stay_hidden() -> None:
    tokens = read_secrets({"MUSTER_ADMIN_TOKEN": "s3cret", "MUSTER_API_KEY": "k3y"})
    assert (tokens.admin_token, tokens.api_key) == ("s3cret", "k3y")
    assert "s3cret" not in repr(tokens)
    assert "k3y" not in repr(tokens)


def test_api_key_is_optional() -> None:
    assert read_secrets({"MUSTER_ADMIN_TOKEN": "t", "MUSTER_API_KEY": ""}).api_key is None


@pytest.mark.parametrize("environ", [{}, {"MUSTER_ADMIN_TOKEN": ""}])
def test_admin_token_is_required(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="MUSTER_ADMIN_TOKEN is not set"):
        read_secrets(environ)


def test_config_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, engine.config, engine.vllm_settings\n"
        "print(sorted({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
