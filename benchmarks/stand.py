"""A whole fleet as real processes, for benchmarks that look at it from outside.

vllm-router, `muster orchestrator` with its default settings, a trainer and engines that are fakes.
Each group has one engine in a process of its own, its victim; its other engines share one process.
The trainer takes an hour for a step: after version 0 is in service nothing but probes goes on.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from engine.fake_fleet import slots_of_sizes
from protocol.ids import Slot
from tests.fakes.processes import (
    FakeEngineProcess,
    fake_engine_processes,
    free_port,
    router_process,
    running,
)
from tests.helpers.tokenizers import letters_tokenizer

RUN_ID = "bench"
POLL_S = 0.01
START_TIMEOUT_S = 90.0


class Stand:
    """`urls` by slot, `victims` by group; `listed` is what the router says."""

    def __init__(
        self, urls: dict[Slot, str], victims: list[FakeEngineProcess], router_port: int
    ) -> None:
        self.urls = urls
        self.victims = victims
        self.router_url = f"http://127.0.0.1:{router_port}"
        self.router_port = router_port
        self.router = contextlib.ExitStack()
        self._http = httpx.Client(base_url=self.router_url, timeout=5.0, trust_env=False)

    def group(self, number: int) -> set[str]:
        """URLs of a group."""
        return {url for slot, url in self.urls.items() if slot.group == number}

    def listed(self) -> set[str] | None:
        """Members of the router; None while it does not answer."""
        try:
            return set(self._http.get("/list_workers").raise_for_status().json()["urls"])
        except httpx.HTTPError:
            return None

    def start_router(self, log_dir: Path, *, is_waited_for: bool = True) -> None:
        """On the port that the orchestrator was told."""
        process = router_process(
            log_dir=log_dir, port=self.router_port, is_waited_for=is_waited_for
        )
        self._router = self.router.enter_context(process)

    def kill_router(self) -> None:
        """Without a word."""
        self._router.process.kill()
        self.router.close()

    def until_listed(self, urls: set[str], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the router has these members and no others. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (listed := self.listed()) != urls:
            if time.monotonic() > deadline:
                num = "no" if listed is None else len(listed)
                raise TimeoutError(f"the router lists {num} members, expected {len(urls)}")
            time.sleep(POLL_S)

    def until_out(
        self, groups: dict[int, float], timeout_s: float = START_TIMEOUT_S
    ) -> dict[int, float]:
        """Seconds from each group's moment until the router lists no member of it."""
        found: dict[int, float] = {}
        members = {number: self.group(number) for number in groups}
        deadline = time.monotonic() + timeout_s
        while len(found) < len(groups):
            listed = self.listed()
            now = time.monotonic()
            if listed is not None:
                for number in groups.keys() - found.keys():
                    if not listed & members[number]:
                        found[number] = now - groups[number]
            if now > deadline:
                left = sorted(groups.keys() - found.keys())
                raise TimeoutError(f"the router still lists groups {left}")
            time.sleep(POLL_S)
        return found


@contextlib.contextmanager
def running_stand(group_sizes: Sequence[int], log_dir: Path) -> Iterator[Stand]:
    """Up, with every engine in the router."""
    token = secrets.token_hex(16)
    args = ("--run-id", RUN_ID)
    slots = slots_of_sizes(group_sizes)
    rest = slots_of_sizes([size - 1 for size in group_sizes], first_index=1)
    with contextlib.ExitStack() as stack:
        heads = [slot for slot in slots if slot.index == 0]
        victims = stack.enter_context(
            fake_engine_processes(heads, admin_token=token, log_dir=log_dir, args=args)
        )
        urls = {victim.slot: victim.url for victim in victims}
        if rest:
            sizes = [str(size - 1) for size in group_sizes]
            command = ["-m", "engine.fake", *args, "--first-index", "1", "--group-sizes", *sizes]
            lines = stack.enter_context(_lines(command, token, log_dir / "rest.log"))
            urls |= {slot: next(lines) for slot in rest}
        command = ["-m", "tests.fakes.trainer", *args, "--step-s", "3600"]
        trainer_url = next(stack.enter_context(_lines(command, token, log_dir / "trainer.log")))
        stand = Stand({slot: urls[slot] for slot in slots}, victims, free_port())
        stack.enter_context(stand.router)
        stand.start_router(log_dir)
        config = _config(stand, trainer_url, log_dir)
        command = [sys.executable, "-m", "launch.cli", "orchestrator", "@", str(config)]
        log = log_dir / "orchestrator.log"
        stack.enter_context(running(command, log, token, is_piped=False))
        stand.until_listed(set(stand.urls.values()))
        yield stand


def _config(stand: Stand, trainer_url: str, log_dir: Path) -> Path:
    letters_tokenizer(log_dir)
    client = {
        "base_url": stand.router_url,
        "admin_base_url": list(stand.urls.values()),
        "admin_engine_groups": [slot.group for slot in stand.urls],
    }
    config = {
        "run_id": RUN_ID,
        "output_dir": str(log_dir),
        "port": free_port(),
        "trainer_url": trainer_url,
        "model": {"path": str(log_dir), "client": client},
        "rollouts": {"prompts_per_step": 1, "group_size": 2, "max_completion_tokens": 8},
        "wandb": {"mode": "disabled"},
    }
    path = log_dir / "orchestrator.json"
    path.write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def _lines(command: Sequence[str], token: str, log: Path) -> Iterator[Iterator[str]]:
    """Of a fake that prints a URL for each of its servers once it listens."""
    with running([sys.executable, *command], log, token) as process:
        assert process.stdout is not None
        stdout = process.stdout

        def lines() -> Iterator[str]:
            for line in stdout:
                yield line.strip()
            raise RuntimeError(f"a fake did not start:\n{log.read_text()}")

        yield lines()
