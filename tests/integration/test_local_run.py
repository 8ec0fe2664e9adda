"""The launcher with stand-in processes: relaunch of groups, ends, signals, what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from launch.accounting import ShmLedger, settle
from launch.local_plan import Plan
from launch.local_run import LocalRun
from launch.ports import candidates, ephemeral_range, lease_ports
from launch.processes import ProcessSpec, ProcessTable
from launch.relaunch import RelaunchPolicy
from launch.run_dir import RunDir, RunIsAlive
from protocol.launcher_api import GroupsView, GroupView
from slurm.topology import Topology, build_topology, port_names

_STUB = Path(__file__).parents[1] / "helpers" / "stub_process.py"
_DEADLINE_S = 20.0
_POLICY = RelaunchPolicy(
    backoff_initial_s=0.3,
    backoff_max_s=0.5,
    max_restarts=5,
    max_never_healthy=1,
    healthy_after_s=60.0,
    startup_timeout_s=10.0,
)
Ports = dict[str, int]


@dataclass
class Bench:
    """One run with stand-ins, and what a test looks at."""

    plan: Plan
    ports: Ports
    messages: list[str] = field(default_factory=list)
    output: list[bytes] = field(default_factory=list)

    @property
    def topology(self) -> Topology:
        """Map of the run."""
        return self.plan.topology

    def pids(self) -> dict[str, int]:
        """Pid by process name, from processes.json."""
        rows = json.loads((self.plan.output_dir / "processes.json").read_text())
        return {row["name"]: row["pid"] for row in rows}

    def group(self, number: int) -> GroupView:
        """A group, from groups.json."""
        text = (self.plan.output_dir / "groups.json").read_text()
        return GroupsView.model_validate_json(text).groups[number]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be true on disk or in messages."""
        while True:
            try:
                if condition():
                    return
            except (FileNotFoundError, IndexError):
                pass
            await asyncio.sleep(0.02)

    async def until_running(self, *lives: int) -> None:
        """Wait for each group to run its given life."""
        await self.until(
            lambda: all(
                (self.group(number).state, self.group(number).life) == ("running", life)
                for number, life in enumerate(lives)
            )
        )

    async def end(self, name: str, code: int) -> None:
        """Make a stand-in exit, once it serves."""
        url = f"http://127.0.0.1:{self.ports[name]}/exit/{code}"
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    await client.post(url)
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)  # it is starting; the run's deadline bounds this
                except httpx.HTTPError:
                    return


def _spec(
    ports: Ports, out: Path, name: str, role: str, flags: dict[str, list[str]]
) -> ProcessSpec:
    is_engine = role == "engine"
    argv = (sys.executable, str(_STUB), "--port", str(ports[name]), "--dir", str(out))
    return ProcessSpec(
        name=name,
        argv=(*argv, *flags.get(name, [])),
        log=out / "logs" / name,
        role=role,  # type: ignore[arg-type]
        group=int(name[1]) if is_engine else None,
        index=int(name[3]) if is_engine else None,
        takes_life=is_engine,
        has_console=role == "orchestrator",
    )


@contextmanager
def _bench(out: Path, groups: list[int], flags: dict[str, list[str]]) -> Iterator[Bench]:
    allowed = candidates(18000, 30999, ephemeral_range())
    with lease_ports(port_names(groups), allowed) as lease:
        ports = dict(lease.ports)
        topology = build_topology(groups, ports)
        plan = Plan(
            run_id="stand-ins",
            output_dir=out,
            topology=topology,
            router=_spec(ports, out, "router", "router", flags),
            engines=tuple(
                _spec(ports, out, place.slot.engine_id, "engine", flags)
                for place in topology.engines
            ),
            trainer=_spec(ports, out, "trainer", "trainer", flags),
            orchestrator=_spec(ports, out, "orchestrator", "orchestrator", flags),
            files={},
            policy=_POLICY,
            stop_grace_s=0.5,
        )
        yield Bench(plan, ports)


def _run(
    out: Path,
    script: Callable[[Bench], Awaitable[None]],
    *,
    groups: list[int],
    flags: dict[str, list[str]] | None = None,
) -> tuple[int, Bench]:
    """Run the launcher beside `script`; checks that nothing is left, whatever happened."""
    run_dir = RunDir(out)
    launch_id = f"test-{os.urandom(4).hex()}"
    ledger = ShmLedger(launch_id)

    async def both(bench: Bench) -> int:
        table = ProcessTable(launch_id, os.environ)
        run = LocalRun(
            bench.plan,
            run_dir,
            table,
            token="secret",
            ledger=ledger,
            say=bench.messages.append,
            echo=bench.output.append,
        )
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run.main())
            tasks.create_task(_script(bench))
            code = await running
        return code

    async def _script(bench: Bench) -> None:
        await script(bench)

    with _bench(out, groups, flags or {}) as bench:
        code = asyncio.run(both(bench))
        left = settle(launch_id, bench.ports, ledger, host="127.0.0.1")
    run_dir.release()
    assert str(left) == "no process, port or shared memory left behind"
    return code, bench


def test_a_run_succeeds_when_the_orchestrator_ends(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0, 0)
        assert set(bench.pids()) == {"router", "g0e0", "g1e0", "trainer", "orchestrator"}
        posted = tmp_path / "views.jsonl"
        await bench.until(lambda: posted.read_text().count('"running"') >= 2)
        await bench.end("trainer", 0)
        await bench.end("orchestrator", 0)

    code, bench = _run(tmp_path, script, groups=[0, 1])
    assert code == 0
    assert bench.messages[-1] == "run stand-ins is complete"
    assert b"serving as life 0\n" in b"".join(bench.output)
    assert [bench.group(number).state for number in (0, 1)] == ["stopped", "stopped"]
    assert bench.pids() == {}
    views = [
        GroupsView.model_validate_json(line)
        for line in (tmp_path / "views.jsonl").read_text().splitlines()
    ]
    assert {view.run_id for view in views} == {"stand-ins"}
    assert views[-1].groups[0].urls == [bench.topology.engines[0].url]


