"""The relaunch table: every row, both budgets, back-off, lives, late events."""

from __future__ import annotations

import pytest

from launch.relaunch import (
    Command,
    Deadline,
    GiveUp,
    GroupKeeper,
    GroupStopped,
    MemberExited,
    MemberUp,
    RelaunchAsked,
    RelaunchPolicy,
    StartGroup,
    StopGroup,
    describe_exit,
)
from protocol.launcher_api import GroupView, MemberExit

POLICY = RelaunchPolicy(
    backoff_initial_s=2.0,
    backoff_max_s=10.0,
    max_restarts=4,
    max_never_healthy=2,
    healthy_after_s=60.0,
    startup_timeout_s=100.0,
)
URLS = {0: ["http://h:1", "http://h:2"], 1: ["http://h:3"]}


def _keeper(now: float = 0.0) -> GroupKeeper:
    keeper = GroupKeeper(URLS, POLICY)
    keeper.start(now)
    return keeper


def _up(keeper: GroupKeeper, now: float, group: int, life: int) -> None:
    for index in range(len(URLS[group])):
        assert keeper.handle(now, MemberUp(group, life, index)) == []


def _killed(group: int, life: int, index: int = 0) -> MemberExited:
    return MemberExited(group, life, MemberExit(index=index, signal=9))


def _view(keeper: GroupKeeper, group: int) -> GroupView:
    return keeper.view()[group]


def _relaunch(keeper: GroupKeeper, now: float, group: int) -> list[Command]:
    """Carry a due group over to its next life; returns the commands that started it."""
    life = _view(keeper, group).life
    stop = keeper.handle(now, Deadline())
    assert [(c.group, c.life) for c in stop if isinstance(c, StopGroup)] == [(group, life)]
    return keeper.handle(now, GroupStopped(group, life))


def test_all_groups_start_at_once_with_life_zero() -> None:
    keeper = GroupKeeper(URLS, POLICY)
    assert keeper.start(5.0) == [
        StartGroup(0, 0, "start of the run"),
        StartGroup(1, 0, "start of the run"),
    ]
    assert [(v.group, v.life, v.state, v.urls) for v in keeper.view()] == [
        (0, 0, "starting", ["http://h:1", "http://h:2"]),
        (1, 0, "starting", ["http://h:3"]),
    ]
    assert keeper.next_deadline() == 105.0


def test_a_group_runs_once_every_member_is_up() -> None:
    keeper = _keeper()
    keeper.handle(1.0, MemberUp(0, 0, 1))
    assert _view(keeper, 0).state == "starting"
    keeper.handle(2.0, MemberUp(0, 0, 1))
    assert _view(keeper, 0).state == "starting"
    keeper.handle(3.0, MemberUp(0, 0, 0))
    assert _view(keeper, 0).state == "running"
    keeper.handle(4.0, MemberUp(0, 0, 0))
    assert _view(keeper, 0).state == "running"
    assert _view(keeper, 1).state == "starting"


def test_an_exit_leaves_the_siblings_running_until_the_back_off_is_over() -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 0, 0)
    _up(keeper, 1.0, 1, 0)
    assert keeper.handle(10.0, _killed(0, 0, 1)) == []
    view = _view(keeper, 0)
    assert (view.state, view.life, view.restarts_left) == ("exited", 0, 3)
    assert view.exits == [MemberExit(index=1, signal=9)]
    assert keeper.next_deadline() == 12.0
    assert (keeper.relaunch_at(0), keeper.relaunch_at(1)) == (12.0, None)
    assert keeper.handle(11.9, Deadline()) == []
    assert keeper.handle(12.0, Deadline()) == [
        StopGroup(0, 0, "g0e1 was killed by signal 9"),
    ]
    assert keeper.next_deadline() is None
    assert keeper.handle(12.5, Deadline()) == []
    assert keeper.handle(13.0, GroupStopped(0, 0)) == [
        StartGroup(0, 1, "g0e1 was killed by signal 9"),
    ]
    view = _view(keeper, 0)
    assert (view.state, view.life, view.exits) == ("starting", 1, [])
    assert _view(keeper, 1).state == "running"


def test_a_second_exit_is_shown_but_does_not_move_the_relaunch() -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 0, 0)
    keeper.handle(10.0, _killed(0, 0, 1))
    clean = MemberExited(0, 0, MemberExit(index=0, exit_code=0))
    assert keeper.handle(11.0, clean) == []
    assert keeper.next_deadline() == 12.0
    assert _view(keeper, 0).exits == [
        MemberExit(index=0, exit_code=0),
        MemberExit(index=1, signal=9),
    ]
    assert _view(keeper, 0).restarts_left == 3


def test_exit_code_zero_is_a_failure_too() -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 1, 0)
    assert keeper.handle(5.0, MemberExited(1, 0, MemberExit(index=0, exit_code=0))) == []
    assert _view(keeper, 1).state == "exited"
    assert _relaunch(keeper, 7.0, 1) == [StartGroup(1, 1, "g1e0 exited with code 0")]


def test_an_asked_relaunch_waits_like_an_exit_and_counts() -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 0, 0)
    _up(keeper, 1.0, 1, 0)
    assert keeper.handle(10.0, RelaunchAsked(1, 0, "engine_stalled")) == []
    assert (_view(keeper, 1).state, _view(keeper, 1).restarts_left) == ("waiting", 3)
    assert keeper.next_deadline() == 12.0
    assert keeper.handle(11.0, RelaunchAsked(1, 0, "engine_stalled")) == []
    assert keeper.next_deadline() == 12.0
    assert _relaunch(keeper, 12.0, 1) == [StartGroup(1, 1, "asked for: engine_stalled")]


