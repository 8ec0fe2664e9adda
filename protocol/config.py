"""Config that several processes share. Rooms extend it with their own sections.

Every field has a unit in its name where it has one, and a description; `docs/configuration.md` is
generated from them. Only config modules read the environment.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class Config(BaseModel):
    """Base of every section: unknown keys are errors, values are checked also as defaults.

    Infinity and NaN are no numbers: nothing waits without a deadline.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


class ModelConfig(Config):
    """The policy, as trainer and engines load it."""

    path: str = Field(
        "tiny",
        description="Directory of a Hugging Face model with its tokenizer, or `tiny` / `smollm2`: built on first use.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Weights on the wire and in the engines. `auto`: bfloat16 on CUDA, float32 on CPU.",
    )
    max_model_len: int = Field(128, ge=16, description="Longest prompt plus completion, in tokens.")


class WeightBroadcastConfig(Config):
    """How weights travel from the trainer to the engines."""

    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="Process group backend. `auto`: nccl on CUDA, gloo on CPU."
    )
    host: str = Field(
        "127.0.0.1",
        description="Address of the trainer that engines connect to. Must be routable from every engine's node.",
    )
    bucket_mb: int = Field(
        16, ge=1, le=4096, description="Size of one broadcast bucket, in MiB; four are under way."
    )
    join_timeout_s: Seconds = Field(
        30.0, description="Longest wait for all ranks of a generation to join."
    )
    stage_timeout_s: Seconds = Field(
        120.0, description="Longest time for all bytes of one version to arrive in staging buffers."
    )
    pause_timeout_s: Seconds = Field(
        30.0, description="Longest wait for an engine to pause, and to resume."
    )
    commit_timeout_s: Seconds = Field(
        60.0, description="Longest time for an engine to load staged weights."
    )
    update_timeout_s: Seconds = Field(
        300.0, description="Longest time for one whole update, regroups included."
    )
    max_regroups: int = Field(
        3,
        ge=0,
        le=16,
        description="How often one update may rebuild its generation after a failure.",
    )

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        phases = ("join_timeout_s", "stage_timeout_s", "pause_timeout_s", "commit_timeout_s")
        late = [
            f"{name} = {getattr(self, name):g}"
            for name in phases
            if getattr(self, name) >= self.update_timeout_s
        ]
        wrong = (
            [f"{', '.join(late)} must be below update_timeout_s = {self.update_timeout_s:g}"]
            if late
            else []
        )
        if self.host in ("0.0.0.0", "::", "*", ""):
            wrong.append(
                f'host = "{self.host}" is no address that an engine can connect to; expected one of this machine'
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class WandbConfig(Config):
    """Where the numbers of a run go. A run never waits for this and never fails because of it."""

    mode: Literal["offline", "online", "disabled"] = Field(
        "offline",
        description="`offline`: files under `dir`, to be synced by hand; `online`: needs a network and a login; `disabled`: nothing.",
    )
    project: str = Field("muster", description="Project that the run belongs to.")
    entity: str | None = Field(None, description="User or team. Empty: the login's own.")
    name: str | None = Field(None, description="Shown name of the run. Empty: the run id.")
    group: str | None = Field(None, description="Name under which several runs are shown together.")
    tags: list[str] = Field(default_factory=list, description="Labels to filter by.")
    dir: str | None = Field(
        None, description="Directory of the run files. Empty: the output directory."
    )
