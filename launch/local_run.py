"""Carries out a plan on this machine, from the first process to the last trace.

    router, engine groups, trainer, orchestrator --start--> (whole run) --one end--> stop all

| what happens | what follows |
|---|---|
| an engine ends, or the orchestrator asks | its group is relaunched (`launch.relaunch`) |
| the router ends | it is started again at once, same port |
| the orchestrator ends with code 0 | the run succeeded: stop all, exit 0 |
| the orchestrator or the trainer fails, or the router for good | stop all, name it, exit 1 |
| SIGINT, SIGTERM, SIGHUP | stop all, exit 128 + signal; a second one kills at once |

Stopping is bounded: orchestrator and trainer first (they finish what they write), then engines and
router; each gets SIGTERM, a grace, SIGKILL. The launcher itself keeps no state that matters: its
death ends every process, and the next run starts from the checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx

from launch.accounting import ShmLedger
from launch.fleet import LOG_TAIL_LINES, Fleet
from launch.link import OrchestratorLink
from launch.local_plan import Plan
from launch.processes import ManagedProcess, ProcessSpec, ProcessTable
from launch.relaunch import GiveUp, GroupKeeper, RelaunchAsked, RelaunchPolicy
from launch.run_dir import RunDir
from protocol.launcher_api import GroupsView, LauncherReply

_ROUTER_GROUP = 0
# The router starts in well under a second: it may be tried often, but not for ever.
_ROUTER_POLICY = RelaunchPolicy(
    backoff_initial_s=0.1,
    backoff_max_s=5.0,
    max_restarts=10,
    max_never_healthy=3,
    healthy_after_s=60.0,
    startup_timeout_s=30.0,
)
# The trainer ends first in a good run; the orchestrator then writes its last numbers.
_ORCHESTRATOR_FINISH_S = 120.0
_UP_TIMEOUT_S = 2.0
_LEDGER_INTERVAL_S = 10.0
_OUTPUT_DRAIN_S = 2.0
_NUM_SHOWN_LINES = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why the run ends, and its exit code."""

    code: int
    text: str


