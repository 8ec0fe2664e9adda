"""What the core remembers: groups, members, the live generation, the update under way.

Plain data; every transition is in `core.py` (groups) and `update.py` (updates).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.plane.commands import GroupState
from protocol.ids import Slot

Phase = Literal[
    "open", "join", "stage", "abort", "pause", "commit", "verify", "resume", "admit", "finish"
]


@dataclass(frozen=True, slots=True)
class PlaneSettings:
    """Times are seconds. Deadlines nest: an op ends before its phase, a phase before the update."""

    admin_timeout_s: float = 10.0
    join_timeout_s: float = 30.0
    stage_timeout_s: float = 120.0
    pause_timeout_s: float = 30.0
    commit_timeout_s: float = 60.0
    update_timeout_s: float = 300.0
    max_regroups: int = 3
    startup_timeout_s: float = 600.0
    startup_wait_s: float = 60.0
    max_evictions: int = 5
    eviction_window_s: float = 600.0
    quarantine_s: float = 120.0
    min_serving_groups: int = 1
    no_capacity_timeout_s: float = 600.0
    retry_wait_s: float = 1.0
    retry_wait_max_s: float = 10.0
    has_launcher: bool = False


@dataclass(slots=True)
class Member:
    """An engine's place. `ready` False: not believed until it has answered anew."""

    slot: Slot
    url: str
    ready: bool = False
    boot_id: str = ""
    world_size: int = 1
    weight_version: int | None = None


@dataclass(slots=True)
class Group:
    """Engines that fail, update and route together.

    `min_life`: engines of an older life are never believed. `not_before`: no candidate before this
    time (back-off). `version_since`: when `version` was put in service here; what an engine said
    before that is old. `believed_from`: an eviction or a restart; answers to older questions are
    not believed. `resumed_at`: when all members had answered a resume. `given_up`: the launcher
    will not start it again.
    After a restart of the orchestrator: `kept` is the version that the group is known to hold and
    may return with, without a reload; `awaited`: it was in service, and has not all answered yet.
    """

    number: int
    members: list[Member]
    since: float
    state: GroupState = "starting"
    reason: str = ""
    detail: str = ""
    life: int = 0
    min_life: int = 0
    not_before: float = 0.0
    version: int | None = None
    version_since: float = 0.0
    evictions: list[float] = field(default_factory=list)
    num_evictions: int = 0
    num_quarantines: int = 0
    given_up: bool = False
    kept: int | None = None
    awaited: bool = False
    believed_from: float = 0.0
    resumed_at: float = 0.0

    @property
    def is_routed(self) -> bool:
        """Whether its engines should serve."""
        return self.state == "admitted"


@dataclass(frozen=True, slots=True)
class Generation:
    """Membership of one weight-transfer process group. Dead: aborted, or a member was lost."""

    number: int
    members: tuple[tuple[Slot, str], ...]
    trainer_boot: str
    is_dead: bool = False


@dataclass(slots=True)
class Update:
    """One version on its way to `targets` (group numbers still taking part).

    The bytes have until `transfer_deadline`, so that what follows (pause to resume) keeps its time.
    `pending` maps the ops that the phase waits for to their slot (None: the trainer).
    `suspect`: the group that reported a failed transfer first, and what it said; accused when all
    others have answered the abort. `accused` counts accusations by group; a Send without an outcome
    (`sends`, even of a transfer that was given up) clears both.
    `is_return`: the targets hold `version` already; it begins with the verification.
    """

    version: int
    targets: list[int]
    started: float
    deadline: float
    transfer_deadline: float
    phase: Phase = "open"
    phase_started: float = 0.0
    pending: dict[int, Slot | None] = field(default_factory=dict)
    host: str = ""
    port: int = 0
    num_regroups: int = 0
    num_bytes: int = 0
    accused: dict[int, int] = field(default_factory=dict)
    suspect: tuple[int, str] | None = None
    sends: list[int] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    retry_finish_at: float | None = None
    is_return: bool = False


@dataclass(slots=True)
class PlaneMemory:
    """Everything that a core remembers; another one made of it goes on exactly like the first.
    Times are those of the core's clock, which goes on from one process to the next."""

    now: float
    groups: dict[int, Group]
    last_op_id: int
    update: Update | None
    generation: Generation
    policy_version: int | None
    ready_version: int | None
    trainer_boot: str
    is_trainer_known: bool
    num_failures: int
    retry_at: float
    first_candidate_at: float | None
    router_error: str
    short_since: float | None
    has_failed: bool


def members_of(groups: Iterable[Group]) -> list[Member]:
    """All members, by group, by index: the order in which ranks are given."""
    return [member for group in groups for member in group.members]
