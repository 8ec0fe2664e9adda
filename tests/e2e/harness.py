"""Run `muster run` as a user does, and watch it from outside.

Nothing here uses the run's own code to judge it: the router is asked for its own listing, the
engines for their own identity, processes and groups are read from the files of the output
directory, the journal line by line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
_SAMPLE_INTERVAL_S = 0.1
_LOOK_INTERVAL_S = 0.02
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RouterSample:
    """The router's own listing at one moment; `urls` is None when it did not answer."""

    at: float
    urls: frozenset[str] | None


@dataclass
class MusterRun:
    """A `muster run` in a process of its own."""

    output_dir: Path
    process: subprocess.Popen[bytes]
    console: Path
    samples: list[RouterSample] = field(default_factory=list)
    _journal: list[dict[str, Any]] = field(default_factory=list)
    _journal_bytes: int = 0
    _client: httpx.Client = field(
        default_factory=lambda: httpx.Client(timeout=2.0, trust_env=False)
    )
    _stop_sampling: threading.Event = field(default_factory=threading.Event)

    # -- what the run says in its files

    def plan(self) -> dict[str, Any]:
        """plan/plan.json: ports, URLs and commands."""
        return self._json("plan/plan.json")

    def processes(self) -> dict[str, dict[str, Any]]:
        """processes.json by name."""
        return {row["name"]: row for row in self._json("processes.json")}

    def group(self, number: int) -> dict[str, Any]:
        """One group of groups.json."""
        return self._json("groups.json")["groups"][number]

    def token(self) -> str:
        """Admin token of the run."""
        return (self.output_dir / "admin_token").read_text().strip()

    def journal(self) -> list[dict[str, Any]]:
        """All complete lines of the orchestrator's journal so far."""
        path = self.output_dir / "journal.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._journal_bytes)
                text = file.read()
            end = text.rfind(b"\n") + 1
            self._journal_bytes += end
            lines = [json.loads(line) for line in text[:end].splitlines()]
            self._journal += [line for line in lines if "event" in line]  # not the header
        return self._journal

    def commands(self, kind: str) -> list[dict[str, Any]]:
        """Commands of one type in the journal, each with the `time` of its line."""
        return [
            {**command, "time": line["time"]}
            for line in self.journal()
            for command in line["commands"]
            if command["type"] == kind
        ]

    def version(self) -> int:
        """Policy version in service; -1 before the first."""
        finished = [c["version"] for c in self.commands("UpdateEnded") if _is_finished(c)]
        return max(finished, default=-1)

    def follow_journal(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Lines that are written from now on, within a millisecond or so of their writing."""
        deadline = time.monotonic() + timeout_s
        with (self.output_dir / "journal.jsonl").open() as file:
            file.seek(0, os.SEEK_END)
            pending = ""
            while time.monotonic() < deadline:
                pending += file.readline()
                if pending.endswith("\n"):
                    yield json.loads(pending)
                    pending = ""
                else:
                    time.sleep(0.0005)
        raise AssertionError(f"no such line in the journal within {timeout_s} s{self.report()}")

    def _json(self, name: str) -> Any:
        return json.loads((self.output_dir / name).read_text())

    # -- what its servers say

    def urls(self) -> dict[str, str]:
        """Admin URL by engine id."""
        return {
            f"g{view['group']}e{index}": url
            for view in self._json("groups.json")["groups"]
            for index, url in enumerate(view["urls"])
        }

    def identity(self, engine_id: str, timeout_s: float = 2.0) -> dict[str, Any] | None:
        """GET /identity of an engine; None when it does not answer."""
        return self._get(f"{self.urls()[engine_id]}/identity", timeout_s)

    def weight_version(self, engine_id: str) -> int | None:
        """GET /weight_version of an engine; None when it does not answer or has none."""
        answer = self._get(f"{self.urls()[engine_id]}/weight_version", 2.0)
        return None if answer is None else answer["version"]

    def routed(self) -> frozenset[str] | None:
        """The router's own listing; None when it does not answer."""
        answer = self._get(f"{self.plan()['router_url']}/list_workers", 2.0)
        return None if answer is None else frozenset(answer["urls"])

    def post(self, url: str, body: dict[str, Any]) -> httpx.Response:
        """POST with the admin token."""
        return self._client.post(url, json=body, headers=self._headers(), timeout=30.0)

    def _get(self, url: str, timeout_s: float) -> dict[str, Any] | None:
        try:
            answer = self._client.get(url, headers=self._headers(), timeout=timeout_s)
        except httpx.HTTPError:
            return None
        return answer.json() if answer.is_success else None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token()}"}

    # -- waiting and acting

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float) -> float:
        """Wait until `condition` holds; returns when it did (time.time()).

        Fails with the run's output when it ends first or the time is up.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if condition():
                    return time.time()
            except (FileNotFoundError, IndexError, KeyError):
                pass  # not written yet
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the run ended (code {self.process.returncode}) before: {what}{self.report()}"
                )
            time.sleep(_LOOK_INTERVAL_S)
        raise AssertionError(f"not within {timeout_s:g} s: {what}{self.report()}")

    def pid(self, engine_id: str) -> int:
        """Process of an engine's API server."""
        return int(self.processes()[f"engine-{engine_id}"]["pid"])

    def finish(self, timeout_s: float) -> int:
        """Wait for the run's own end; returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s:g} s{self.report()}") from None

    def interrupt(self) -> int:
        """What Ctrl-C does; returns the exit code."""
        self._stop_sampling.set()
        self.process.send_signal(signal.SIGINT)
        return self.finish(_STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End the run if it still lives, as Ctrl-C would, then by force."""
        self._stop_sampling.set()
        try:
            if self.process.poll() is None:
                self.interrupt()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._client.close()

    def sample_router(self) -> None:
        """Ask the router for its listing ten times a second until the run is stopped."""
        with httpx.Client(timeout=1.0, trust_env=False) as client:
            url = f"{self.plan()['router_url']}/list_workers"
            while not self._stop_sampling.wait(_SAMPLE_INTERVAL_S):
                at = time.time()
                try:
                    urls = frozenset(client.get(url).json()["urls"])
                except (httpx.HTTPError, ValueError, KeyError):
                    self.samples.append(RouterSample(at, None))
                else:
                    self.samples.append(RouterSample(at, urls))

    # -- what to show when something is wrong

    def tracebacks(self) -> dict[str, str]:
        """First traceback of every log that has one."""
        found = {}
        for path in [self.console, *sorted((self.output_dir / "logs").glob("*.log"))]:
            text = path.read_text(errors="replace")
            at = text.find("Traceback (most recent call last)")
            if at >= 0:
                found[path.name] = text[at : at + 3000]
        return found

    def report(self) -> str:
        """End of the console and of every log."""
        parts = []
        for path in [self.console, *sorted((self.output_dir / "logs").glob("*.log"))]:
            lines = path.read_text(errors="replace").splitlines()[-12:]
            parts.append(f"\n--- {path.name}\n" + "\n".join(lines))
        return "".join(parts)


def _is_finished(update: dict[str, Any]) -> bool:
    return bool(update["outcome"] == "finished")


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextmanager
def muster_run(config: Path, output_dir: Path, flags: Sequence[str] = ()) -> Iterator[MusterRun]:
    """Start a run of `config` with its files in `output_dir`; it is stopped at the end."""
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    console = output_dir.parent / f"{output_dir.name}.console.log"
    with console.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "launch.cli", "run", "@", str(config)),
                *("--output-dir", str(output_dir), *flags),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    run = MusterRun(output_dir, process, console)
    sampler: threading.Thread | None = None
    try:
        run.wait_for("processes.json is written", lambda: bool(run.processes()), 180.0)
        sampler = threading.Thread(target=run.sample_router, daemon=True)
        sampler.start()
        yield run
    finally:
        run.stop()
        if sampler is not None:
            sampler.join(5.0)
