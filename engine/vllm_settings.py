"""Environment and arguments that vLLM is started with, out of our config. Pure.

Every value that is not vLLM's default has its reason beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.config import EngineConfig

_CPU_KV_CACHE_MB = 64


class Machine(NamedTuple):
    """What we need to know of where the engine runs."""

    is_cpu: bool


class Dtype(NamedTuple):
    """What the engine computes in, and why."""

    name: str
    reason: str


def choose_dtype(requested: str, machine: Machine) -> Dtype:
    """bfloat16 only where it is known to work: vLLM's bfloat16 attention for CPUs uses instructions
    (AMX) that a processor may announce and still refuse, which ends the process."""
    if not machine.is_cpu:
        name = "bfloat16" if requested == "auto" else requested
        return Dtype(name, "configured" if requested != "auto" else "default on CUDA")
    if requested == "bfloat16":
        return Dtype("float32", "bfloat16 is not reliable on CPUs; weights are cast on arrival")
    return Dtype("float32", "configured" if requested == "float32" else "default on a CPU")


def starts_by_fork(config: EngineConfig, machine: Machine) -> bool:
    """True when the engine core is forked off the API server. CUDA does not survive a fork."""
    inference = config.inference
    if inference.core_start != "auto":
        return inference.core_start == "fork" and machine.is_cpu
    return machine.is_cpu and inference.tensor_parallel_size * inference.data_parallel_size == 1


def vllm_environment(config: EngineConfig, machine: Machine) -> dict[str, str]:
    """Variables that must be set before vLLM (and torch) are imported."""
    env = {
        "HF_HUB_OFFLINE": "1",  # the model is a directory; nothing is looked up
        "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # an aborted transfer is no reason for stacks of frames
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # our deadlines do the watchdog's work
        "VLLM_LOGGING_LEVEL": config.inference.log_level,
        "VLLM_LOGGING_PREFIX": f"[{config.slot.engine_id}] ",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "muster",  # endpoint plugins load only when named
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, abort_requests
    }
    num_threads = config.inference.num_threads or (1 if machine.is_cpu else None)
    if num_threads is not None:
        env["OMP_NUM_THREADS"] = str(num_threads)
    if machine.is_cpu:
        # Engines share the cores of this machine: do not pin them all to the same ones.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # vLLM compiles a helper of its sampler at the first request that asks for logprobs: up to
        # half a minute of C++ compiler, in which the core does not answer.
        env["TORCHDYNAMO_DISABLE"] = "1"
    if starts_by_fork(config, machine):
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or else the worker is a third process
    return env


def vllm_argv(config: EngineConfig, machine: Machine) -> list[str]:
    """Arguments of `vllm serve`, without the secrets."""
    inference = config.inference
    eager = machine.is_cpu if inference.enforce_eager is None else inference.enforce_eager
    kv_cache_mb = inference.kv_cache_mb or (_CPU_KV_CACHE_MB if machine.is_cpu else None)
    options: dict[str, Any] = {
        "model": config.model.path,
        "host": config.host,
        "port": config.port,
        "dtype": choose_dtype(config.model.dtype, machine).name,
        "max-model-len": config.model.max_model_len,
        "max-num-seqs": inference.max_num_seqs,
        "tensor-parallel-size": inference.tensor_parallel_size,
        "data-parallel-size": inference.data_parallel_size,
        "enforce-eager": eager,
        # Space for it is taken at start, so that several engines fit one machine.
        "kv-cache-memory-bytes": None if kv_cache_mb is None else kv_cache_mb << 20,
        "weight-transfer-config": {"backend": "muster"},
        "worker-extension-cls": "engine.weight_transfer.WorkerExtension",
        "disable-uvicorn-access-log": True,  # the router asks each second
        "uvicorn-log-level": "warning",
        # Of the distribution that was sampled from, temperature included, as the loss needs.
        "logprobs-mode": "processed_logprobs",
        "enable-scale-out": True,  # token in, token out: /inference/v1/generate
        "disable-fastapi-docs": True,
    }
    prefix_caching = "enable" if inference.enable_prefix_caching else "no-enable"
    options[f"{prefix_caching}-prefix-caching"] = True
    if starts_by_fork(config, machine):
        options["distributed-executor-backend"] = "uni"  # the worker lives in the core
    return _flags({**options, **inference.extra_args})


def _flags(options: Mapping[str, Any]) -> list[str]:
    argv: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        argv.append(f"--{name}")
        if isinstance(value, list):
            argv.extend(str(item) for item in value)
        elif isinstance(value, dict):
            argv.append(json.dumps(value))
        elif value is not True:
            argv.append(str(value))
    return argv
