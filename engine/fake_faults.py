"""What can go wrong with a fake engine, as a small table that tests set.

    rule = where (a route such as `/pause`, or a phase) x what x which hits

Phases: `join`, `stage`, `load`, `generate`. Faults are addressed by hits, not by time: a rule lets
`after` hits pass and then fires `times` times; `FaultPlan.fired` counts, so that a test can assert
that its fault really happened. Standing lies (`lie_version`, `freeze`) are switches, not rules.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.engine_api import Body

Action = Literal["exit", "hang", "error", "conflict", "slow", "drop_reply"]
Phase = Literal["join", "stage", "load", "generate"]


class FaultRule(Body):
    """One fault. `exit`: die like SIGKILL; `hang`: never answer; `error`: 500, or a failed phase;
    `conflict`: 409; `slow`: `delay_s` late; `drop_reply`: do it, then cut the connection."""

    at: str = Field(description="path of a route, with its slash, or a phase")
    action: Action
    after: int = Field(default=0, ge=0, description="hits that pass first")
    times: int = Field(default=1, ge=0, description="hits that fire then; 0 = all")
    delay_s: float = Field(default=0.0, ge=0)


class FaultOrder(Body):
    """Body of `POST /fault`. None leaves a switch as it is."""

    clear: bool = Field(default=False, description="first: forget all rules, undo all switches")
    rules: list[FaultRule] = Field(default_factory=list)
    lie_version: int | None = Field(default=None, description="reported instead of the real one")
    freeze: bool | None = Field(default=None, description="core hangs; probes still answer")
    restart: bool = Field(default=False, description="new boot id, closed, nothing loaded")


class FaultReport(Body):
    """Answer of `/fault`: how often each place's rules fired."""

    fired: dict[str, int]


class FaultPlan:
    """Rules with their counters. The first rule that is due at a place wins."""

    def __init__(self, rules: tuple[FaultRule, ...] = (), lie_version: int | None = None) -> None:
        self.lie_version = lie_version
        self.fired: dict[str, int] = {}
        self._rules: list[tuple[FaultRule, int]] = [(rule, 0) for rule in rules]

    def add(self, rule: FaultRule) -> None:
        """Put a rule behind the others."""
        self._rules.append((rule, 0))

    def clear(self) -> None:
        """Forget rules and lies; the counters stay."""
        self._rules.clear()
        self.lie_version = None

    def hit(self, place: str) -> FaultRule | None:
        """Count a hit at `place`; the rule that fires on it, if any."""
        due: FaultRule | None = None
        for number, (rule, hits) in enumerate(self._rules):
            if rule.at != place:
                continue
            self._rules[number] = (rule, hits + 1)
            is_due = hits >= rule.after and (not rule.times or hits < rule.after + rule.times)
            due = due or (rule if is_due else None)
        if due is not None:
            self.fired[place] = self.fired.get(place, 0) + 1
        return due
