"""Many seeds: in several processes, with coverage; a failing plan is made as small as it gets."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.sim.coverage import Coverage
from tests.sim.mutants import planted
from tests.sim.plan import Plan, draw
from tests.sim.run import run_plan, run_seed

_CHUNK = 50
REGRESSIONS = Path(__file__).parent / "regressions"


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that broke an invariant."""

    seed: int
    invariant: str
    text: str


@dataclass(slots=True)
class Tally:
    """What seeds came to. Times are seconds."""

    num_seeds: int = 0
    num_events: int = 0
    num_checks: int = 0
    num_updates: int = 0
    virtual_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)

    def add(self, other: Tally) -> None:
        """Sum of both."""
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.num_checks += other.num_checks
        self.num_updates += other.num_updates
        self.virtual_s += other.virtual_s
        self.failures += other.failures
        self.coverage.merge(other.coverage.hits)


def run_seeds(first: int, num_seeds: int) -> Tally:
    """In this process, in order. An exception of the core is a failure as well."""
    tally = Tally()
    for seed in range(first, first + num_seeds):
        tally.num_seeds += 1
        try:
            result = run_seed(seed, tally.coverage)
        except Exception as error:  # noqa: BLE001  # a core that crashes is what is looked for
            tally.failures.append(Failure(seed, "crash", repr(error)))
            continue
        tally.num_events += result.num_events
        tally.num_checks += result.num_checks
        tally.num_updates += result.num_updates
        tally.virtual_s += result.virtual_s
        if result.violation is not None:
            failure = Failure(seed, result.violation.invariant, str(result.violation))
            tally.failures.append(failure)
    return tally


def explore(
    first: int, num_seeds: int, jobs: int, on_progress: Callable[[Tally, float], None]
) -> Tally:
    """Seeds `first` and following; `on_progress(so far, seconds)` after each few of them."""
    start = time.monotonic()
    total = Tally()
    for part in _parts(first, num_seeds, jobs):
        total.add(part)
        on_progress(total, time.monotonic() - start)
    return total


def _parts(first: int, num_seeds: int, jobs: int) -> Iterator[Tally]:
    end = first + num_seeds
    chunks = [(low, min(_CHUNK, end - low)) for low in range(first, end, _CHUNK)]
    if jobs <= 1:
        for low, count in chunks:
            yield run_seeds(low, count)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for task in [pool.apply_async(run_seeds, chunk) for chunk in chunks]:
            yield task.get()


def caught_at(mutant: str, num_seeds: int, first: int = 0) -> Failure | None:
    """The first seed that catches a planted bug; None: it survives them all."""
    with planted(mutant):
        for seed in range(first, first + num_seeds):
            found = run_seeds(seed, 1).failures
            if found:
                return found[0]
    return None


def shrink(plan: Plan, invariant: str) -> Plan:
    """The same violation with no fault that it does not need (delta debugging, one at a time)."""
    faults = list(plan.faults)
    place = 0
    while place < len(faults):
        fewer = plan.with_faults(tuple(faults[:place] + faults[place + 1 :]))
        if _breaks(fewer) == invariant:
            faults = list(fewer.faults)
        else:
            place += 1
    return plan.with_faults(tuple(faults))


def _breaks(plan: Plan) -> str | None:
    try:
        violation = run_plan(plan).violation
    except Exception:  # noqa: BLE001  # as in `run_seeds`
        return "crash"
    return violation.invariant if violation is not None else None


def trace_of(plan: Plan) -> list[str]:
    """Every event with the commands that followed, and what happened in the world."""
    trace: list[str] = []
    result = run_plan(plan, trace=trace)
    return [*trace, f"violation: {result.violation}" if result.violation else "all is well"]


def save(failure: Failure, folder: Path) -> tuple[Path, Plan]:
    """Shrink the plan of a failing seed and write it where `load` finds it."""
    plan = shrink(draw(failure.seed), failure.invariant)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{failure.invariant.lower()}-{failure.seed}.json"
    body = {"seed": failure.seed, "found": failure.text, "plan": plan.to_dict()}
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path, plan


def load(path: Path) -> Plan:
    """A plan that `save` wrote."""
    return Plan.from_dict(json.loads(path.read_text())["plan"])
