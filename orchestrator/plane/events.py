"""What happened: the inputs of the core. Past tense, frozen, no behaviour.

Every event that a driver makes is one of `Event`. A completion of a command has three values:
`OpSucceeded`, `OpFailed` (the other side said no) and `OpUnknown` (sent, and no answer in time).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.ids import Slot
from protocol.launcher_api import GroupStepState

StuckReason = Literal["core_hung", "engine_stalled"]


@dataclass(frozen=True, slots=True)
class EngineAnswered:
    """A probe found something new: the engine became ready, or what it says of itself changed.
    `asked_at` is when the probe was sent: what it says may be that old."""

    slot: Slot
    asked_at: float
    boot_id: str
    life: int
    world_size: int
    weight_version: int | None
    paused: bool


@dataclass(frozen=True, slots=True)
class EngineSilent:
    """An engine of this life was ready and has now missed `failure_threshold` probes in a row."""

    slot: Slot
    life: int
    error: str


@dataclass(frozen=True, slots=True)
class EngineStuck:
    """The engine answers, but its core does not, or it makes no tokens."""

    slot: Slot
    boot_id: str
    reason: StuckReason
    detail: str


@dataclass(frozen=True, slots=True)
class GroupLaunched:
    """What the launcher says of one group's step."""

    group: int
    life: int
    state: GroupStepState
    urls: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class BroadcastReady:
    """The trainer has published `version`; its weights stay as they are until Finish."""

    version: int
    trainer_boot: str


@dataclass(frozen=True, slots=True)
class OpResult:
    """What a successful command brought back; only the fields of its kind are set."""

    host: str = ""
    port: int = 0
    version: int | None = None
    boot_id: str = ""
    num_bytes: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class OpSucceeded:
    """The command was carried out."""

    op_id: int
    result: OpResult = OpResult()


@dataclass(frozen=True, slots=True)
class OpFailed:
    """The other side refused or reported a failure; `error` is its own text."""

    op_id: int
    error: str


@dataclass(frozen=True, slots=True)
class OpUnknown:
    """No answer in time, or the connection broke: it may or may not have been carried out."""

    op_id: int
    error: str


@dataclass(frozen=True, slots=True)
class MembersListed:
    """The router's own listing changed, or its reachability did (`urls` None: it is down)."""

    urls: tuple[str, ...] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """`next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """The core goes on in another process: what was in flight has no outcome, and commands of the
    last event may not have been carried out. `urls`: where the engines are now, by group and index;
    empty: where they were."""

    urls: tuple[str, ...] = ()


Event = (
    EngineAnswered
    | EngineSilent
    | EngineStuck
    | GroupLaunched
    | BroadcastReady
    | OpSucceeded
    | OpFailed
    | OpUnknown
    | MembersListed
    | Deadline
    | Restarted
)
