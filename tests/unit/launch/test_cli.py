"""The `muster` command as a user sees it: exit codes, output, what it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import launch.local
from launch.cli import COMMANDS, INTERRUPTED, USAGE_ERROR, main
from launch.config import RunConfig


def imported_by(*argv: str) -> set[str]:
    """Modules that a `muster` with these arguments has imported when it ends."""
    program = (
        "import sys; from launch.cli import main; main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


def test_help_imports_next_to_nothing() -> None:
    modules = imported_by("--help")
    assert not modules & {"pydantic", "httpx", "torch", "vllm", "launch.config", "asyncio"}


@pytest.mark.parametrize("command", ["run", "orchestrator", "engine", "trainer", "tiny-model"])
def test_help_of_a_command_imports_no_torch_and_no_vllm(command: str) -> None:
    assert not imported_by(command, "--help") & {"torch", "vllm", "ray", "transformers"}


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in [*COMMANDS, "config"])


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == USAGE_ERROR
    assert capsys.readouterr().out.startswith("usage: muster COMMAND")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("muster ")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trainr"], "muster: no such command: trainr; did you mean `trainer`?\n"),
        (
            ["config", "shwo"],
            "muster config: no such command: shwo; did you mean `show`?\n",
        ),
        (["config", "schema", "run"], "muster config schema: unexpected argument: run\n"),
    ],
)
def test_unknown_command(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == USAGE_ERROR
    assert capsys.readouterr().err == says


def test_help_of_run_lists_flags_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "@", "not-read.toml", "--help"]) == 0
    output = capsys.readouterr().out
    assert "  --orchestrator.max-steps  (integer, >= 0; 60)\n" in output
    assert "--dry-run: print and write the plan" in " ".join(output.split())


def test_show_prints_the_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json", "--seed", "7"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["seed"], shown["trainer"]["seed"], shown["run_id"]) == (7, 7, None)


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert "RunConfig" in capsys.readouterr().out


def test_environment_is_read_by_run_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUSTER_SEED", "9")
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 9


def test_dry_run_writes_the_plan_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "out"
    assert main(["run", "--dry-run", "--output-dir", str(output_dir), "--seed", "7"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["admin_engine_groups"] == [0, 1]
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    files = ["engine.json", "orchestrator.json", "plan.json", "run.json", "trainer.json"]
    assert found == [f"out/plan/{name}" for name in files]
    run = json.loads((output_dir / "plan" / "run.json").read_text())
    assert run["seed"] == 7
    assert main(["config", "show", "--json", "@", str(output_dir / "plan" / "run.json")]) == 0
    assert json.loads(capsys.readouterr().out) == run


def test_ctrl_c_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: RunConfig, dry_run: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.local, "run", interrupted)
    assert main(["run"]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_the_entry_gets_the_config_and_its_code_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[RunConfig, bool]] = []

    def entry(config: RunConfig, dry_run: bool) -> int:
        seen.append((config, dry_run))
        return 3

    monkeypatch.setattr(launch.local, "run", entry)
    assert main(["run", "--seed", "4"]) == 3
    assert [(config.seed, dry_run) for config, dry_run in seen] == [(4, False)]
