"""From the death of an engine's process to its group being out of the router, seen from outside.

    python benchmarks/detection.py --rounds 3

128 fake engines in 18 groups (16 of which lose their victim, see benchmarks/stand.py), the real
vllm-router and `muster orchestrator` with its default settings, all as processes. Time runs from
the signal to the first listing of the router, asked every 10 ms, that has no member of the group.
Rows: `killed` SIGKILL of one engine after the other, at random moments; `frozen` SIGSTOP, one after
the other; `frozen at once` SIGSTOP of 16 engines in one moment. Goals: killed p50 below 1.0 s and
p95 below 1.5 s, frozen below 8 s, at once no slower than one after the other by more than a second.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.control_plane import percentiles
from benchmarks.stand import Stand, running_stand

NUM_VICTIMS = 16
NUM_OTHER_GROUPS = 2
KILLED_P50_S, KILLED_P95_S = 1.0, 1.5
FROZEN_S = 8.0
AT_ONCE_S = 1.0
_FROZEN_TIMEOUT_S = 30.0


def group_sizes(num_engines: int) -> list[int]:
    """As equal as they can be."""
    num_groups = NUM_VICTIMS + NUM_OTHER_GROUPS
    size, rest = divmod(num_engines, num_groups)
    return [size + (number < rest) for number in range(num_groups)]


def one_after_the_other(
    stand: Stand, number: signal.Signals, chance: random.Random, num_victims: int
) -> list[float]:
    """Seconds of each."""
    found = []
    for victim in stand.victims[:num_victims]:
        time.sleep(chance.uniform(0.2, 1.7))  # any moment between two probes
        began = time.monotonic()
        victim.signal(number)
        found.append(stand.until_out({victim.slot.group: began})[victim.slot.group])
    return found


def at_once(stand: Stand) -> list[float]:
    """Seconds of each."""
    began = {}
    for victim in stand.victims[:NUM_VICTIMS]:
        began[victim.slot.group] = time.monotonic()
        victim.signal(signal.SIGSTOP)
    return list(stand.until_out(began, _FROZEN_TIMEOUT_S).values())


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """All rounds; seconds by row."""
    chance = random.Random(args.seed)
    found: dict[str, list[float]] = {"killed": [], "frozen": [], "frozen at once": []}
    for row, times in found.items():
        for _ in range(args.rounds):
            with (
                tempfile.TemporaryDirectory() as directory,
                running_stand(group_sizes(args.engines), Path(directory)) as stand,
            ):
                if row == "killed":
                    times += one_after_the_other(stand, signal.SIGKILL, chance, NUM_VICTIMS)
                elif row == "frozen":
                    times += one_after_the_other(stand, signal.SIGSTOP, chance, NUM_VICTIMS // 2)
                else:
                    times += at_once(stand)
    return found


def verdicts(tables: dict[str, tuple[float, float, float]]) -> dict[str, bool]:
    """Each goal, and whether it is met."""
    killed, frozen, together = tables["killed"], tables["frozen"], tables["frozen at once"]
    return {
        f"killed p50 < {KILLED_P50_S:g} s": killed[0] < KILLED_P50_S,
        f"killed p95 < {KILLED_P95_S:g} s": killed[1] < KILLED_P95_S,
        f"frozen max < {FROZEN_S:g} s": frozen[2] < FROZEN_S,
        f"frozen at once p50 < frozen p50 + {AT_ONCE_S:g} s": together[0] < frozen[0] + AT_ONCE_S,
        f"frozen at once max < {FROZEN_S:g} s": together[2] < FROZEN_S,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="fresh fleets for each row")
    parser.add_argument("--engines", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse()
    found = measure(args)
    tables = {row: (*percentiles(times), max(times)) for row, times in found.items()}
    print(f"{args.engines} engines, from the signal to out of the router; seconds")
    print(f"{'':>15} {'samples':>8} {'p50':>6} {'p95':>6} {'max':>6}")
    for row, (p50, p95, longest) in tables.items():
        print(f"{row:>15} {len(found[row]):8} {p50:6.2f} {p95:6.2f} {longest:6.2f}")
    goals = verdicts(tables)
    for goal, is_met in goals.items():
        print(f"goal {goal}: {'met' if is_met else 'missed'}")
    if args.json:
        args.json.write_text(json.dumps({"seconds": found, "goals": goals}))


if __name__ == "__main__":
    main()
