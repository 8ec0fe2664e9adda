"""Command line of the fake engine: one engine, or a whole fleet in one process.

    MUSTER_ADMIN_TOKEN=... python -m engine.fake --group 0 --index 1 --port 0
    MUSTER_ADMIN_TOKEN=... python -m engine.fake --group-sizes 16 16 64

Prints one line a listening engine, its URL, in the order of the slots, and serves until a signal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from engine.config import read_secrets
from engine.fake_config import FakeSettings
from engine.fake_engine import FakeEngine
from engine.fake_fleet import FakeFleet, slots_of_sizes
from engine.fake_server import AppServer
from protocol.ids import Slot

_PLACE = ("group", "index", "port", "host", "group_sizes", "first_index")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags; every field of FakeSettings is one."""
    parser = argparse.ArgumentParser(prog="python -m engine.fake", description=__doc__)
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--group-sizes", type=int, nargs="+", help="a fleet on free ports instead")
    parser.add_argument("--first-index", type=int, default=0, help="of each group of a fleet")
    for name, field in FakeSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=field.default, help=field.description)
    return parser.parse_args(argv)


async def serve_one(args: argparse.Namespace, settings: FakeSettings) -> None:
    """One engine; its death is the death of this process."""
    tokens = read_secrets()
    server = AppServer(FakeEngine(Slot(args.group, args.index), settings, tokens, _kill_self))
    await server.start(args.host, args.port)
    print(f"http://{args.host}:{server.port}", flush=True)
    await asyncio.Event().wait()


async def serve_fleet(args: argparse.Namespace, settings: FakeSettings) -> None:
    """Many engines; their deaths only close their own sockets."""
    tokens = read_secrets()
    fleet = FakeFleet(
        slots_of_sizes(args.group_sizes, args.first_index),
        admin_token=tokens.admin_token,
        api_key=tokens.api_key,
        host=args.host,
        **settings.model_dump(),
    )
    async with fleet:
        print("\n".join(fleet.urls[slot] for slot in fleet.slots), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Entry point."""
    args = parse()
    settings = FakeSettings(**{k: v for k, v in vars(args).items() if k not in _PLACE})
    serve = serve_one if args.group_sizes is None else serve_fleet
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(args, settings))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: a fleet answers several times as many requests with it."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
