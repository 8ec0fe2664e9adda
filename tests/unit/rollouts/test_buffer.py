"""Whole groups only, every rollout at most once, and accounts that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rollouts.buffer import GroupBuffer
from orchestrator.rollouts.staleness import Verdict
from protocol.records import Sample
from tests.unit.rollouts.samples import make_rollout, make_sample


def refuse_version_0(sample: Sample) -> Verdict | None:
    return Verdict("stale", "old") if sample.spans[0].version == 0 else None


def filled(num_groups: int, group_size: int = 2, version: int = 1) -> GroupBuffer:
    buffer = GroupBuffer(group_size)
    for group in range(num_groups):
        buffer.open_group(group)
        for member in range(group_size):
            rollout_id = group * group_size + member
            buffer.add(make_rollout(rollout_id, group, member, make_sample(version)))
    return buffer


def test_a_group_is_handed_out_when_it_is_whole() -> None:
    buffer = GroupBuffer(2)
    buffer.open_group(7)
    assert not buffer.add(make_rollout(1, 7))
    assert buffer.take(1) is None
    assert buffer.add(make_rollout(0, 7))
    taken = buffer.take(1)
    assert taken is not None
    assert [rollout.rollout_id for rollout in taken[0]] == [0, 1]
    assert buffer.take(1) is None
    assert not buffer.is_live(7)


def test_the_oldest_groups_go_first_whatever_the_order_of_arrival() -> None:
    buffer = GroupBuffer(1)
    for group in range(3):
        buffer.open_group(group)
    for group in (2, 0, 1):
        buffer.add(make_rollout(group, group))
    taken = buffer.take(2)
    assert taken is not None
    assert [group[0].prompt_group for group in taken] == [0, 1]


def test_nothing_is_taken_when_there_are_too_few() -> None:
    buffer = filled(2)
    assert buffer.take(3) is None
    assert buffer.num_complete == 2


def test_one_bad_rollout_takes_its_group_along() -> None:
    buffer = GroupBuffer(3)
    buffer.open_group(0)
    buffer.open_group(1)
    buffer.add(make_rollout(0, 0, sample=make_sample(0)))
    buffer.add(make_rollout(1, 0, sample=make_sample(1)))
    buffer.add(make_rollout(2, 1, sample=make_sample(1)))
    assert [verdict.reason for verdict in buffer.drop_refused(refuse_version_0)] == ["stale"]
    assert buffer.counts().dropped == {"stale": 1, "group_failed": 1}
    assert not buffer.is_live(0)
    assert buffer.is_live(1)
    buffer.add(make_rollout(3, 0))
    assert buffer.counts().dropped == {"stale": 1, "group_failed": 2}


def test_a_failed_group_is_dropped_once() -> None:
    buffer = filled(1)
    assert buffer.fail_group(0) == 2
    assert buffer.fail_group(0) == 0
    assert buffer.counts().dropped == {"group_failed": 2}


def test_equal_rewards_are_dropped_on_demand() -> None:
    buffer = GroupBuffer(2)
    for group, rewards in enumerate([(1.0, 1.0), (0.0, 1.0)]):
        buffer.open_group(group)
        for member, reward in enumerate(rewards):
            buffer.add(make_rollout(group * 2 + member, group, reward))
    assert buffer.drop_zero_variance() == 1
    assert buffer.counts().dropped == {"zero_variance": 2}
    assert buffer.num_complete == 1


def test_one_too_many_is_surplus() -> None:
    buffer = filled(1)
    assert not buffer.add(make_rollout(9, 0))
    assert buffer.counts().dropped == {"surplus": 1}


def test_misuse_is_an_error() -> None:
    buffer = filled(2, group_size=3)
    with pytest.raises(ValueError, match="rollout 1 was added twice"):
        buffer.add(make_rollout(1, 0))
    with pytest.raises(ValueError, match="prompt group 1 after group 1"):
        buffer.open_group(1)
    with pytest.raises(ValueError, match="group_size must be positive, not 0"):
        GroupBuffer(0)


@given(
    group_size=st.integers(1, 4),
    steps=st.lists(
        st.one_of(
            st.just(("open", 0, 0)),
            st.tuples(st.just("add"), st.integers(0, 12), st.integers(0, 2)),
            st.tuples(st.just("fail"), st.integers(0, 12), st.just(0)),
            st.just(("refuse", 0, 0)),
            st.just(("flat", 0, 0)),
            st.tuples(st.just("take"), st.integers(1, 3), st.just(0)),
        ),
        max_size=120,
    ),
)
def test_each_rollout_is_consumed_at_most_once_and_accounts_add_up(
    group_size: int, steps: list[tuple[str, int, int]]
) -> None:
    buffer = GroupBuffer(group_size)
    next_group = next_rollout = 0
    consumed: list[int] = []
    for action, number, version in steps:
        if action == "open":
            buffer.open_group(next_group)
            next_group += 1
        elif action == "add":
            sample = make_sample(version)
            buffer.add(make_rollout(next_rollout, number, next_rollout % 2, sample))
            next_rollout += 1
        elif action == "fail":
            buffer.fail_group(number)
        elif action == "refuse":
            buffer.drop_refused(refuse_version_0)
        elif action == "flat":
            buffer.drop_zero_variance()
        else:
            for group in buffer.take(number) or []:
                assert len(group) == group_size
                assert len({rollout.prompt_group for rollout in group}) == 1
                consumed.extend(rollout.rollout_id for rollout in group)
        counts = buffer.counts()
        assert counts.added == next_rollout
        assert counts.consumed == len(consumed)
        assert counts.added == counts.consumed + sum(counts.dropped.values()) + counts.held
    assert len(consumed) == len(set(consumed))
