"""One weight update over 128 fake engines: what the AdminPlane itself costs, phase by phase.

    python benchmarks/control_plane.py --rounds 20 --updates 5
    python benchmarks/control_plane.py --group-sizes 16x64 --rounds 3 --regroups 200

The plane under test is the real one: core, runtime, journal, drivers, probes and lease renewals,
in this process. Engines (groups of 16, 16, 16, 16 and 64) and trainer are fakes in two other
processes; they answer over HTTP at once and move zero bytes, so only control work is left. Each
round begins with restarted engines and an empty plane, and gives one `full` update (open, join,
stage, pause, commit, verify, admit, resume, finish) and then `stable` ones, whose membership has
not changed (no open, join and admit: the generation lives on, leases are renewed by probes). Times
are the plane's own, of its journalled UpdateEnded; `cpu` is the processor time of the plane's
process from one update's end to the next, probes included: the number to look at on a busy machine.
Goal: p50 of the whole update below 0.2 s, below 1 s for more than 128 engines.

`--regroups N` adds one long life of a plane: N times an engine is restarted, so that its group
leaves and the next update needs a new generation. Memory and file descriptors of this process are
read after each; goal: no more at the end than after the first quarter (10 % and 16 descriptors).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.fake_fleet import slots_of_sizes
from orchestrator.drivers.admin_http import AdminHttp
from orchestrator.drivers.engines import EngineDriver
from orchestrator.drivers.journal import Header, Journal
from orchestrator.drivers.prober import Prober
from orchestrator.drivers.runtime import Drivers, Notice, Runtime
from orchestrator.drivers.trainer import TrainerLink
from orchestrator.plane.commands import Fail, UpdateEnded
from orchestrator.plane.core import PlaneCore
from orchestrator.plane.health import ProbeSettings
from orchestrator.plane.state import PlaneSettings
from protocol.ids import Slot

ROOT = Path(__file__).resolve().parent.parent
GROUP_SIZES = (16, 16, 16, 16, 64)
SMALL_FLEET = 128
SMALL_GOAL_S, LARGE_GOAL_S = 0.2, 1.0
MAX_GROWTH = 0.1
MAX_MORE_FDS = 16
RUN_ID = "bench"
LEASE_S = 15.0
_ROUND_TIMEOUT_S = 120.0
_REGROUP_TIMEOUT_S = 60.0
_NOTHING_S = 1e-3  # a phase that was entered and had nothing to do
_PHASES = ("open", "join", "stage", "pause", "commit", "verify", "admit", "resume", "finish")


class Sample(NamedTuple):
    """A finished update, and the processor time of this process that it took."""

    update: UpdateEnded
    cpu_s: float


class Footprint(NamedTuple):
    """Of this process: resident memory in MiB, open file descriptors."""

    memory_mib: float
    num_fds: int


@contextlib.contextmanager
def fake_process(args: Sequence[str], token: str) -> Iterator[Callable[[], str]]:
    """A fake in a process of its own; yields a reader of the lines that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=ROOT,
        env={**os.environ, "MUSTER_ADMIN_TOKEN": token},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    stdout = process.stdout

    def read_line() -> str:
        line = stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{args[0]} did not start")
        return line

    try:
        yield read_line
    finally:
        process.terminate()
        process.wait(10)
        stdout.close()