@pytest.mark.parametrize("event", [RelaunchAsked(1, 0, "late"), _killed(1, 0), MemberUp(1, 0, 0)])
def test_events_of_an_older_life_change_nothing(
    event: RelaunchAsked | MemberExited | MemberUp,
) -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 1, 0)
    keeper.handle(2.0, _killed(1, 0))
    _relaunch(keeper, 4.0, 1)
    before = keeper.view()
    assert keeper.handle(5.0, event) == []
    assert keeper.handle(5.0, GroupStopped(1, 0)) == []
    assert keeper.view() == before


def test_events_of_unknown_groups_and_lives_to_come_change_nothing() -> None:
    keeper = _keeper()
    before = keeper.view()
    for event in (_killed(7, 0), RelaunchAsked(0, 1, "early"), MemberUp(0, 3, 0)):
        assert keeper.handle(1.0, event) == []
    assert keeper.handle(1.0, GroupStopped(0, 0)) == []
    assert keeper.view() == before


def test_a_group_that_is_not_up_in_time_is_relaunched() -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 1, 0)
    keeper.handle(1.0, MemberUp(0, 0, 0))
    assert keeper.handle(100.0, Deadline()) == []
    assert _view(keeper, 0).state == "waiting"
    assert keeper.next_deadline() == 102.0
    assert _relaunch(keeper, 102.0, 0) == [StartGroup(0, 1, "not up after 100 s: g0e1")]
    assert keeper.next_deadline() == 202.0


def test_back_off_doubles_up_to_its_cap() -> None:
    assert [POLICY.backoff_s(n) for n in (0, 1, 2, 3, 1000)] == [2.0, 4.0, 8.0, 10.0, 10.0]
    keeper = _keeper()
    waits, now = [], 0.0
    for life in range(3):
        _up(keeper, now, 1, life)
        keeper.handle(now + 1.0, _killed(1, life))
        due = keeper.next_deadline()
        assert due is not None
        waits.append(due - now - 1.0)
        now = due
        _relaunch(keeper, now, 1)
    assert waits == [2.0, 4.0, 8.0]


def test_relaunches_in_a_row_use_up_the_budget() -> None:
    keeper = _keeper()
    now = 0.0
    for life in range(4):
        _up(keeper, now, 1, life)
        assert keeper.handle(now, _killed(1, life)) == []
        now += 20.0
        _relaunch(keeper, now, 1)
    assert _view(keeper, 1).restarts_left == 0
    _up(keeper, now, 1, 4)
    reason = "4 relaunches used up; last: g1e0 was killed by signal 9"
    assert keeper.handle(now, _killed(1, 4)) == [StopGroup(1, 4, reason), GiveUp(1, 4, reason)]
    assert _view(keeper, 1).state == "failed"
    before = keeper.view()
    for event in (
        _killed(1, 4),
        RelaunchAsked(1, 4, "again"),
        GroupStopped(1, 4),
        MemberUp(1, 4, 0),
    ):
        assert keeper.handle(now, event) == []
    assert keeper.view() == before


def test_a_life_that_stayed_up_clears_budget_and_back_off() -> None:
    keeper = _keeper()
    _up(keeper, 0.0, 0, 0)
    now = 0.0
    for life in range(3):
        _up(keeper, now, 1, life)
        keeper.handle(now, _killed(1, life))
        now += 20.0
        _relaunch(keeper, now, 1)
    _up(keeper, now, 1, 3)
    keeper.handle(now + 60.0, _killed(1, 3))
    assert _view(keeper, 1).restarts_left == 3
    assert keeper.next_deadline() == now + 62.0


def test_lives_that_never_came_up_have_a_smaller_budget() -> None:
    keeper = _keeper()
    now = 0.0
    _up(keeper, now, 1, 0)
    for life in range(2):
        assert keeper.handle(now, _killed(0, life)) == []
        now += 20.0
        _relaunch(keeper, now, 0)
    commands = keeper.handle(now, _killed(0, 2))
    reason = "3 lives in a row ended before all members were up; last: g0e0 was killed by signal 9"
    assert commands == [StopGroup(0, 2, reason), GiveUp(0, 2, reason)]
    assert _view(keeper, 0).state == "failed"
    assert _view(keeper, 1).state == "running"


def test_a_life_that_came_up_clears_the_count_of_those_that_did_not() -> None:
    keeper = _keeper()
    _up(keeper, 0.0, 0, 0)
    now = 0.0
    for life in range(2):
        keeper.handle(now, _killed(1, life))
        now += 20.0
        _relaunch(keeper, now, 1)
    _up(keeper, now, 1, 2)
    assert keeper.handle(now + 1.0, _killed(1, 2)) == []
    now += 20.0
    _relaunch(keeper, now, 1)
    assert keeper.handle(now, _killed(1, 3)) == []
    assert _view(keeper, 1).state == "exited"


def test_stop_ends_every_group_for_good() -> None:
    keeper = _keeper()
    _up(keeper, 1.0, 0, 0)
    keeper.handle(2.0, _killed(1, 0))
    assert keeper.stop("end of the run") == [
        StopGroup(0, 0, "end of the run"),
        StopGroup(1, 0, "end of the run"),
    ]
    assert [view.state for view in keeper.view()] == ["stopped", "stopped"]
    assert keeper.next_deadline() is None
    assert keeper.stop("again") == []
    for event in (_killed(0, 0), GroupStopped(1, 0), RelaunchAsked(0, 0, "late"), Deadline()):
        assert keeper.handle(500.0, event) == []
    assert [view.exits for view in keeper.view()] == [[], [MemberExit(index=0, signal=9)]]


def test_exits_read_well() -> None:
    assert describe_exit(MemberExit(index=0, exit_code=3)) == "exited with code 3"
    assert describe_exit(MemberExit(index=0, signal=11)) == "was killed by signal 11"
