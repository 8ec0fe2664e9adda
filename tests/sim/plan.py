"""What one seed runs: a fleet, settings and a schedule of faults. Plain data, JSON and back.

A plan is drawn from a seed once, before the run; a shrunken plan is the same with fewer faults.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

PHASES = (
    "open",
    "join",
    "stage",
    "abort",
    "pause",
    "commit",
    "verify",
    "admit",
    "resume",
    "finish",
)
ENGINE_OPS = (
    "Join", "Stage", "Pause", "Commit", "ReadVersion", "Admit", "Resume", "Fence",
    "AbortGeneration",
)  # fmt: skip
TRAINER_OPS = ("Open", "Join", "Send", "AbortGeneration", "Finish")
OUTCOMES = ("refuse", "lost_request", "lost_reply", "dup_reply", "slow")
_WEIGHTS = {
    "op": 12, "crash": 4, "restart": 4, "hang": 4, "core_hang": 3, "stall": 2, "cut": 3,
    "slow": 2, "partial_write": 3, "group_crash": 2, "new_life": 2, "trainer_crash": 3,
    "trainer_hang": 2, "router_restart": 2, "router_hang": 1, "loop_stall": 4, "meddle": 1,
    "launcher_silent": 2, "old_life_returns": 1, "orchestrator_restart": 3,
}  # fmt: skip
KINDS = tuple(_WEIGHTS)
_NUM_FAULTS = (0, 0, 1, 1, 2, 2, 3, 4, 6)
_ENGINE_KINDS = ("crash", "restart", "hang", "core_hang", "stall", "cut", "new_life", "group_crash")
_OP_OF = {
    "open": "Open", "join": "Join", "stage": "Stage", "abort": "AbortGeneration", "pause": "Pause",
    "commit": "Commit", "verify": "ReadVersion", "admit": "Admit", "resume": "Resume",
    "finish": "Finish",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One trouble. It starts `at` seconds into the run or, with a `phase`, that much after the
    `nth` time that the phase is entered. What `slot` (a place in the fleet, -1 the trainer),
    `duration`, `what` and `times` mean depends on the kind, see `faults.py`."""

    kind: str
    at: float
    phase: str = ""
    nth: int = 0
    slot: int = 0
    duration: float = 0.0
    what: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """`groups` as in `admin_engine_groups`; `plane` and `probe` are the core's own settings."""

    noise: int
    groups: tuple[int, ...]
    world_sizes: tuple[int, ...]
    plane: dict[str, Any]
    probe: dict[str, Any]
    timing: dict[str, float]
    duration_s: float
    faults: tuple[Fault, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON; of a fault only what differs from the default."""
        body = asdict(self)
        body["faults"] = [_short(fault) for fault in self.faults]
        return body

    @staticmethod
    def from_dict(body: dict[str, Any]) -> Plan:
        """Inverse of `to_dict`."""
        return Plan(
            noise=body["noise"],
            groups=tuple(body["groups"]),
            world_sizes=tuple(body["world_sizes"]),
            plane=body["plane"],
            probe=body["probe"],
            timing=body["timing"],
            duration_s=body["duration_s"],
            faults=tuple(Fault(**row) for row in body["faults"]),
        )

    def with_faults(self, faults: tuple[Fault, ...]) -> Plan:
        """The same with another schedule."""
        return replace(self, faults=faults)

    def describe(self) -> str:
        """The schedule, for people."""
        return "\n".join(f"  {json.dumps(_short(fault))}" for fault in self.faults) or "  no faults"


def _short(fault: Fault) -> dict[str, Any]:
    plain = asdict(Fault(fault.kind, fault.at))
    return {
        name: value
        for name, value in asdict(fault).items()
        if name in ("kind", "at") or value != plain[name]
    }


def draw(seed: int) -> Plan:
    """The plan of a seed; it depends on nothing else."""
    chance = random.Random(seed)
    groups = _fleet(chance)
    has_launcher = chance.random() < 0.6
    duration_s = chance.uniform(3.0, 8.0)
    faults = [_fault(chance, len(groups), duration_s) for _ in range(chance.choice(_NUM_FAULTS))]
    if chance.random() < 0.5:
        faults += chance.choice(_THEMES)(chance, len(groups), duration_s)
    return Plan(
        groups=groups,
        world_sizes=tuple(chance.choice((1, 1, 1, 2, 4)) for _ in groups),
        plane=_plane(chance, has_launcher, len(set(groups))),
        probe=_probe(chance),
        timing=_timing(chance),
        duration_s=duration_s,
        faults=tuple(faults),
        noise=chance.getrandbits(48),
    )


def _fleet(chance: random.Random) -> tuple[int, ...]:
    """1 to 6 groups of 1 to 4 engines; small ones are more frequent."""
    num_groups = chance.choice((1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 6))
    groups: list[int] = []
    for group in range(num_groups):
        groups += [group] * chance.choice((1, 1, 1, 2, 2, 3, 4) if num_groups < 3 else (1, 1, 2))
    return tuple(groups)


def _plane(chance: random.Random, has_launcher: bool, num_groups: int) -> dict[str, Any]:
    return {
        "admin_timeout_s": chance.choice((1.0, 2.0)),
        "join_timeout_s": chance.choice((1.5, 3.0)),
        "stage_timeout_s": chance.choice((2.0, 4.0)),
        "pause_timeout_s": chance.choice((1.0, 2.0)),
        "commit_timeout_s": chance.choice((1.5, 3.0)),
        "update_timeout_s": chance.choice((9.0, 14.0, 25.0)),
        "max_regroups": chance.choice((0, 1, 3)),
        "startup_timeout_s": chance.choice((4.0, 10.0)),
        "startup_wait_s": chance.choice((0.5, 3.0)),
        "max_evictions": chance.choice((2, 3, 5)),
        "eviction_window_s": chance.choice((5.0, 30.0)),
        "quarantine_s": chance.choice((1.0, 3.0)),
        "min_serving_groups": chance.choice((1, 1, 1, num_groups)),
        "no_capacity_timeout_s": chance.choice((6.0, 1000.0, 1000.0, 1000.0)),
        "retry_wait_s": chance.choice((0.2, 0.5)),
        "retry_wait_max_s": chance.choice((1.0, 3.0)),
        "has_launcher": has_launcher,
    }


def _probe(chance: random.Random) -> dict[str, Any]:
    return {
        "interval_s": chance.choice((0.5, 1.0)),
        "retry_s": 0.2,
        "backoff_max_s": chance.choice((1.0, 2.0)),
        "success_threshold": chance.choice((1, 1, 2)),
        "failure_threshold": chance.choice((2, 3)),
        "stall_timeout_s": chance.choice((1.5, 4.0)),
        "core_hung_s": chance.choice((1.0, 3.0)),
    }


def _timing(chance: random.Random) -> dict[str, float]:
    return {
        "latency_s": chance.choice((0.001, 0.005, 0.03)),
        "probe_timeout_s": chance.choice((0.4, 0.8)),
        "lease_s": chance.choice((2.0, 4.0)),
        "train_s": chance.choice((0.5, 1.0, 2.0)),
        "transfer_s": chance.choice((0.05, 0.3)),
        "commit_s": chance.choice((0.02, 0.2)),
        "boot_s": chance.choice((0.2, 1.0, 2.5)),
        "max_restarts": chance.choice((0, 2, 100, 100, 100)),
        "moves": chance.choice((0, 0, 1)),
    }


def _fault(
    chance: random.Random,
    num_engines: int,
    duration_s: float,
    *,
    kinds: tuple[str, ...] = (),
    phase: str | None = None,
) -> Fault:
    """Any fault, or one of these kinds, at any time or in any phase, or in this one."""
    kind = chance.choice(kinds) if kinds else chance.choices(KINDS, tuple(_WEIGHTS.values()))[0]
    if phase is None:
        phase = chance.choice(PHASES) if kind != "op" and chance.random() < 0.5 else ""
    at = chance.uniform(0.0, 0.1) if phase else chance.uniform(0.0, duration_s)
    slot = chance.randrange(num_engines)
    what, times = "", 1
    if kind == "op":
        is_trainer = chance.random() < 0.25
        slot = -1 if is_trainer else slot
        name = chance.choice(TRAINER_OPS if is_trainer else ENGINE_OPS)
        what = f"{name}:{chance.choice(OUTCOMES)}"
        times = chance.choice((1, 1, 2, 3))
    elif kind == "new_life":
        what = chance.choice(("", "silent"))
    nth = chance.choice((1, 1, 2, 3)) if phase else 0
    duration = chance.choice((0.3, 1.0, 2.5, 5.0)) * chance.uniform(0.5, 1.5)
    return Fault(kind, round(at, 4), phase, nth, slot, round(duration, 3), what, times)


def _slow_phase(chance: random.Random, num_engines: int, duration_s: float) -> list[Fault]:
    """A phase lasts, and something happens meanwhile."""
    phase = chance.choice(PHASES)
    op = _OP_OF[phase]
    slot = -1 if op in ("Open", "Finish") else chance.randrange(num_engines)
    seconds = round(chance.uniform(0.5, 1.8), 3)
    at = round(chance.uniform(0.0, duration_s / 2), 4)
    faults = [Fault("op", at, slot=slot, duration=seconds, what=f"{op}:slow")]
    if phase == "abort":
        faults.append(Fault("op", at, slot=-1, what="Send:refuse"))
    while len(faults) < 4:
        extra = _fault(chance, num_engines, duration_s, kinds=KINDS[1:], phase=phase)
        faults.append(replace(extra, at=round(chance.uniform(0.0, seconds), 4)))
    return faults


def _flapping(chance: random.Random, num_engines: int, duration_s: float) -> list[Fault]:
    """One engine has one trouble after the other."""
    slot = chance.randrange(num_engines)
    faults = [
        _fault(chance, num_engines, duration_s, kinds=_ENGINE_KINDS, phase="")
        for _ in range(chance.randrange(2, 6))
    ]
    return [replace(fault, slot=slot) for fault in faults]


def _bad_start(chance: random.Random, num_engines: int, duration_s: float) -> list[Fault]:
    """Engines are in trouble before the first update."""
    return [
        _fault(chance, num_engines, 3.0, kinds=_ENGINE_KINDS, phase="")
        for _ in range(chance.randrange(2, 4))
    ]


def _pile(chance: random.Random, num_engines: int, duration_s: float) -> list[Fault]:
    """The loop stalls, and much news piles up meanwhile."""
    stall = _fault(chance, num_engines, duration_s, kinds=("loop_stall",), phase="")
    faults = [stall]
    for _ in range(chance.randrange(1, 4)):
        fault = _fault(chance, num_engines, duration_s, phase="")
        faults.append(replace(fault, at=round(stall.at + chance.uniform(-0.3, stall.duration), 4)))
    return [replace(fault, at=max(fault.at, 0.0)) for fault in faults]


_THEMES = (_slow_phase, _slow_phase, _flapping, _bad_start, _pile)
