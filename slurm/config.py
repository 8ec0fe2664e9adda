"""Config of where a run is placed and how its groups are relaunched.

Rules: importable without torch or vllm; resolved values agree with one another, so that a dumped
config reads back as itself (a derived field that is set by hand must equal what it derives from).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from protocol.config import Config, Port, Seconds

_DEFAULT_NUM_GROUPS = 2
_DEFAULT_ENGINES_PER_GROUP = 1
# Router, its metrics, orchestrator, trainer, rendezvous: what a run needs beside its engines.
NUM_SERVICE_PORTS = 5


class RelaunchConfig(Config):
    """When a group that lost a process comes back."""

    backoff_initial_s: Seconds = Field(
        2.0,
        description="Wait between the first exit of a group and its relaunch; doubles each time.",
    )
    backoff_max_s: Seconds = Field(60.0, description="Longest wait before a relaunch.")
    max_restarts: int = Field(
        10,
        ge=0,
        description="Relaunches in a row of one group before it is given up; a life that was "
        "healthy for `healthy_after_s` starts the count again.",
    )
    max_never_healthy: int = Field(
        3,
        ge=0,
        description="Relaunches in a row of a group whose lives all ended before they were up: "
        "such a group is more likely misconfigured than unlucky.",
    )
    healthy_after_s: Seconds = Field(
        60.0,
        description="A life that ran this long after all members were up counts as healthy: "
        "back-off and budget start again.",
    )
    startup_timeout_s: Seconds = Field(
        600.0, description="Longest time for all members of a life to listen after the launch."
    )
    stop_grace_s: Seconds = Field(
        10.0, description="Time between SIGTERM and SIGKILL when a process is stopped."
    )

    @model_validator(mode="after")
    def _backoff_grows(self) -> Self:
        if self.backoff_max_s < self.backoff_initial_s:
            raise ValueError(
                f"backoff_max_s = {self.backoff_max_s:g} is below "
                f"backoff_initial_s = {self.backoff_initial_s:g}"
            )
        return self


class DeploymentConfig(Config):
    """Where the processes of a run are placed. Engines are counted over all groups, in order."""

    type: Literal["local"] = Field(
        "local",
        description="`local`: every process on this machine.",
    )
    num_groups: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Engine groups. Empty: 2, or what `engine_groups` says."
    )
    engines_per_group: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="Engines in each group. Empty: 1, or what `engine_groups` says."
    )
    engine_groups: list[int] | None = Field(
        None,
        description="Group of each engine, e.g. `[0, 0, 1, 1]`; for groups of unequal size. "
        "Empty: `num_groups` times `engines_per_group`.",
    )
    first_port: Port = Field(18000, description="Lowest port that a run may choose.")
    last_port: Port = Field(
        30999,
        description="Highest port that a run may choose; ports in the system's range for "
        "outgoing connections are left out.",
    )
    relaunch: RelaunchConfig = Field(
        default_factory=RelaunchConfig, description="When a group that lost a process comes back."
    )

    @field_validator("type", mode="before")
    @classmethod
    def _known_type(cls, value: object) -> object:
        if value == "slurm":
            raise ValueError(
                'type = "slurm" is not part of this version: use type = "local" on one machine'
            )
        return value

    @field_validator("engine_groups")
    @classmethod
    def _groups_are_numbered(cls, value: list[int] | None) -> list[int] | None:
        if value is None:
            return None
        present = sorted(set(value))
        if present != list(range(len(present))) or not value:
            raise ValueError(
                f"engine_groups = {value} must name every group from 0 to the highest, "
                "one entry an engine"
            )
        return value

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        if self.engine_groups is None:
            self.num_groups = self.num_groups or _DEFAULT_NUM_GROUPS
            self.engines_per_group = self.engines_per_group or _DEFAULT_ENGINES_PER_GROUP
            self.engine_groups = [
                group for group in range(self.num_groups) for _ in range(self.engines_per_group)
            ]
        else:
            self._check_counts(self.engine_groups)
        num_ports = self.last_port - self.first_port + 1
        needed = len(self.engine_groups) + NUM_SERVICE_PORTS
        if num_ports < needed:
            raise ValueError(
                f"ports {self.first_port} to {self.last_port} are {max(num_ports, 0)}, "
                f"this run needs {needed}"
            )
        return self

    def _check_counts(self, engine_groups: list[int]) -> None:
        """Fill the counts that `engine_groups` implies; raise where they were set otherwise."""
        num_groups = max(engine_groups) + 1
        if self.num_groups not in (None, num_groups):
            raise ValueError(
                f"num_groups = {self.num_groups} disagrees with engine_groups = {engine_groups}, "
                f"which has {num_groups}"
            )
        sizes = {engine_groups.count(group) for group in range(num_groups)}
        if self.engines_per_group is not None and sizes != {self.engines_per_group}:
            raise ValueError(
                f"engines_per_group = {self.engines_per_group} disagrees with "
                f"engine_groups = {engine_groups}"
            )
        self.num_groups = num_groups
        if len(sizes) == 1:
            self.engines_per_group = sizes.pop()


class SlurmConfig(Config):
    """What a batch job would ask for. Read once `deployment.type = "slurm"` exists."""

    job_name: str = Field("muster", min_length=1, description="Name of the job.")
    partition: str | None = Field(None, description="Partition. Empty: the cluster's default.")
    account: str | None = Field(None, description="Account to charge. Empty: the user's default.")
    time_limit_minutes: int | None = Field(
        None, ge=1, description="Wall clock limit of the job. Empty: the partition's."
    )