class Plane:
    """The AdminPlane as the orchestrator runs it, without a router; collects finished updates."""

    def __init__(self, urls: dict[Slot, str], trainer_url: str, token: str, journal: Path) -> None:
        self._urls = urls
        self._trainer_url = trainer_url
        self._token = token
        self._journal = journal
        self._ended: asyncio.Queue[UpdateEnded | Fail] = asyncio.Queue()

    async def updates(self) -> AsyncGenerator[UpdateEnded, None]:
        """Updates as they finish. Raises RuntimeError when one fails."""
        # Evictions are what a regroup is made of here: nobody is to be quarantined for them.
        settings = PlaneSettings(startup_timeout_s=30.0, max_evictions=10**6)
        groups = [slot.group for slot in self._urls]
        urls = list(self._urls.values())
        now = time.monotonic()
        core = PlaneCore(settings, urls, groups, now)
        journal = Journal(self._journal, time.time)
        journal.begin(Header(RUN_ID, 0, settings, tuple(urls), tuple(groups), now))
        runtime = Runtime(core, journal, time.monotonic, self._notice)
        async with (
            AdminHttp(self._token, 5.0) as http,
            TrainerLink(
                self._trainer_url,
                self._token,
                time.monotonic,
                on_ready=runtime.post,
                on_step=lambda _step: None,
            ) as trainer,
        ):
            engines = EngineDriver(http, self._urls.__getitem__, time.monotonic, lease_s=LEASE_S)
            prober = Prober(
                engines,
                ProbeSettings(),
                time.monotonic,
                runtime.post,
                run_id=RUN_ID,
                timeout_s=5.0,
            )
            loops = [
                asyncio.create_task(work)
                for work in (
                    runtime.run(Drivers(engines, prober, trainer, None, None)),
                    prober.run(),
                    trainer.watch(),
                )
            ]
            try:
                while True:
                    yield await self._next(loops)
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)
                journal.close()

    def _notice(self, notice: Notice) -> None:
        if isinstance(notice, UpdateEnded | Fail):
            self._ended.put_nowait(notice)

    async def _next(self, loops: list[asyncio.Task[None]]) -> UpdateEnded:
        ended = asyncio.create_task(self._ended.get())
        await asyncio.wait([ended, *loops], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            ended.cancel()
            for loop in loops:
                if loop.done():
                    loop.result()
            raise RuntimeError("a loop of the plane ended")
        update = ended.result()
        if isinstance(update, Fail) or update.outcome != "finished":
            raise RuntimeError(f"an update failed: {update.reason}")
        return update


async def one_round(
    urls: dict[Slot, str], trainer_url: str, token: str, journal: Path, num_updates: int
) -> list[Sample]:
    """Restart all engines, then one full update and `num_updates` stable ones."""
    async with AdminHttp(token, 5.0) as http:
        for url in urls.values():
            await http.call("POST", f"{url}/fault", {"restart": True}, timeout_s=5.0)
    updates: list[Sample] = []
    cpu_s = time.process_time()
    plane = Plane(urls, trainer_url, token, journal)
    async with asyncio.timeout(_ROUND_TIMEOUT_S):
        async with contextlib.aclosing(plane.updates()) as ended:
            async for update in ended:
                assert len(update.members) == len(urls), update
                updates.append(Sample(update, time.process_time() - cpu_s))
                cpu_s = time.process_time()
                if len(updates) > num_updates:
                    break
    return updates


async def regroup(
    urls: dict[Slot, str], trainer_url: str, token: str, journal: Path, num_regroups: int
) -> tuple[list[Sample], list[Footprint]]:
    """One plane, and a new generation for each of `num_regroups` restarted engines."""
    samples: list[Sample] = []
    footprints: list[Footprint] = []
    slots = [slot for slot in urls if slot.index == 0]
    plane = Plane(urls, trainer_url, token, journal)
    generation = 0
    deadline = time.monotonic() + _REGROUP_TIMEOUT_S
    async with AdminHttp(token, 5.0) as http, contextlib.aclosing(plane.updates()) as ended:
        cpu_s = time.process_time()
        async for update in ended:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no new generation of all within {_REGROUP_TIMEOUT_S:g} s")
            is_new = update.generation > generation and len(update.members) == len(urls)
            if is_new:
                generation = update.generation
                samples.append(Sample(update, time.process_time() - cpu_s))
                footprints.append(footprint())
                if len(samples) > num_regroups:
                    break
                url = urls[slots[len(samples) % len(slots)]]
                await http.call("POST", f"{url}/fault", {"restart": True}, timeout_s=5.0)
                deadline = time.monotonic() + _REGROUP_TIMEOUT_S
            cpu_s = time.process_time()
    return samples[1:], footprints[1:]


def footprint() -> Footprint:
    """As the kernel has it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    num_fds = len(os.listdir("/proc/self/fd"))
    return Footprint(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, num_fds)


def measure(args: argparse.Namespace) -> tuple[dict[str, list[Sample]], list[Footprint]]:
    """All rounds; updates by kind, and the footprints of the long life."""
    token = secrets.token_hex(16)
    slots = slots_of_sizes(args.group_sizes)
    sizes = [str(size) for size in args.group_sizes]
    found: dict[str, list[Sample]] = {"full": [], "stable": [], "regroup": []}
    footprints: list[Footprint] = []
    fleet_args = ["engine.fake", "--run-id", RUN_ID, "--group-sizes", *sizes]
    trainer_args = ["tests.fakes.trainer", "--run-id", RUN_ID, "--free-running"]
    trainer_args += ["--step-s", str(args.step_s)]
    with (
        tempfile.TemporaryDirectory() as directory,
        fake_process(fleet_args, token) as fleet,
        asyncio.Runner(loop_factory=loop_factory(args.loop)) as runner,
    ):
        urls = {slot: fleet() for slot in slots}
        for number in range(args.rounds):
            journal = Path(directory) / f"round-{number}.jsonl"
            with fake_process(trainer_args, token) as trainer:
                updates = runner.run(one_round(urls, trainer(), token, journal, args.updates))
            found["full"].append(updates[0])
            found["stable"] += updates[1:]
        if args.regroups:
            journal = Path(directory) / "regroups.jsonl"
            with fake_process(trainer_args, token) as trainer:
                found["regroup"], footprints = runner.run(
                    regroup(urls, trainer(), token, journal, args.regroups)
                )
    return found, footprints


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of the plane's process; `auto`: uvloop where it is installed."""
    if name == "asyncio":
        return None
    try:
        from uvloop import new_event_loop
    except ImportError:
        if name == "uvloop":
            raise
        return None
    return new_event_loop


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """(p50, p95)."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]


def summarise(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """(p50, p95) in seconds of the whole update and of each phase that took part."""
    phases = [dict(sample.update.phase_s) for sample in samples]
    rows = {"whole": percentiles([sum(phase_s.values()) for phase_s in phases])}
    for phase in _PHASES:
        values = [phase_s.get(phase, 0.0) for phase_s in phases]
        if statistics.median(values) > _NOTHING_S:
            rows[phase] = percentiles(values)
    rows["cpu"] = percentiles([sample.cpu_s for sample in samples])
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="full updates to measure")
    parser.add_argument("--updates", type=int, default=5, help="stable updates in each round")
    parser.add_argument("--group-sizes", type=sizes_of, nargs="+", help="16 16 64, or 16x64")
    parser.add_argument("--regroups", type=int, default=0, help="new generations of one plane")
    parser.add_argument("--step-s", type=float, default=0.1, help="trainer's pause between updates")
    parser.add_argument("--loop", choices=["auto", "uvloop", "asyncio"], default="auto")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    args = parser.parse_args(argv)
    args.group_sizes = [size for sizes in args.group_sizes or [GROUP_SIZES] for size in sizes]
    return args


def sizes_of(text: str) -> list[int]:
    """`16` -> [16]; `16x3` -> [16, 16, 16]. Raises ValueError."""
    size, _, count = text.partition("x")
    return [int(size)] * int(count or 1)


def describe(footprints: Sequence[Footprint]) -> str:
    """How the long life went, and whether it grew."""
    early, late = footprints[len(footprints) // 4], footprints[-1]
    is_flat = (
        late.memory_mib <= early.memory_mib * (1 + MAX_GROWTH)
        and late.num_fds <= early.num_fds + MAX_MORE_FDS
    )
    quarters = [footprints[(len(footprints) - 1) * part // 4] for part in range(5)]
    shown = ", ".join(f"{one.memory_mib:.0f} MiB {one.num_fds} fds" for one in quarters)
    return f"each quarter of {len(footprints)} regroups: {shown}\ngoal flat: " + (
        "met" if is_flat else "missed"
    )


def main() -> None:
    """Measure and print."""
    args = parse()
    found, footprints = measure(args)
    tables = {kind: summarise(samples) for kind, samples in found.items() if samples}
    num_engines = sum(args.group_sizes)
    print(f"{num_engines} fake engines in groups of {args.group_sizes}, zero bytes; ms")
    for kind, rows in tables.items():
        print(f"\n{kind} update, {len(found[kind])} samples\n{'phase':>8} {'p50':>8} {'p95':>8}")
        for phase, (p50, p95) in rows.items():
            print(f"{phase:>8} {p50 * 1e3:8.1f} {p95 * 1e3:8.1f}")
        goal_s = SMALL_GOAL_S if num_engines <= SMALL_FLEET else LARGE_GOAL_S
        verdict = "met" if rows["whole"][0] < goal_s else "missed"
        print(f"goal p50 < {goal_s * 1e3:.0f} ms: {verdict}")
    if footprints:
        print(f"\n{describe(footprints)}")
    if args.json:
        numbers = {"group_sizes": args.group_sizes, "tables": tables, "footprints": footprints}
        args.json.write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
