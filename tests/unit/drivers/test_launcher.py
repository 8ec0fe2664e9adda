"""The launcher's desk: views become events once, wishes stay until they are met."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.drivers.launcher import ForeignRun, LauncherDesk
from orchestrator.plane.commands import Relaunch
from orchestrator.plane.events import GroupLaunched
from protocol.launcher_api import GroupsView, GroupView, MemberExit, RelaunchWish


def group(number: int = 0, **changes: Any) -> GroupView:
    facts: dict[str, Any] = {"life": 0, "state": "running", "urls": ["http://a"]}
    return GroupView(group=number, **(facts | changes))


def view(*groups: GroupView, run_id: str = "run") -> GroupsView:
    return GroupsView(run_id=run_id, groups=list(groups))


def desk() -> tuple[LauncherDesk, list[GroupLaunched]]:
    told: list[GroupLaunched] = []
    return LauncherDesk("run", told.append), told


def test_a_view_is_told_once() -> None:
    it, told = desk()
    for _ in range(3):
        reply = it.exchange(view(group(0), group(1)))
        assert (reply.relaunch, reply.finished) == ([], False)
    assert told == [
        GroupLaunched(0, 0, "running", ("http://a:80",), "running"),
        GroupLaunched(1, 0, "running", ("http://a:80",), "running"),
    ]
    it.exchange(view(group(0, life=1, urls=["http://b"]), group(1)))
    assert told[2:] == [GroupLaunched(0, 1, "running", ("http://b:80",), "running")]


def test_exits_are_told_in_words() -> None:
    it, told = desk()
    exits = [MemberExit(index=0, exit_code=3), MemberExit(index=1, signal=9)]
    it.exchange(view(group(2, state="exited", exits=exits)))
    assert told[0].detail == "g2e0 ended with 3; g2e1 ended by signal 9"


def test_a_wish_stays_until_a_newer_life() -> None:
    it, _ = desk()
    it.wish(Relaunch(1, 0, "op_failed: x"))
    it.wish(Relaunch(0, 2, "core_hung"))
    wishes = [
        RelaunchWish(group=0, life=2, reason="core_hung"),
        RelaunchWish(group=1, life=0, reason="op_failed: x"),
    ]
    for _ in range(2):
        assert it.exchange(view(group(0, life=2), group(1))).relaunch == wishes
    assert it.exchange(view(group(0, life=2), group(1, life=1))).relaunch == wishes[:1]
    assert it.exchange(view(group(0, life=3), group(1, life=1))).relaunch == []


def test_the_end_of_the_run() -> None:
    it, _ = desk()
    it.is_finished = True
    assert it.exchange(view()).finished


def test_another_run_is_refused() -> None:
    it, told = desk()
    with pytest.raises(ForeignRun, match="view of run 'other', this is 'run'"):
        it.exchange(view(group(), run_id="other"))
    assert told == []


def test_urls_are_spelled_in_one_way() -> None:
    it, told = desk()
    it.exchange(view(group(urls=["HTTP://Node7:8001/", "http://node7"])))
    it.exchange(view(group(urls=["http://node7:8001", "http://node7:80/"])))
    assert [event.urls for event in told] == [("http://node7:8001", "http://node7:80")]


def test_a_view_with_an_url_that_is_none_changes_nothing() -> None:
    it, told = desk()
    it.wish(Relaunch(0, 0, "core_hung"))
    with pytest.raises(ValueError, match=r"groups\[1\].urls = \['node7'\]: expected http://host"):
        it.exchange(view(group(0, life=1), group(1, urls=["node7"])))
    assert told == []
    assert len(it.exchange(view(group(1))).relaunch) == 1