class LocalRun:
    """One run on this machine."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        table: ProcessTable,
        *,
        token: str,
        ledger: ShmLedger,
        say: Callable[[str], None],
        echo: Callable[[bytes], None],
    ) -> None:
        """`say` takes messages for the user, `echo` the orchestrator's own output."""
        self._plan = plan
        self._run_dir = run_dir
        self._table = table
        self._token = token
        self._ledger = ledger
        self._say = say
        self._echo = echo
        self._singles: list[ManagedProcess] = []
        self._shown: deque[str] = deque(maxlen=_NUM_SHOWN_LINES)

    async def main(self) -> int:
        """Run to the end; returns the exit code. No process of the run is left afterwards."""
        self._table.open()
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            stack.callback(self._table.close)
            self._handle_signals(stack)
            self._client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=_UP_TIMEOUT_S, trust_env=False)
            )
            self._make_fleets()
            stack.push_async_callback(self._table.drained, _OUTPUT_DRAIN_S)
            # Registered last, so done first and whatever goes wrong.
            stack.push_async_callback(self._stop_all)
            outcome = await self._until_outcome()
            self._say(outcome.text)
            return outcome.code

    def _make_fleets(self) -> None:
        plan = self._plan
        self._engines = Fleet(
            GroupKeeper(
                {
                    group: [place.url for place in plan.topology.members(group)]
                    for group in plan.topology.groups
                },
                plan.policy,
            ),
            plan.members(),
            table=self._table,
            is_up=self._engine_is_up,
            stop_grace_s=plan.stop_grace_s,
            on_change=self._publish,
            on_give_up=self._engine_given_up,
            say=self._say,
            label="group {}".format,
        )
        self._router = Fleet(
            GroupKeeper({_ROUTER_GROUP: [plan.topology.router_url]}, _ROUTER_POLICY),
            {_ROUTER_GROUP: [plan.router]},
            table=self._table,
            is_up=self._router_is_up,
            stop_grace_s=plan.stop_grace_s,
            on_change=self._publish,
            on_give_up=self._router_given_up,
            say=self._say,
            label=lambda _: "router",
        )
        self._link = OrchestratorLink(
            plan.topology.orchestrator_url,
            self._token,
            view=self._view,
            on_reply=self._on_reply,
            say=self._say,
        )

    async def _until_outcome(self) -> Outcome:
        """Start everything and keep it running until something decides the run."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._router.run()),
                tasks.create_task(self._engines.run()),
                tasks.create_task(self._keep_single(self._plan.trainer)),
                tasks.create_task(self._keep_single(self._plan.orchestrator)),
                tasks.create_task(self._link.run()),
                tasks.create_task(self._keep_ledger()),
            ]
            self._announce()
            outcome = await self._outcome
            for task in running:
                task.cancel()
        return outcome

    def _announce(self) -> None:
        plan = self._plan
        topology = plan.topology
        logs = plan.output_dir / "logs"
        self._say(f"run {plan.run_id}, output in {plan.output_dir}")
        self._say(f"router at {topology.router_url}; log: {logs}/router.0.log")
        groups = ", ".join(
            f"group {group}: {len(topology.members(group))}" for group in topology.groups
        )
        self._say(f"engines starting ({groups}); logs: {logs}/engine-*.log")
        self._say(f"trainer at {topology.trainer_url}; log: {logs}/trainer.0.log")
        self._say(f"orchestrator at {topology.orchestrator_url}; log: {logs}/orchestrator.0.log")

    async def _keep_single(self, spec: ProcessSpec) -> None:
        """Run the trainer or the orchestrator; its end decides the run."""
        try:
            process = self._table.start(spec, 0, on_output=self._show)
        except OSError as error:
            self._end(Outcome(1, f"{spec.name} cannot be started: {error}"))
            return
        self._singles.append(process)
        self._publish()
        ended = await process.wait_exit()
        self._publish()
        if not ended.is_success:
            self._end(Outcome(1, self._death_text(process)))
        elif spec.role == "orchestrator":
            self._end(Outcome(0, f"run {self._plan.run_id} is complete"))
        else:
            await asyncio.sleep(_ORCHESTRATOR_FINISH_S)
            text = (
                f"{spec.name} ended {_ORCHESTRATOR_FINISH_S:g} s ago and the orchestrator did not"
            )
            self._end(Outcome(1, text))

    async def _keep_ledger(self) -> None:
        """Take down the shared memory in use, for what a killed process would leave behind."""
        while True:
            await asyncio.to_thread(self._ledger.note)
            await asyncio.sleep(_LEDGER_INTERVAL_S)

    async def _engine_is_up(self, spec: ProcessSpec) -> bool:
        assert spec.group is not None
        assert spec.index is not None
        place = self._plan.topology.members(spec.group)[spec.index]
        return await self._answers(f"{place.url}/liveness")

    async def _router_is_up(self, spec: ProcessSpec) -> bool:
        return await self._answers(f"{self._plan.topology.router_url}/list_workers")

    async def _answers(self, url: str) -> bool:
        try:
            return (await self._client.get(url)).is_success
        except httpx.HTTPError:
            return False

    def _engine_given_up(self, event: GiveUp) -> None:
        """The orchestrator decides whether what is left is enough; with nothing left, we do."""
        self._say(f"group {event.group} is given up: {event.reason}")
        if all(view.state == "failed" for view in self._engines.keeper.view()):
            self._end(Outcome(1, "every engine group is given up"))

    def _router_given_up(self, event: GiveUp) -> None:
        self._end(Outcome(1, f"the router is given up: {event.reason}"))

    def _on_reply(self, reply: LauncherReply) -> None:
        # `finished` asks for nothing: the orchestrator's exit ends the run a moment later.
        for wish in reply.relaunch:
            self._engines.handle(RelaunchAsked(wish.group, wish.life, wish.reason))

    def _view(self) -> GroupsView:
        return GroupsView(run_id=self._plan.run_id, groups=self._engines.keeper.view())

    def _publish(self) -> None:
        """Say what runs to whoever reads the output directory, and to the orchestrator."""
        self._run_dir.write("groups.json", self._view().model_dump_json(indent=1) + "\n")
        rows = [
            {
                "name": process.spec.name,
                "role": process.spec.role,
                "group": process.spec.group,
                "index": process.spec.index,
                "life": process.life,
                "pid": process.pid,
                "started_at": process.started_at,
                "log": str(process.log_path),
            }
            for process in self._table.running
        ]
        self._run_dir.write("processes.json", json.dumps(rows, indent=1) + "\n")
        self._link.changed()

    def _end(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _handle_signals(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
            stack.callback(loop.remove_signal_handler, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._outcome.done():
            text = f"{number.name}: stopping everything, once more to kill"
            self._end(Outcome(128 + number, text))
            return
        self._say(f"{number.name} again: killing everything")
        for process in self._table.running:
            process.kill()

    def _show(self, data: bytes) -> None:
        self._echo(data)
        self._shown.extend(data.decode(errors="replace").splitlines())

    def _death_text(self, process: ManagedProcess) -> str:
        """Which process died, how, and the end of its log, without what was on the console."""
        shown = self._shown if process.spec.has_console else ()
        tail = process.log_tail(LOG_TAIL_LINES)
        lines = "".join(f"\n    {line}" for line in tail if line not in shown)
        return f"{process.spec.name} ended: {process.exit}; log: {process.log_path}{lines}"

    async def _stop_all(self) -> None:
        """Those that write first, then those that serve. Each step is bounded."""
        await asyncio.to_thread(self._ledger.note)
        grace_s = self._plan.stop_grace_s
        await asyncio.gather(*(process.stop(grace_s) for process in self._singles))
        await asyncio.gather(
            self._engines.stop("end of the run"), self._router.stop("end of the run")
        )
        self._publish()


def say_on_console(text: str) -> None:
    """Print a message of the launcher."""
    print(f"muster: {text}", flush=True)


def echo_on_console(data: bytes) -> None:
    """Pass output of a process through, as it is."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
