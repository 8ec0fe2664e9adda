"""Records for the monitors' tests."""

from __future__ import annotations

from typing import Any

from orchestrator.monitor.records import RunSummary, StepRecord


def make_record(**changes: Any) -> StepRecord:
    """A plausible step, with `changes`."""
    values: dict[str, Any] = {
        "step": 11,
        "policy_version": 12,
        "generation": 2,
        "reward_mean": 0.412,
        "reward_std": 0.31,
        "completion_len_mean": 9.5,
        "off_policy_mean": 0.4,
        "off_policy_max": 1,
        "num_samples": 64,
        "num_dropped": 0,
        "groups_admitted": 2,
        "groups_total": 2,
        "update_s": 0.31,
        "stage_s": 0.2,
        "pause_s": 0.05,
        "step_s": 2.5,
        "tokens_per_s": 812.0,
        "trainer": {"loss": 0.021},
    }
    return StepRecord(**{**values, **changes})


def make_summary(**changes: Any) -> RunSummary:
    """A plausible end of a run, with `changes`."""
    values: dict[str, Any] = {
        "steps": 60,
        "reward_first10_mean": 0.25,
        "reward_last10_mean": 0.75,
        "evictions": {"probe_failed": 2, "engine_exited": 1},
        "readmissions": 3,
        "generations": 5,
        "wall_time_s": 190.0,
        "outcome": "finished",
        "output_dir": "outputs/quickstart",
        "policy_version": 60,
    }
    return RunSummary(**{**values, **changes})
