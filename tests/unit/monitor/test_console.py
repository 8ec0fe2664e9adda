"""Lines and table, word for word."""

from __future__ import annotations

import io

import pytest

from orchestrator.monitor.console import Console, duration, event_line, step_line, summary_table
from tests.unit.monitor.monitor_fixtures import make_record, make_summary

STEP_LINE = (
    "step 12/60  reward  0.412 +-0.310  v12 gen 2  groups 2/2  loss   0.0210  lag 0.4/1  "
    "len   9.5    812 tok/s  update  0.31 s (pause 0.05)  step  2.50 s  ETA 2m00s"
)


def test_step_line() -> None:
    assert step_line(make_record(), 60, 120.0) == STEP_LINE


def test_step_line_without_loss_and_with_drops() -> None:
    line = step_line(make_record(trainer={}, num_dropped=3), 60, 0.0)
    assert "  loss        -  " in line
    assert line.endswith("  dropped 3  ETA 0s")


def test_console_estimates_the_time_left_from_the_last_steps() -> None:
    stream = io.StringIO()
    console = Console(60, stream, is_tty=False)
    console.step(make_record())
    assert stream.getvalue() == STEP_LINE + "\n"
    console.step(make_record(step=58, step_s=7.5))
    assert stream.getvalue().splitlines()[1].endswith("ETA 5s")


def test_a_log_gets_no_colour_and_a_terminal_does() -> None:
    log, terminal = io.StringIO(), io.StringIO()
    for stream, is_tty in ((log, False), (terminal, True)):
        Console(60, stream, is_tty=is_tty).event("group 1 evicted: probe_failed", "error")
    assert log.getvalue() == "** group 1 evicted: probe_failed\n"
    assert "\x1b[" in terminal.getvalue()


def test_square_brackets_are_text() -> None:
    stream = io.StringIO()
    Console(60, stream, is_tty=False).event("groups [0, 0, 1, 1] [/red]", "info")
    assert stream.getvalue() == "-- groups [0, 0, 1, 1] [/red]\n"


def test_event_is_one_line() -> None:
    assert event_line("two\nlines", "warning") == "!! two / lines"


SUMMARY = """\
-------------------------------------------------------
outcome                 finished
steps                   60
policy version          60
reward, first 10 steps  0.250
reward, last 10 steps   0.750
reward, gained          +0.500
groups evicted          2 probe_failed, 1 engine_exited
groups readmitted       3
transfer generations    5
wall time               3m10s
output                  outputs/quickstart
-------------------------------------------------------"""


def test_summary_table() -> None:
    assert summary_table(make_summary()) == SUMMARY


def test_final_of_a_run_without_steps_returns_what_it_writes() -> None:
    stream = io.StringIO()
    summary = make_summary(
        steps=0,
        reward_first10_mean=None,
        reward_last10_mean=None,
        policy_version=None,
        evictions={},
        outcome="failed",
        cause="no capacity for 600 s",
    )
    table = Console(60, stream, is_tty=False).final(summary)
    assert stream.getvalue() == table + "\n"
    assert "outcome                 failed: no capacity for 600 s" in table
    assert "reward, first 10 steps  -" in table
    assert "gained" not in table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (60, "1m00s"),
        (190, "3m10s"),
        (7500, "2h05m"),
        (-1, "-"),
        (float("inf"), "-"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
