"""A router that is killed and restarted: how long until it has its members again.

    python benchmarks/router_restart.py --rounds 10

128 fake engines in 16 groups, the real vllm-router, `muster orchestrator` with its default
settings. One group is evicted first (one of its engines is killed). Then, round by round, the
router gets SIGKILL and is started again on the same port; time runs from the first answer of its
port to the first listing that has all engines of the other groups. Every listing on the way is
looked at: one that has a member of the evicted group is counted. Goal: 2 s, and none.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.control_plane import percentiles
from benchmarks.stand import POLL_S, Stand, running_stand

GOAL_S = 2.0
_TIMEOUT_S = 30.0


def one_round(stand: Stand, log_dir: Path, wish: set[str], evicted: set[str]) -> tuple[float, int]:
    """Seconds until the wish is listed, and the listings that had an evicted member."""
    stand.kill_router()
    with_evicted = 0
    stand.start_router(log_dir, is_waited_for=False)
    opened: float | None = None
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        listed = stand.listed()
        if listed is not None:
            opened = opened or time.monotonic()
            with_evicted += bool(listed & evicted)
            if listed == wish:
                return time.monotonic() - opened, with_evicted
        time.sleep(POLL_S)
    raise TimeoutError("the router did not get its members back")


def measure(args: argparse.Namespace) -> list[tuple[float, int]]:
    """All rounds."""
    with tempfile.TemporaryDirectory() as directory:
        log_dir = Path(directory)
        sizes = [args.engines // args.groups] * args.groups
        with running_stand(sizes, log_dir) as stand:
            victim = stand.victims[0]
            victim.signal(signal.SIGKILL)
            evicted = stand.group(victim.slot.group)
            wish = set(stand.urls.values()) - evicted
            stand.until_listed(wish)
            return [one_round(stand, log_dir, wish, evicted) for _ in range(args.rounds)]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="restarts")
    parser.add_argument("--engines", type=int, default=128)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write all numbers there")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print."""
    args = parse()
    rounds = measure(args)
    times = [seconds for seconds, _ in rounds]
    p50, p95 = percentiles(times)
    num_wrong = sum(count for _, count in rounds)
    num_wished = args.engines - args.engines // args.groups
    print(f"router restarted {len(times)} times, {num_wished} members to put back; seconds")
    print(f"p50 {p50:.2f}  p95 {p95:.2f}  max {max(times):.2f}")
    print(f"listings with an evicted member: {num_wrong}")
    is_met = max(times) < GOAL_S and num_wrong == 0
    print(f"goal max < {GOAL_S:g} s and none: {'met' if is_met else 'missed'}")
    if args.json:
        args.json.write_text(json.dumps({"seconds": times, "num_wrong": num_wrong}))


if __name__ == "__main__":
    main()
