"""`muster replay`: what it prints, and with which exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from orchestrator.drivers.journal import Journal, segments
from orchestrator.recovery import recover
from orchestrator.replay import replay
from protocol.ids import Slot
from tests.helpers.plane_journal import EPOCH, some_run, write_journal
from tests.helpers.plane_world import World
from tests.unit.plane.test_invariants import run_seed


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory, with several segments."""
    path = tmp_path_factory.mktemp("run")
    write_journal(path / "journal.jsonl", some_run(), segment_bytes=40_000)
    return path


def changed(directory: Path, to: Path, number: int, old: str, new: str) -> Path:
    """A copy of the newest segment with one line changed."""
    lines = (directory / "journal.jsonl").read_text().splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new, 1)
    path = to / "changed.jsonl"
    path.write_text("".join(lines))
    return path


def test_the_story_of_a_run(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(directory)]) == 0
    output = capsys.readouterr().out
    assert "every decision is repeated" in output.splitlines()[0]
    assert output.count("orchestrator restarted 2027-01-15") == 2
    assert "engine_exited (exited)" in output
    assert "starting: engine_exited life 1: relaunched" in output
    assert output.count("all members still report v") == 4
    assert "updates: " in output.splitlines()[-1]
    assert "0 failed, 0 regroups; 4 returns without a reload" in output.splitlines()[-1]


def test_one_segment_is_enough(directory: Path) -> None:
    files = segments(directory)
    assert len(files) > 3
    for path in files:
        assert replay([path]).divergence is None
    assert replay(files).num_events == sum(replay([path]).num_events for path in files)


def test_one_group_and_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(directory), "--json", "--group", "1"]) == 0
    story: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert story["divergence"] is None
    assert {outage["group"] for outage in story["outages"]} == {1}
    start, died, first, second = story["outages"]
    assert (start["reason"], start["since"]) == ("start", EPOCH + 100.0)
    assert died["reason"] == "engine_exited"
    assert died["until"] - died["since"] > 3.0
    assert first["reason"] == second["reason"] == "restart"
    assert first["returned"].startswith("all members still report v")
    assert all(outage["until"] for outage in story["outages"])


def test_random_runs_are_repeated(tmp_path: Path) -> None:
    for seed in range(60, 80):
        path = tmp_path / str(seed) / "journal.jsonl"
        write_journal(path, run_seed(seed), segment_bytes=30_000)
        story = replay(segments(path.parent))
        assert story.divergence is None, f"seed {seed}"


def test_the_first_divergence(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (directory / "journal.jsonl").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if i > 1 and '"type":"Route"' in line)
    path = changed(directory, tmp_path, number, '"reason":"v', '"reason":"vv')
    assert main(["replay", str(path)]) == 1
    output = capsys.readouterr().out
    assert f"changed.jsonl:{number}: the core decides otherwise now" in output
    assert "reason='vv" in output.split("repeated")[0]
    assert "reason='vv" not in output.split("repeated")[1]


def test_a_bad_line(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(directory, tmp_path, 3, '"type"', '"typ"')
    assert main(["replay", str(path)]) == 2
    assert "changed.jsonl:3: type None, expected one of EngineAnswered" in capsys.readouterr().err


def test_a_command_too_many_or_too_few(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (directory / "journal.jsonl").read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines, 1) if i > 1 and '"commands":[]' in line)
    extra = '"commands":[{"type":"Fail","reason":"x"}]'
    assert main(["replay", str(changed(directory, tmp_path, number, '"commands":[]', extra))]) == 1
    assert "recorded  Fail(reason='x')\n  repeated  nothing more" in capsys.readouterr().out
    path = tmp_path / "short.jsonl"
    busy = next(i for i, line in enumerate(lines) if i and '"commands":[{' in line)
    start = lines[busy].index('"commands"')
    path.write_text("".join([*lines[:busy], lines[busy][:start] + '"commands":[]}\n']))
    assert main(["replay", str(path), "--json"]) == 1
    divergence = json.loads(capsys.readouterr().out)["divergence"]
    assert divergence["recorded"] is None
    assert divergence["line"] == busy + 1


def test_a_segment_that_does_not_follow(directory: Path, tmp_path: Path) -> None:
    files = segments(directory)
    story = replay([files[0], files[2]])
    assert story.divergence is not None
    assert story.divergence.line == 1
    assert "is remembered" in story.divergence.event


def test_only_the_last_run_of_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_journal(tmp_path / "journal.jsonl", some_run())
    world = World([0])
    write_journal(tmp_path / "journal.jsonl", world)
    assert main(["replay", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "1 events" in output
    assert "g1" not in output
    assert "still out" in output


def test_a_start_that_came_to_nothing(tmp_path: Path) -> None:
    """Killed between its header and its first line."""
    world = World([0, 1])
    for _ in range(3):
        journal = Journal(tmp_path / "journal.jsonl", lambda: EPOCH)
        past = recover(tmp_path, "run")
        memory = None if past is None else past.memory
        journal.begin(dataclasses.replace(world.header, memory=memory))
        journal.close()
    story = replay(segments(tmp_path))
    assert (story.divergence, story.num_events) == (None, 0)


def test_failed_updates_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World([0, 1])
    world.serve(0)
    world.publish(1)
    world.run(lambda: world.core.snapshot().update_phase == "stage")
    world.restart_orchestrator()
    world.run(lambda: world.ended("finished", 1) is not None)
    world.kill(Slot(1, 0))
    world.run_for(10.0)
    write_journal(tmp_path / "journal.jsonl", world)
    assert main(["replay", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "v1: the orchestrator restarted in stage" in output
    assert "2 finished, 1 failed, 0 regroups; 2 returns without a reload; last version v1" in output
    assert "probe_failed" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "0 paths given"),
        (["a", "b"], "2 paths given"),
        (["a", "--group"], "--group nothing: expected the number"),
        (["a", "--group", "g1"], "--group g1: expected the number"),
        (["a", "--gruop", "1"], "no such flag: --gruop"),
        (["nowhere.jsonl"], "No such file"),
        (["."], "no journal.jsonl here"),
    ],
)
def test_what_cannot_be_read(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["replay", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: muster replay JOURNAL|OUTPUT_DIR")
