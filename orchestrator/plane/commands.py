"""What to do: the outputs of the core. Imperative, frozen, no behaviour.

A command with an `op_id` ends in exactly one OpSucceeded, OpFailed or OpUnknown, no later than its
`deadline` (same clock as `now`). The others are level-triggered: `Route` carries the whole set of
engines that should serve, never a delta; `Relaunch` names the life that should end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.ids import Slot

EvictReason = Literal[
    "engine_exited",
    "probe_failed",
    "engine_stalled",
    "core_hung",
    "boot_changed",
    "op_failed",
    "op_unknown",
    "version_mismatch",
    "step_exited",
]
GroupState = Literal["starting", "candidate", "admitted", "evicted", "quarantined"]


@dataclass(frozen=True, slots=True)
class Op:
    """Base of the commands that have an outcome."""

    op_id: int
    deadline: float
    reason: str


@dataclass(frozen=True, slots=True)
class Open(Op):
    """Trainer: listen for `generation` and start to join it as rank 0, for `join_timeout_s`."""

    generation: int
    world_size: int
    join_timeout_s: float


@dataclass(frozen=True, slots=True)
class Join(Op):
    """Engine at `slot` (trainer when None): be in `generation` before the deadline."""

    slot: Slot | None
    generation: int
    host: str
    port: int
    rank_offset: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Send(Op):
    """Trainer: ship `version` over `generation`."""

    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class Stage(Op):
    """Engine: receive `version` into staging buffers."""

    slot: Slot
    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class Pause(Op):
    """Engine: stop generating, keep the requests."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Commit(Op):
    """Engine: load what was staged as `version`."""

    slot: Slot
    generation: int
    version: int


@dataclass(frozen=True, slots=True)
class ReadVersion(Op):
    """Engine: say which version is loaded, and by which boot."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Resume(Op):
    """Engine: go on generating."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Admit(Op):
    """Engine: open the gate for this boot at this version."""

    slot: Slot
    boot_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Fence(Op):
    """Engine: close the gate and end the requests in flight."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class AbortGeneration(Op):
    """Engine at `slot` (trainer when None): leave `generation` now, drop staged bytes."""

    slot: Slot | None
    generation: int


@dataclass(frozen=True, slots=True)
class Finish(Op):
    """Trainer: `version` is in service on `members` (engine ids); train on."""

    version: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Forget what is known of the engine and ask it now, at this URL, as this life or a later."""

    slot: Slot
    url: str
    life: int


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """An engine that should serve: its lease is renewed for this boot at this version."""

    slot: Slot
    url: str
    boot_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Route:
    """The whole set of engines that should serve."""

    entries: tuple[RouteEntry, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Relaunch:
    """End life `life` of the group's step and start the next one."""

    group: int
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """A group changed its state; for people and metrics."""

    group: int
    old: GroupState
    new: GroupState
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class UpdateEnded:
    """An update is over. `outcome` says how; durations are seconds a phase."""

    version: int
    generation: int
    outcome: Literal["finished", "failed"]
    members: tuple[str, ...]
    num_regroups: int
    phase_s: tuple[tuple[str, float], ...]
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on; `reason` is a table of causes."""

    reason: str


Command = (
    Open
    | Join
    | Send
    | Stage
    | Pause
    | Commit
    | ReadVersion
    | Resume
    | Admit
    | Fence
    | AbortGeneration
    | Finish
    | Probe
    | Route
    | Relaunch
    | Report
    | UpdateEnded
    | Fail
)
