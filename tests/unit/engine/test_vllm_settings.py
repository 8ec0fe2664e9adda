from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.vllm_settings import (
    Machine,
    choose_dtype,
    starts_by_fork,
    vllm_argv,
    vllm_environment,
)

CPU = Machine(is_cpu=True)
CUDA = Machine(is_cpu=False)


def config(**inference: object) -> EngineConfig:
    return EngineConfig.model_validate({"group": 1, "inference": inference})


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


@pytest.mark.parametrize(
    ("requested", "machine", "name"),
    [
        ("auto", CPU, "float32"),
        ("float32", CPU, "float32"),
        ("bfloat16", CPU, "float32"),
        ("auto", CUDA, "bfloat16"),
        ("float32", CUDA, "float32"),
        ("bfloat16", CUDA, "bfloat16"),
    ],
)
def test_dtype(requested: str, machine: Machine, name: str) -> None:
    dtype = choose_dtype(requested, machine)
    assert dtype.name == name
    assert dtype.reason


@pytest.mark.parametrize(
    ("inference", "machine", "forks"),
    [
        ({}, CPU, True),
        ({"core_start": "fork"}, CPU, True),
        ({"core_start": "spawn"}, CPU, False),
        ({"tensor_parallel_size": 2}, CPU, False),
        ({}, CUDA, False),
        ({"core_start": "fork"}, CUDA, False),
    ],
)
def test_start_of_the_core(inference: dict[str, object], machine: Machine, forks: bool) -> None:
    assert starts_by_fork(config(**inference), machine) is forks


def test_cpu_arguments() -> None:
    argv = vllm_argv(config(max_num_seqs=4), CPU)
    assert "--enforce-eager" in argv
    assert "--enable-prefix-caching" in argv
    assert value(argv, "--kv-cache-memory-bytes") == str(64 << 20)
    assert value(argv, "--distributed-executor-backend") == "uni"
    assert value(argv, "--max-num-seqs") == "4"
    assert value(argv, "--weight-transfer-config") == '{"backend": "muster"}'


def test_cuda_arguments() -> None:
    argv = vllm_argv(config(tensor_parallel_size=4, enable_prefix_caching=False), CUDA)
    assert "--enforce-eager" not in argv
    assert "--kv-cache-memory-bytes" not in argv
    assert "--distributed-executor-backend" not in argv
    assert "--no-enable-prefix-caching" in argv
    assert value(argv, "--tensor-parallel-size") == "4"


def test_extra_args_in_every_form() -> None:
    extra = {"seed": 3, "flag": True, "off": False, "many": ["a", "b"], "table": {"x": 1}}
    argv = vllm_argv(config(extra_args=extra), CPU)
    assert argv[argv.index("--seed") :] == [
        *("--seed", "3", "--flag", "--many", "a", "b", "--table", '{"x": 1}')
    ]


def test_environment() -> None:
    env = vllm_environment(config(), CPU)
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["VLLM_PLUGINS"] == "muster"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert env["VLLM_LOGGING_PREFIX"] == "[g1e0] "
    assert vllm_environment(config(num_threads=3), CPU)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in vllm_environment(config(), CUDA)


def test_secrets_are_in_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_ADMIN_TOKEN", "s3cret")
    monkeypatch.setenv("MUSTER_API_KEY", "k3y")
    everything = " ".join([*vllm_argv(config(), CPU), *vllm_environment(config(), CPU).values()])
    assert "s3cret" not in everything
    assert "k3y" not in everything
