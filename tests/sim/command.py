"""`muster sim`: run seeds, show one, run a saved plan, or plant bugs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.sim.explore import REGRESSIONS, Tally, caught_at, explore, load, save, trace_of
from tests.sim.mutants import MUTANTS
from tests.sim.plan import draw

_FAILED = 1
_SHOWN_FAILURES = 5
_PROGRESS_S = 1.0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster sim",
        description="Run the admin plane's core against simulated engines, router, trainer and "
        "launcher under random faults, and check every invariant after every event. "
        "Exit code 1: an invariant broke, or a planted bug survived.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--show", type=int, metavar="SEED", help="print one seed event by event")
    what.add_argument("--plan", type=Path, metavar="FILE", help="print a saved plan's run")
    what.add_argument("--mutants", action="store_true", help="plant bugs; each must be caught")
    parser.add_argument("--seeds", type=_count, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="from here on")
    parser.add_argument("--jobs", type=_count, default=1, help="processes (default 1)")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", default=REGRESSIONS, help="for plans that fail, shrunk"
    )
    parser.add_argument("--coverage", action="store_true", help="fail if a table cell is not hit")
    parser.add_argument("--json", action="store_true", help="the result as one line of JSON")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Entry of the command; returns its exit code."""
    args = _parser().parse_args(arguments)
    if args.show is not None or args.plan is not None:
        return _show(args)
    if args.mutants:
        return _mutants(args.seeds, args.first)
    return _seeds(args)


def _show(args: argparse.Namespace) -> int:
    try:
        plan = load(args.plan) if args.plan is not None else draw(args.show)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"muster sim: cannot read {args.plan}: {error!r}", file=sys.stderr)
        return 2
    lines = trace_of(plan)
    print(f"groups {plan.groups}, faults:\n{plan.describe()}")
    print("\n".join(lines))
    return _FAILED if lines[-1].startswith("violation") else 0


def _mutants(num_seeds: int, first: int) -> int:
    survivors = 0
    for name in MUTANTS:
        failure = caught_at(name, num_seeds, first)
        if failure is None:
            survivors += 1
            print(f"{name:50} SURVIVES {num_seeds} seeds", flush=True)
        else:
            print(f"{name:50} seed {failure.seed:5}  {failure.text[:100]}", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} planted bugs caught")
    return _FAILED if survivors else 0


def _seeds(args: argparse.Namespace) -> int:
    is_shown = not args.json and sys.stderr.isatty()
    shown_at = 0.0

    def progress(tally: Tally, seconds: float) -> None:
        nonlocal shown_at
        if is_shown and seconds >= shown_at:
            shown_at = seconds + _PROGRESS_S
            rate = tally.num_seeds / seconds
            text = f"{tally.num_seeds} of {args.seeds} seeds, {rate:.0f}/s"
            print(f"\r{text}, {len(tally.failures)} failed ", end="", file=sys.stderr, flush=True)

    start = time.monotonic()
    tally = explore(args.first, args.seeds, args.jobs, progress)
    seconds = time.monotonic() - start
    if is_shown:
        print(file=sys.stderr)
    missing, surprising = tally.coverage.missing(), tally.coverage.surprising()
    saved = [save(failure, args.save) for failure in tally.failures[:_SHOWN_FAILURES]]
    if args.json:
        result = {
            "seeds": tally.num_seeds,
            "seconds": seconds,
            "failures": [[f.seed, f.text] for f in tally.failures],
            "events": tally.num_events,
            "checks": tally.num_checks,
            "updates": tally.num_updates,
            "virtual_s": tally.virtual_s,
            "missing_cells": missing,
            "surprising_cells": surprising,
        }
        print(json.dumps(result))
    else:
        print(
            f"{tally.num_seeds} seeds in {seconds:.1f} s ({tally.num_seeds / seconds:.0f}/s): "
            f"{tally.virtual_s / 3600:.1f} simulated hours, {tally.num_events} events, "
            f"{tally.num_updates} updates, {tally.num_checks} checks"
        )
        for (path, plan), failure in zip(saved, tally.failures, strict=False):
            print(f"seed {failure.seed}: {failure.text}\n  saved as {path}; shrunk to:")
            print(plan.describe())
        print(f"{len(tally.failures)} seeds broke an invariant; {len(missing)} table cells not hit")
        if args.coverage:
            print("".join(f"  not hit: {cell}\n" for cell in missing), end="")
        print("".join(f"  called impossible: {cell}\n" for cell in surprising), end="")
    is_covered = not args.coverage or not (missing or surprising)
    return 0 if not tally.failures and is_covered else _FAILED
