"""What a launcher (local or Slurm) and the orchestrator tell each other.

Level-triggered: the launcher posts its whole view to `POST /launcher/groups` of the orchestrator on
every change and at least once a second; the answer carries every relaunch that is wanted. Saying it
twice changes nothing. The same view is written to `<output_dir>/groups.json` by atomic rename.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.engine_api import Body

GroupStepState = Literal["starting", "running", "exited", "waiting", "failed", "stopped"]
Role = Literal["regular", "prefill", "decode"]


class MemberExit(Body):
    """How a member's process ended. Exactly one of code and signal is set."""

    index: int
    exit_code: int | None = None
    signal: int | None = None
    log_tail: list[str] = Field(default_factory=list)


class GroupView(Body):
    """One group's step. `life` counts launches (0 = first). States: `starting` launched,
    `running` all processes up, `exited` at least one member ended, `waiting` for the back-off,
    `failed` given up after the restart budget, `stopped` ended on purpose."""

    group: int
    life: int
    state: GroupStepState
    role: Role = "regular"
    urls: list[str] = Field(description="admin URL of each member, by index")
    exits: list[MemberExit] = Field(default_factory=list)
    restarts_left: int | None = None


class GroupsView(Body):
    """All groups of a run."""

    run_id: str
    groups: list[GroupView]


class RelaunchWish(Body):
    """End life `life` of `group` if it still runs and start the next one."""

    group: int
    life: int
    reason: str


class LauncherReply(Body):
    """Answer to a posted GroupsView."""

    relaunch: list[RelaunchWish]
    finished: bool = Field(default=False, description="the run is over, groups may be stopped")
