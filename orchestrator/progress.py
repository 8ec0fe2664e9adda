"""Collects what happened in a run and tells it: console lines, W&B points, the closing table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.monitor.console import Console, Level
from orchestrator.monitor.records import Outcome, RunSummary, StepRecord
from orchestrator.monitor.wandb_sink import WandbSink
from orchestrator.plane.commands import Report, UpdateEnded
from orchestrator.plane.core import PlaneSnapshot
from orchestrator.rollouts.batch import BatchStats
from protocol.trainer_api import StepMetrics

_SUMMARY_STEPS = 10
_LEVELS: dict[str, Level] = {
    "admitted": "good",
    "candidate": "info",
    "starting": "info",
    "evicted": "warning",
    "quarantined": "error",
}
# Pause as the engines feel it: from the first pause to the last resume.
_PAUSED_PHASES = ("pause", "commit", "verify", "admit", "resume")


@dataclass(slots=True)
class _Step:
    stats: BatchStats
    num_dropped: int


@dataclass(slots=True)
class _Totals:
    evictions: Counter[str] = field(default_factory=Counter)
    readmissions: int = 0
    rewards: list[float] = field(default_factory=list)
    policy_version: int | None = None
    generation: int = 0


class Progress:
    """One per run; called from the event loop only."""

    def __init__(self, console: Console, wandb: WandbSink, clock: Callable[[], float]) -> None:
        self._console = console
        self._wandb = wandb
        self._clock = clock
        self._started = clock()
        self._last_step_at = self._started
        self._totals = _Totals()
        self._step: _Step | None = None
        self._num_dropped = 0
        self._update: UpdateEnded | None = None
        self._trainer: dict[int, dict[str, float]] = {}
        self._was_out: set[int] = set()

    def trainer_step(self, metrics: StepMetrics) -> None:
        """The trainer measured a step."""
        self._trainer[metrics.step] = metrics.values

    def group_changed(self, report: Report, snapshot: PlaneSnapshot) -> None:
        """A group changed its state."""
        totals = self._totals
        if report.new in ("evicted", "quarantined") and report.old != "quarantined":
            totals.evictions[report.reason] += 1
            self._was_out.add(report.group)
        elif report.new == "admitted" and report.group in self._was_out:
            self._was_out.discard(report.group)
            totals.readmissions += 1
        why = f": {report.reason}" if report.reason else ""
        detail = f" ({report.detail})" if report.detail else ""
        text = (
            f"g{report.group} {report.old} -> {report.new}{why}{detail}; "
            f"{snapshot.num_admitted}/{len(snapshot.groups)} groups serve"
        )
        self._console.event(text, _LEVELS[report.new])

    def update_ended(self, update: UpdateEnded) -> None:
        """A version is in service, or could not be sent."""
        self._totals.generation = update.generation
        if update.outcome == "finished":
            self._update = update
            if update.version == 0 or update.num_regroups:
                spent = sum(seconds for _, seconds in update.phase_s)
                self._console.event(
                    f"v{update.version} is in service on {len(update.members)} engines, "
                    f"generation {update.generation}, {spent:.2f} s",
                    "info",
                )
        else:
            self._console.event(f"update v{update.version} failed: {update.reason}", "warning")

    def batch_sent(self, stats: BatchStats, num_dropped: int) -> None:
        """The trainer has the batch. `num_dropped`: rollouts dropped since the start."""
        self._step = _Step(stats, num_dropped - self._num_dropped)
        self._num_dropped = num_dropped

    def step_done(self, step: int, snapshot: PlaneSnapshot) -> None:
        """Version `step + 1` is in service."""
        now = self._clock()
        step_s, self._last_step_at = now - self._last_step_at, now
        assert self._step is not None
        stats = self._step.stats
        self._totals.rewards.append(stats.reward_mean)
        self._totals.policy_version = snapshot.policy_version
        record = StepRecord(
            step=step,
            policy_version=step + 1,
            generation=snapshot.generation,
            reward_mean=stats.reward_mean,
            reward_std=stats.reward_std,
            completion_len_mean=stats.num_completion_tokens / max(stats.num_rollouts, 1),
            off_policy_mean=stats.off_policy_steps_mean,
            off_policy_max=stats.off_policy_steps_max,
            num_samples=stats.num_rollouts,
            num_dropped=self._step.num_dropped,
            groups_admitted=snapshot.num_admitted,
            groups_total=len(snapshot.groups),
            update_s=self._phases(None),
            stage_s=self._phases(("open", "join", "stage", "abort")),
            pause_s=self._phases(_PAUSED_PHASES),
            step_s=step_s,
            tokens_per_s=stats.num_completion_tokens / max(step_s, 1e-9),
            trainer=self._trainer.pop(step, {}),
        )
        self._console.step(record)
        self._wandb.log(record.values(), step)

    def final(self, outcome: Outcome, cause: str, output_dir: str) -> None:
        """The closing table."""
        totals = self._totals
        rewards = totals.rewards
        summary = RunSummary(
            steps=len(rewards),
            reward_first10_mean=_mean(rewards[:_SUMMARY_STEPS]),
            reward_last10_mean=_mean(rewards[-_SUMMARY_STEPS:]),
            evictions=dict(totals.evictions),
            readmissions=totals.readmissions,
            generations=totals.generation,
            wall_time_s=self._clock() - self._started,
            outcome=outcome,
            output_dir=output_dir,
            policy_version=totals.policy_version,
            cause=cause,
        )
        self._console.final(summary)

    def _phases(self, names: tuple[str, ...] | None) -> float:
        if self._update is None:
            return 0.0
        return sum(s for name, s in self._update.phase_s if names is None or name in names)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
