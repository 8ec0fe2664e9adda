"""Config of `muster engine`, and of the `inference` section that all engines of a run share.

Importable without torch and vllm. Secrets are no config: `read_secrets` takes them from the
environment, and nothing prints them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from protocol.config import Config, ModelConfig, Port, Seconds, WeightBroadcastConfig
from protocol.ids import Slot

ADMIN_TOKEN_VARIABLE = "MUSTER_ADMIN_TOKEN"
API_KEY_VARIABLE = "MUSTER_API_KEY"

# Set by us from other fields; a second value in extra_args would make one of them a lie.
RESERVED_ARGS = frozenset(
    {
        "api-key",
        "api-server-count",
        "data-parallel-size",
        "dtype",
        "enable-prefix-caching",
        "enforce-eager",
        "host",
        "kv-cache-memory-bytes",
        "max-model-len",
        "max-num-seqs",
        "model",
        "no-enable-prefix-caching",
        "port",
        "tensor-parallel-size",
        "weight-transfer-config",
        "worker-extension-cls",
    }
)


class InferenceConfig(Config):
    """How every engine of the run serves."""

    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that one copy of the model is split over."
    )
    data_parallel_size: int = Field(
        1, ge=1, description="Copies of the model inside one engine, behind one API server."
    )
    max_num_seqs: int = Field(
        16, ge=1, description="Most requests that one engine generates for at the same time."
    )
    kv_cache_mb: int | None = Field(
        None,
        ge=1,
        description="Memory for keys and values of one rank, in MiB. Empty: 64 on a CPU, on CUDA "
        "what vLLM finds free.",
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Requests with an equal beginning share it. Forgotten at every commit.",
    )
    enforce_eager: bool | None = Field(
        None, description="Run the model without compilation. Empty: yes on a CPU, no on CUDA."
    )
    core_start: Literal["auto", "fork", "spawn"] = Field(
        "auto",
        description="How the engine core starts: `fork` shares the imports of the API server "
        "(half the time and memory, CPU only), `spawn` begins anew. `auto`: fork on a CPU with "
        "one rank.",
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of the engine core. Empty: 1 on a CPU."
    )
    max_lease_s: Seconds = Field(
        60.0,
        description="Longest time that an engine serves without hearing from its admin plane, "
        "whatever lease it was given.",
    )
    core_ping_interval_s: Seconds = Field(
        0.5, description="Time between two questions of the API server to its engine core."
    )
    liveness_timeout_s: Seconds = Field(
        90.0,
        description="`/liveness` fails when the engine core has not answered for so long. A "
        "commit of large weights must fit in.",
    )
    exit_after_core_death_s: Seconds = Field(
        1.0,
        description="An engine whose core has died ends after so long, so that it is relaunched.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "WARNING", description="Lowest level of vLLM's own log lines."
    )
    extra_args: dict[str, Any] = Field(
        default_factory=dict,
        description="More options of `vllm serve`, by name without dashes in front. true: the bare "
        "flag; a list: several values; a table: JSON.",
    )

    @field_validator("extra_args")
    @classmethod
    def _check_extra_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        named = {name.replace("_", "-"): item for name, item in value.items()}
        reserved = sorted(named.keys() & RESERVED_ARGS)
        if reserved:
            raise ValueError(f"{', '.join(reserved)} cannot be set here: muster sets it")
        return named

    @model_validator(mode="after")
    def _check_core_start(self) -> InferenceConfig:
        if self.core_start == "fork" and self.tensor_parallel_size * self.data_parallel_size > 1:
            raise ValueError("core_start `fork` works with one rank only, not with several")
        return self


class EngineConfig(Config):
    """One engine process."""

    run_id: str = Field(
        "run", min_length=1, description="Name of the run; engines of another run are foreign."
    )
    model: ModelConfig = Field(default_factory=lambda: ModelConfig(), description="The policy.")
    weight_broadcast: WeightBroadcastConfig = Field(
        default_factory=lambda: WeightBroadcastConfig(), description="How new weights arrive."
    )
    inference: InferenceConfig = Field(
        default_factory=lambda: InferenceConfig(), description="How the engine serves."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(8001, description="Port to listen on, for data and admin routes.")
    group: int = Field(0, ge=0, description="Group of this engine.")
    index: int = Field(0, ge=0, description="Place inside the group.")
    life: int = Field(0, ge=0, description="How often the group was launched before.")
    output_dir: Path = Field(Path("outputs/run"), description="Directory of the run.")

    @property
    def slot(self) -> Slot:
        """Where the engine belongs."""
        return Slot(self.group, self.index)


@dataclass(frozen=True, slots=True)
class EngineSecrets:
    """Tokens of an engine. Not in the repr."""

    admin_token: str = field(repr=False)
    api_key: str | None = field(repr=False)


def read_secrets(environ: Mapping[str, str] | None = None) -> EngineSecrets:
    """Tokens from the environment. Raises ValueError without an admin token: an engine whose admin
    routes are open to everybody must not start."""
    source = os.environ if environ is None else environ
    admin_token = source.get(ADMIN_TOKEN_VARIABLE, "")
    if not admin_token:
        raise ValueError(f"environment variable {ADMIN_TOKEN_VARIABLE} is not set")
    return EngineSecrets(admin_token, source.get(API_KEY_VARIABLE) or None)