def test_a_group_is_relaunched_as_a_whole_and_the_other_is_left_alone(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0, 0)
        before = bench.pids()
        os.kill(before["g0e1"], signal.SIGKILL)
        await bench.until(lambda: bench.group(0).state == "exited")
        view = bench.group(0)
        assert [(exit_.index, exit_.signal) for exit_ in view.exits] == [(1, 9)]
        assert view.exits[0].log_tail[-1] == "serving as life 0"
        assert bench.pids()["g0e0"] == before["g0e0"]
        await bench.until_running(1, 0)
        after = bench.pids()
        assert after["g0e0"] != before["g0e0"]
        assert after["g0e1"] != before["g0e1"]
        assert {name: after[name] for name in ("g1e0", "g1e1", "router", "trainer")} == {
            name: before[name] for name in ("g1e0", "g1e1", "router", "trainer")
        }
        assert "serving as life 1" in (tmp_path / "logs" / "g0e0.1.log").read_text()
        await bench.end("orchestrator", 0)

    code, bench = _run(tmp_path, script, groups=[0, 0, 1, 1])
    assert code == 0
    assert "group 0 starts again, life 1" in bench.messages
    assert any(text.startswith("g0e1 ended: signal 9 (SIGKILL)") for text in bench.messages)


def test_a_hung_engine_is_relaunched_when_the_orchestrator_asks(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0, 0)
        os.kill(bench.pids()["g1e0"], signal.SIGSTOP)
        wish = {"relaunch": [{"group": 1, "life": 0, "reason": "engine_stalled"}]}
        (tmp_path / "reply.json").write_text(json.dumps(wish))
        await bench.until_running(0, 1)
        await bench.end("orchestrator", 0)

    code, bench = _run(tmp_path, script, groups=[0, 1])
    assert code == 0
    assert "group 1 starts again, life 1" in bench.messages


def test_an_engine_that_ends_with_code_zero_is_relaunched_too(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0, 0)
        await bench.end("g0e0", 0)
        await bench.until_running(1, 0)
        await bench.end("orchestrator", 0)

    code, _ = _run(tmp_path, script, groups=[0, 1])
    assert code == 0


def test_the_router_comes_back_on_its_port(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0)
        before = bench.pids()["router"]
        os.kill(before, signal.SIGKILL)
        await bench.until(lambda: bench.pids().get("router", before) != before)
        await bench.until(lambda: "router is up, life 1" in bench.messages)
        await bench.end("orchestrator", 0)

    code, _ = _run(tmp_path, script, groups=[0])
    assert code == 0


@pytest.mark.parametrize("name", ["trainer", "orchestrator"])
def test_a_failed_process_ends_the_run_with_its_name_and_log(tmp_path: Path, name: str) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0)
        await bench.end(name, 3)

    code, bench = _run(tmp_path, script, groups=[0])
    assert code == 1
    assert bench.messages[-1].startswith(f"{name} ended: exit code 3; log: {tmp_path}/logs/{name}")
    was_shown = name == "orchestrator"
    assert bench.messages[-1].endswith("    serving as life 0") != was_shown


def test_engines_that_never_come_up_end_the_run(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        return None

    code, bench = _run(tmp_path, script, groups=[0], flags={"g0e0": ["--exit", "0"]})
    assert code == 1
    assert bench.messages[-1] == "every engine group is given up"
    assert "group 0 is given up: 2 lives in a row ended before all members were up" in "\n".join(
        bench.messages
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals, code: int) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0)
        os.kill(os.getpid(), number)

    assert _run(tmp_path, script, groups=[0], flags={"g0e0": ["--ignore-term"]})[0] == code


def test_a_second_signal_kills(tmp_path: Path) -> None:
    async def script(bench: Bench) -> None:
        await bench.until_running(0)
        # It ignores SIGTERM only once it serves; before that the run would be over at once.
        log = tmp_path / "logs" / "trainer.0.log"
        await bench.until(lambda: "serving as life 0" in log.read_text())
        os.kill(os.getpid(), signal.SIGINT)
        await bench.until(lambda: bench.messages[-1].startswith("SIGINT: stopping"))
        os.kill(os.getpid(), signal.SIGINT)

    code, bench = _run(tmp_path, script, groups=[0], flags={"trainer": ["--ignore-term"]})
    assert code == 130
    assert "SIGINT again: killing everything" in bench.messages


def test_a_directory_whose_run_is_alive_is_refused(tmp_path: Path) -> None:
    first = RunDir(tmp_path)
    first.write_token("abc")
    with pytest.raises(RunIsAlive, match=f"alive: muster run, pid {os.getpid()}"):
        RunDir(tmp_path)
    first.release()
    second = RunDir(tmp_path)
    assert not (tmp_path / "admin_token").exists()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_the_journal_of_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "journal.jsonl").write_text(text)
        (tmp_path / "journal.000001.jsonl").write_text(text)
        RunDir(tmp_path).release()
        earlier = {path.name: path.read_text() for path in (tmp_path / "earlier").iterdir()}
        assert earlier == {"journal.jsonl": text, "journal.000001.jsonl": text}
        assert list(tmp_path.glob("journal*")) == []
