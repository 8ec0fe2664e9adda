"""Processes: exits, stubborn children, grandchildren, output, death of the launcher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from launch.processes import Exit, ManagedProcess, ProcessSpec, ProcessTable, tail
from launch.sweep import end_marked, find_marked, wait_gone

_DEADLINE_S = 15.0
_READY = "import sys; print('ready', flush=True); sys.stdin.readline(); "
_SLEEP = "import signal; signal.pause()"


def _spec(tmp_path: Path, code: str, **changes: object) -> ProcessSpec:
    values: dict[str, object] = {
        "name": "child",
        "argv": (sys.executable, "-c", code),
        "log": tmp_path / "child",
        "role": "engine",
    }
    return ProcessSpec(**{**values, **changes})  # type: ignore[arg-type]


def _run(work: Callable[[ProcessTable], Awaitable[None]]) -> None:
    async def main() -> None:
        table = ProcessTable(f"test-{os.getpid()}-{os.urandom(4).hex()}", os.environ)
        table.open()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await work(table)
        finally:
            await asyncio.to_thread(end_marked, table.launch_id, grace_s=1.0)
            await table.drained(1.0)
            table.close()

    asyncio.run(main())


async def _line(process: ManagedProcess, lines: asyncio.Queue[bytes]) -> bytes:
    return (await lines.get()).strip()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", Exit(0, None)),
        ("raise SystemExit(3)", Exit(3, None)),
        ("import os; os.kill(os.getpid(), 9)", Exit(None, 9)),
    ],
)
def test_exit_is_reported_as_code_or_signal(tmp_path: Path, code: str, expected: Exit) -> None:
    async def work(table: ProcessTable) -> None:
        process = table.start(_spec(tmp_path, code), 0)
        assert await process.wait() == expected
        assert table.running == []

    _run(work)


def test_exits_read_well() -> None:
    assert str(Exit(1, None)) == "exit code 1"
    assert str(Exit(None, 9)) == "signal 9 (SIGKILL)"
    assert str(Exit(None, 250)) == "signal 250"
    assert Exit(0, None).is_success
    assert not Exit(None, 15).is_success


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            table.start(_spec(tmp_path, "", argv=("/no-such-program",)), 0)

    _run(work)


def test_each_life_has_a_log_that_starts_with_what_was_run(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        for life in (0, 1):
            process = table.start(_spec(tmp_path, f"print('output of {life}')"), life)
            await process.wait()
            assert process.log_path == tmp_path / f"child.{life}.log"
            header, output = process.log_path.read_text().splitlines()
            assert header.startswith("== ")
            assert f"child life {life}: {sys.executable} -c" in header
            assert output == f"output of {life}"
            assert process.log_tail(1) == [output]

    _run(work)


def test_console_output_goes_to_the_log_and_to_the_console(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        seen: list[bytes] = []
        code = "import os; os.write(1, b'shown\\n'); os.write(2, b'hidden\\n')"
        process = table.start(_spec(tmp_path, code, has_console=True), 0, on_output=seen.append)
        await process.wait()
        await table.drained(5.0)
        assert b"".join(seen) == b"shown\n"
        log = process.log_path.read_text().splitlines()
        assert sorted(log[1:]) == ["hidden", "shown"]

    _run(work)


def test_environment_is_laid_over_the_base_and_none_removes(tmp_path: Path) -> None:
    async def main() -> None:
        table = ProcessTable("test-environment", {"KEPT": "1", "PROXY": "2", "SET": "3"})
        table.open()
        code = "import os; print(sorted(k for k in os.environ if not k.startswith('LC_')))"
        process = table.start(_spec(tmp_path, code, env={"PROXY": None, "SET": "4"}), 0)
        await process.wait()
        table.close()
        assert process.log_tail(1) == ["['KEPT', 'SET', 'SPT_NOENV', '_MUSTER_LAUNCH']"]

    asyncio.run(main())


def test_stop_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        code = (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"print('ready', flush=True); {_SLEEP}"
        )
        process = table.start(
            _spec(tmp_path, code, has_console=True), 0, on_output=lines.put_nowait
        )
        assert await _line(process, lines) == b"ready"
        assert await process.stop(0.05) == Exit(None, signal.SIGKILL)

    _run(work)


def test_stop_ends_a_process_that_is_stopped(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        process = table.start(_spec(tmp_path, _SLEEP), 0)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
        assert await process.stop(0.05) == Exit(None, signal.SIGKILL)

    _run(work)


def test_stop_of_an_ended_process_returns_its_exit(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        process = table.start(_spec(tmp_path, "raise SystemExit(4)"), 0)
        await process.wait()
        assert await process.stop(1.0) == Exit(4, None)

    _run(work)


_FORKS = """
import os, signal, subprocess, sys
kind = sys.argv[1]
child = subprocess.Popen(
    [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
    stdout=subprocess.PIPE, start_new_session=kind == "own-session",
)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("kind", ["same-group", "own-session"])
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_grandchildren_never_outlive(tmp_path: Path, kind: str, end: str) -> None:
    async def work(table: ProcessTable) -> None:
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        argv = (sys.executable, "-c", _FORKS, kind)
        process = table.start(
            _spec(tmp_path, "", argv=argv, has_console=True), 0, on_output=lines.put_nowait
        )
        grandchild = int(await _line(process, lines))
        assert [found.pid for found in find_marked(table.launch_id)] == [process.pid, grandchild]
        if end == "kill":
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
        else:
            await process.stop(5.0)
        assert find_marked(table.launch_id) == []
        assert wait_gone([grandchild], 5.0)

    _run(work)


def test_marks_of_other_launches_and_lives_are_left_alone(tmp_path: Path) -> None:
    async def work(table: ProcessTable) -> None:
        first = table.start(_spec(tmp_path, _SLEEP), 1)
        second = table.start(_spec(tmp_path, _SLEEP), 11)
        await asyncio.to_thread(end_marked, f"{table.launch_id}/child.1/", grace_s=5.0)
        assert await first.wait_exit() == Exit(None, signal.SIGTERM)
        assert second.exit is None
        assert table.running == [second]

    _run(work)


def test_a_killed_launcher_takes_its_processes_with_it(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
from pathlib import Path
from launch.processes import ProcessSpec, ProcessTable

async def main():
    table = ProcessTable("test-killed", os.environ)
    table.open()
    argv = (sys.executable, "-c", {_SLEEP!r})
    spec = ProcessSpec("child", argv, Path({str(tmp_path / "c")!r}), "engine")
    print(table.start(spec, 0).pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait(_DEADLINE_S)
    launcher.stdout.close()
    assert wait_gone([child], _DEADLINE_S)


def test_the_guardian_ends_orphans_and_removes_the_directory(tmp_path: Path) -> None:
    mark = f"test-guardian-{os.urandom(4).hex()}/"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "socket").touch()
    environ = {**os.environ, "_MUSTER_LAUNCH": f"{mark}child.0/"}
    with (
        subprocess.Popen([sys.executable, "-c", _SLEEP], env=environ) as orphan,
        subprocess.Popen(
            [sys.executable, "-m", "launch.guardian", mark, str(scratch)], stdin=subprocess.PIPE
        ) as guardian,
    ):
        assert guardian.stdin is not None
        guardian.stdin.close()
        assert guardian.wait(_DEADLINE_S) == 0
        assert orphan.wait(_DEADLINE_S) == -signal.SIGTERM
    assert not scratch.exists()


def test_tail_reads_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path, 3) == []
    path.write_text("".join(f"line {number}\n" for number in range(5000)))
    assert tail(path, 2) == ["line 4998", "line 4999"]
