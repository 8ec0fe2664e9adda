"""One seed: safety under faults, then liveness of the healed world. And what to do when it fails."""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

from tests.sim.checks import Violation
from tests.sim.coverage import Coverage
from tests.sim.plan import Plan, draw
from tests.sim.server import Call
from tests.sim.world import World

# After the faults: what was spoilt before is noticed within this time.
_RESIDUE_S = 4.0
_RETURN_S = 90.0
_NUM_UPDATES = 2


@dataclass(frozen=True, slots=True)
class Result:
    """`violation` None: all is well. `outcome`: finished, or failed for want of capacity."""

    violation: Violation | None
    outcome: str
    num_events: int
    num_steps: int
    num_checks: int
    num_updates: int
    virtual_s: float


def run_seed(seed: int, coverage: Coverage | None = None) -> Result:
    """The plan of a seed."""
    return run_plan(draw(seed), coverage)


def run_plan(
    plan: Plan, coverage: Coverage | None = None, trace: list[str] | None = None
) -> Result:
    """Run it to its end or to the first violation."""
    world = World(plan, coverage, trace)
    start = world.loop.now
    violation: Violation | None = None
    try:
        _play(world)
    except Violation as error:
        violation = error
        world.note(f"VIOLATION {error}")
    return Result(
        violation,
        "failed" if world.failed is not None else "finished",
        world.num_events,
        world.loop.num_steps,
        world.checks.num_checks,
        len(world.updates),
        world.loop.now - start,
    )


def _play(world: World) -> None:
    world.start()
    world.run(lambda: False, world.plan.duration_s)
    if world.failed is not None:
        return
    world.note("healed")
    world.faults.heal()
    loop = world.loop
    quiet_at = max(loop.now, loop.busy_until, world.client.arrived_by) + _RESIDUE_S
    calls = world.client.open_calls()
    _until(world, lambda: _is_back(world, quiet_at, calls), _RETURN_S, "groups are back in service")
    if world.failed is not None:
        return
    world.checks.quiet_since = world.loop.now
    world.note("quiet")
    before = len(world.updates)
    limit_s = _NUM_UPDATES * (world.plane["update_timeout_s"] + 5.0)
    _until(
        world,
        lambda: _num_finished(world, before) >= _NUM_UPDATES and world.checks.update_since is None,
        limit_s,
        f"{_NUM_UPDATES} updates have ended",
    )
    _check_all_serve(world)


def _until(world: World, holds: object, limit_s: float, what: str) -> None:
    assert callable(holds)
    if not world.run(holds, limit_s) and world.failed is None:
        rows = {group: state for group, state in world.checks.state.items()}
        world.checks.violated("I9", f"not within {limit_s:g} s: {what}; groups: {rows}")


def _is_back(world: World, quiet_at: float, calls: list[Call]) -> bool:
    """Everybody who can be is in service, and nothing from before is on its way."""
    if world.loop.now < quiet_at or not world.is_idle() or not all(call.is_done for call in calls):
        return False
    return all(
        state in ("candidate", "admitted") or world.launcher.is_given_up(group)
        for group, state in world.checks.state.items()
    )


def _num_finished(world: World, before: int) -> int:
    """A return after a restart reloads nothing, and has no other targets."""
    ended = [update for update in world.updates[before:] if update.outcome == "finished"]
    return sum(not update.reason.startswith("returned") for update in ended)


def _check_all_serve(world: World) -> None:
    checks = world.checks
    if world.failed is not None:
        return
    for group, state in checks.state.items():
        if world.launcher.is_given_up(group):
            continue
        if state != "admitted":
            checks.violated("I9", f"g{group} is {state} after {_NUM_UPDATES} updates")
        for slot in world.of(group):
            engine = world.engines[slot]
            if not engine.serves() or engine.version != checks.policy:
                checks.violated("I9", f"{engine} does not serve v{checks.policy}")
