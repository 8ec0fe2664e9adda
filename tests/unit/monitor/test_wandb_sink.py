"""The sink never waits and never raises, whatever W&B does."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.monitor.wandb_sink import WandbSink
from protocol.config import WandbConfig


class FakeRun:
    """Takes what a W&B run takes; `gate` holds `log` up."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.points: list[dict[str, float]] = []
        self.metrics: list[tuple[str, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}
        self.is_finished = False
        self._gate = gate

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, point: dict[str, float]) -> None:
        if self._gate is not None:
            assert self._gate.wait(10)
        self.points.append(point)

    def finish(self) -> None:
        self.is_finished = True


def make_sink(tmp_path: Path, run: FakeRun, **options: Any) -> WandbSink:
    return WandbSink(WandbConfig(), "run-1", tmp_path, make_run=lambda *_: run, **options)


def test_points_arrive_with_their_own_step(tmp_path: Path) -> None:
    run = FakeRun()
    sink = make_sink(tmp_path, run, settings={"seed": 3})
    sink.log({"reward/mean": 0.5}, step=0)
    sink.log({"reward/mean": 0.6}, step=1)
    sink.close(10)
    assert run.points == [{"reward/mean": 0.5, "step": 0}, {"reward/mean": 0.6, "step": 1}]
    assert ("*", {"step_metric": "step"}) in run.metrics
    assert run.config == {"seed": 3}
    assert run.is_finished


def test_a_full_queue_drops_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    run = FakeRun(gate)
    sink = make_sink(tmp_path, run, queue_size=2)
    for step in range(10):
        sink.log({"x": 1.0}, step)
    # One point at most is in the hands of the thread, two are queued.
    assert sink.num_dropped >= 7
    gate.set()
    sink.close(10)
    assert len(run.points) == 10 - sink.num_dropped
    assert f"{sink.num_dropped} points were dropped" in caplog.text


def test_a_failed_init_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> FakeRun:
        raise RuntimeError("no login\nwith details")

    sink = WandbSink(WandbConfig(), "run-1", tmp_path, make_run=refuse)
    sink.close(10)
    sink.log({"x": 1.0}, 0)
    sink.close(10)
    assert [record.getMessage() for record in caplog.records] == [
        "W&B is off for the rest of this run: RuntimeError: no login"
    ]


def test_close_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    sink = make_sink(tmp_path, FakeRun(gate))
    sink.log({"x": 1.0}, 0)
    with caplog.at_level(logging.WARNING):
        sink.close(0.01)
    assert "did not finish" in caplog.text
    gate.set()


def test_disabled_does_nothing(tmp_path: Path) -> None:
    sink = WandbSink(WandbConfig(mode="disabled"), "run-1", tmp_path / "none")
    sink.log({"x": 1.0}, 0)
    sink.close(0.0)
    assert not (tmp_path / "none").exists()
