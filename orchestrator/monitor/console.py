"""Console of a run: one line a finished step, lines for events, a table at the end.

    step 12/60  reward 0.412 +-0.310  v12  gen 2  groups 2/2  loss 0.021  lag 0.4/1  ...  ETA 3m10s

Formatting is pure; `Console` only writes. The same words go to a terminal (with colour) and to a
log file (without), one line each, so that a log can be searched for what was seen on a screen.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal, TextIO

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from orchestrator.monitor.records import RunSummary, StepRecord

Level = Literal["info", "good", "warning", "error"]

_STYLES: dict[Level, str] = {
    "info": "dim",
    "good": "green",
    "warning": "yellow",
    "error": "bold red",
}
_MARKS: dict[Level, str] = {"info": "--", "good": "++", "warning": "!!", "error": "**"}
# Steps that the estimate of the time left looks back on: long enough to even out one slow update.
_ETA_WINDOW = 20
# A log file has no width; wide enough that no line of ours is ever wrapped.
_LOG_WIDTH = 400
_NOTHING = "-"


class Console:
    """Writes a run's lines to `stream`. One writer; nothing is buffered here."""

    def __init__(self, total_steps: int, stream: TextIO, is_tty: bool) -> None:
        self._total_steps = total_steps
        self._step_times: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._rich = RichConsole(
            file=stream,
            force_terminal=is_tty,
            no_color=not is_tty,
            width=None if is_tty else _LOG_WIDTH,
            highlight=False,
            soft_wrap=True,
        )

    def step(self, record: StepRecord) -> None:
        """One line for a finished step."""
        self._step_times.append(record.step_s)
        left = max(self._total_steps - record.step - 1, 0)
        eta_s = left * sum(self._step_times) / len(self._step_times)
        line = Text(step_line(record, self._total_steps, eta_s))
        if record.groups_admitted < record.groups_total:
            line.stylize(_STYLES["warning"])
        self._rich.print(line)

    def event(self, text: str, level: Level = "info") -> None:
        """One line for something that happened to a group, the router or the trainer."""
        self._rich.print(Text(event_line(text, level), style=_STYLES[level]))

    def final(self, summary: RunSummary) -> str:
        """Write the table of the whole run; returns it as plain text."""
        table = summary_table(summary)
        self._rich.print(table)
        return table


def step_line(record: StepRecord, total_steps: int, eta_s: float) -> str:
    """A finished step as one line of fixed columns, separated by two spaces."""
    loss = record.trainer.get("loss")
    width = len(str(total_steps))
    columns = [
        f"step {record.step + 1:>{width}}/{total_steps}",
        f"reward {record.reward_mean:6.3f} +-{record.reward_std:.3f}",
        f"v{record.policy_version:<{width}} gen {record.generation}",
        f"groups {record.groups_admitted}/{record.groups_total}",
        f"loss {_NOTHING if loss is None else format(loss, '.4f'):>8}",
        f"lag {record.off_policy_mean:.1f}/{record.off_policy_max}",
        f"len {record.completion_len_mean:5.1f}",
        f"{record.tokens_per_s:5.0f} tok/s",
        f"update {record.update_s:5.2f} s (pause {record.pause_s:.2f})",
        f"step {record.step_s:5.2f} s",
        f"dropped {record.num_dropped}" if record.num_dropped else "",
        f"ETA {duration(eta_s)}",
    ]
    return "  ".join(column for column in columns if column)


def event_line(text: str, level: Level) -> str:
    """An event as one line; further lines of `text` are joined."""
    return f"{_MARKS[level]} {' / '.join(text.splitlines())}"


def summary_table(summary: RunSummary) -> str:
    """The whole run as a table in plain ASCII, no trailing newline."""
    table = Table.grid(padding=(0, 2))
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    plain = RichConsole(width=_LOG_WIDTH, no_color=True, force_terminal=False, highlight=False)
    with plain.capture() as captured:
        plain.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    rule = "-" * max(map(len, lines))
    return "\n".join([rule, *lines, rule])


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    """What the table says, top to bottom."""
    evictions = ", ".join(f"{count} {reason}" for reason, count in summary.evictions.items())
    rows = [
        ("outcome", f"{summary.outcome}: {summary.cause}" if summary.cause else summary.outcome),
        ("steps", str(summary.steps)),
        ("policy version", _number(summary.policy_version, "d")),
        ("reward, first 10 steps", _number(summary.reward_first10_mean, ".3f")),
        ("reward, last 10 steps", _number(summary.reward_last10_mean, ".3f")),
    ]
    if summary.reward_first10_mean is not None and summary.reward_last10_mean is not None:
        gain = summary.reward_last10_mean - summary.reward_first10_mean
        rows.append(("reward, gained", f"{gain:+.3f}"))
    return [
        *rows,
        ("groups evicted", evictions or "none"),
        ("groups readmitted", str(summary.readmissions)),
        ("transfer generations", str(summary.generations)),
        ("wall time", duration(summary.wall_time_s)),
        ("output", summary.output_dir),
    ]


def duration(seconds: float) -> str:
    """`45s`, `3m10s`, `2h05m`; `-` for what is no time."""
    if not math.isfinite(seconds) or seconds < 0:
        return _NOTHING
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)
