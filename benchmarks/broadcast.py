"""Our bucketed transfer against a raw broadcast of the same bytes.

    python benchmarks/broadcast.py --megabytes 512 --world 3

Same processes, same group, same run, interleaved: each round does one raw `broadcast` of one flat
tensor and one transfer (plan, pack, buckets, digest on both sides, check). The ratio is raw time
over our time, each the median of all rounds as the sender sees it. Goal: at least 0.85.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transfer.bucket import ParamMeta
from transfer.group import TransferGroup
from transfer.join import join
from transfer.receive import Staging, receive
from transfer.rendezvous import listen
from transfer.send import send

_TIMEOUT_S = 120.0
_HIDDEN = 1024
_PASSED = ("megabytes", "world", "bucket-mb", "rounds", "backend")


def make_params(num_bytes: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Float32 matrices and norms in the proportions of a small language model."""
    index = 0
    while num_bytes > 0:
        rows = min(4 * _HIDDEN, max(num_bytes // (4 * _HIDDEN), 1))
        yield f"layers.{index}.weight", torch.randn(rows, _HIDDEN, device=device)
        yield f"layers.{index}.norm", torch.ones(_HIDDEN, device=device)
        num_bytes -= 4 * _HIDDEN * (rows + 1)
        index += 1


def run_rank(args: argparse.Namespace) -> None:
    """One process of the benchmark; rank 0 prints its port and then a line of JSON a round."""
    torch.set_num_threads(1)
    rank, port = args.rank, args.port
    device = "cpu" if args.backend == "gloo" else f"cuda:{rank}"
    rendezvous = listen("127.0.0.1") if rank == 0 else None
    if rendezvous is not None:
        port = rendezvous.port
        print(port, flush=True)
    group = join(
        "127.0.0.1",
        port,
        generation=1,
        rank=rank,
        world_size=args.world,
        backend=args.backend,
        device=device,
        timeout_s=_TIMEOUT_S,
        store=rendezvous.store if rendezvous is not None else None,
    )
    params = list(make_params(args.megabytes << 20, device)) if rank == 0 else []
    total = torch.tensor([sum(tensor.nbytes for _, tensor in params)], device=device)
    group.broadcast(total, timeout_s=_TIMEOUT_S)
    flat = torch.ones(int(total.item()), dtype=torch.uint8, device=device)
    staging = Staging()
    for number in range(args.rounds + 1):  # the first round touches all memory
        raw_s = _raw(group, flat)
        group.broadcast(flat[:1], timeout_s=_TIMEOUT_S)
        ours_s, num_bytes = _ours(group, params, staging, number, args.bucket_mb << 20)
        if rank == 0 and number > 0:
            row = {"raw_s": raw_s, "ours_s": ours_s, "num_bytes": num_bytes}
            print(json.dumps(row), flush=True)
    _raw(group, flat[:1])
    group.close()


def _raw(group: TransferGroup, flat: torch.Tensor) -> float:
    group.broadcast(flat[:1], timeout_s=_TIMEOUT_S)
    start = time.perf_counter()
    group.broadcast(flat, timeout_s=_TIMEOUT_S)
    return time.perf_counter() - start


def _ours(
    group: TransferGroup,
    params: list[tuple[str, torch.Tensor]],
    staging: Staging,
    version: int,
    bucket_bytes: int,
) -> tuple[float, int]:
    start = time.perf_counter()
    if group.rank > 0:
        staged = receive(group, version=version, timeout_s=_TIMEOUT_S, staging=staging)
        return time.perf_counter() - start, staged.num_bytes
    manifest = [ParamMeta.of(name, tensor) for name, tensor in params]
    result = send(
        group,
        iter(params),
        manifest,
        version=version,
        bucket_bytes=bucket_bytes,
        timeout_s=_TIMEOUT_S,
    )
    return time.perf_counter() - start, result.num_bytes


def main() -> int:
    """Start the ranks, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--world", type=int, default=3, help="processes, sender included")
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        return 0
    rows = _start_ranks(args)
    raw_s = statistics.median(row["raw_s"] for row in rows)
    ours_s = statistics.median(row["ours_s"] for row in rows)
    gigabytes = rows[0]["num_bytes"] / 1e9
    print(f"{'what':12} {'median s':>9} {'GB/s':>7}")
    print(f"{'raw':12} {raw_s:9.3f} {gigabytes / raw_s:7.2f}")
    print(f"{'bucketed':12} {ours_s:9.3f} {gigabytes / ours_s:7.2f}")
    result = {
        "megabytes": args.megabytes,
        "world": args.world,
        "bucket_mb": args.bucket_mb,
        "rounds": rows,
        "raw_s": raw_s,
        "ours_s": ours_s,
        "ratio": raw_s / ours_s,
    }
    print(f"ratio {result['ratio']:.3f} (goal 0.85)")
    print(json.dumps(result))
    return 0


def _start_ranks(args: argparse.Namespace) -> list[dict[str, float]]:
    """Run all ranks as processes; what rank 0 measured, a round each."""
    common = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in _PASSED]
    argv = [sys.executable, __file__, *common]
    first = subprocess.Popen([*argv, "--rank=0"], stdout=subprocess.PIPE, text=True)
    ranks = [first]
    try:
        assert first.stdout is not None
        port = int(first.stdout.readline())
        ranks += [
            subprocess.Popen([*argv, f"--rank={rank}", f"--port={port}"])
            for rank in range(1, args.world)
        ]
        rows = [json.loads(first.stdout.readline()) for _ in range(args.rounds)]
        for process in ranks:
            process.wait(_TIMEOUT_S)
        return rows
    finally:
        for process in ranks:
            process.kill()
            process.wait(_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
