"""`muster orchestrator` as a process, and what it writes down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from tests.fakes.processes import free_port
from tests.helpers.polling import until
from tests.helpers.tokenizers import letters_tokenizer

RUN_ID = "run"
GROUPS = [0, 0, 1, 1]
_DEADLINE_S = 40.0


class Orchestrator:
    """A running `muster orchestrator`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, url: str) -> None:
        self.process = process
        self.directory = directory
        self.url = url

    def commands(self, kind: str) -> list[dict[str, Any]]:
        """Commands of this type in the journal so far."""
        return commands_in(journal_lines(self.directory), kind)

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Poll until the condition holds."""

        def holds() -> bool:
            is_there = is_met()
            assert is_there or self.process.returncode is None
            return is_there

        await until(holds, timeout_s=_DEADLINE_S)

    async def end(self) -> tuple[int, str]:
        """Exit code and everything it printed on stdout."""
        async with asyncio.timeout(_DEADLINE_S):
            output, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode()


def journal_lines(directory: Path) -> list[dict[str, Any]]:
    """All lines with an event, of all segments, oldest first."""
    files = sorted(directory.glob("journal.0*.jsonl"))
    files += [path for path in [directory / "journal.jsonl"] if path.exists()]
    raw = [line for path in files for line in path.read_bytes().split(b"\n")[:-1]]
    return [line for line in map(json.loads, raw) if "event" in line]


def commands_in(lines: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Commands of this type in lines of a journal."""
    return [command for line in lines for command in line["commands"] if command["type"] == kind]


@contextlib.asynccontextmanager
async def orchestrator(
    directory: Path,
    urls: list[str],
    trainer_url: str,
    router_url: str | None,
    port: int = 0,
    **settings: Any,
) -> AsyncIterator[Orchestrator]:
    """Start it; kill it when the test leaves early."""
    letters_tokenizer(directory)
    port = port or free_port()
    config = {
        "run_id": RUN_ID,
        "output_dir": str(directory),
        "port": port,
        "trainer_url": trainer_url,
        "model": {
            "path": str(directory),
            "client": {
                **({"base_url": router_url} if router_url else {"router": "none"}),
                "admin_base_url": urls,
                "admin_engine_groups": GROUPS,
            },
        },
        "probe": {"interval_s": 0.2, "timeout_s": 0.2, "retry_s": 0.05},
        "rollouts": {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8},
        "wandb": {"mode": "disabled"},
        **settings,
    }
    path = directory / "orchestrator.json"
    path.write_text(json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "launch.cli", "orchestrator", "@", str(path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "MUSTER_ADMIN_TOKEN": "secret"},
    )
    try:
        yield Orchestrator(process, directory, f"http://127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
