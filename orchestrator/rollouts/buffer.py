"""From single rollouts to whole GRPO groups, each rollout used at most once. Pure.

Life of a prompt group: open -> complete -> taken, or -> dropped from either. A rollout is added
once, and leaves once: consumed by a batch, or dropped with a reason. Nothing is lost silently:

    added == consumed + sum(dropped) + held

A group is one unit. When one of its rollouts may not be trained on, all of them go: advantages are
relative to the whole group, and a group that lost some members would be biased towards the fast
ones. Members that go with a bad one are counted as `group_failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.rollouts.staleness import DropReason, Verdict
from protocol.records import Rollout, Sample

Judge = Callable[[Sample], Verdict | None]


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """Accounting since the start. `held` rollouts are in open or complete groups."""

    added: int
    consumed: int
    held: int
    dropped: Mapping[DropReason, int]


@dataclass(slots=True)
class _Group:
    rollouts: list[Rollout] = field(default_factory=list)


class GroupBuffer:
    """Collects rollouts into groups of `group_size`, hands out whole groups, oldest first."""

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be positive, not {group_size}")
        self._group_size = group_size
        self._groups: dict[int, _Group] = {}
        self._newest_group = -1
        self._added = 0
        self._consumed = 0
        self._dropped: dict[DropReason, int] = {}

    @property
    def num_groups(self) -> int:
        """Groups that are open or complete."""
        return len(self._groups)

    @property
    def num_complete(self) -> int:
        """Groups that could be taken."""
        return sum(self._is_complete(group) for group in self._groups.values())

    def counts(self) -> BufferCounts:
        """Accounting so far."""
        held = sum(len(group.rollouts) for group in self._groups.values())
        return BufferCounts(self._added, self._consumed, held, dict(self._dropped))

    def is_live(self, prompt_group: int) -> bool:
        """Whether the group is open or complete, that is neither taken nor dropped."""
        return prompt_group in self._groups

    def open_group(self, prompt_group: int) -> None:
        """Expect rollouts of `prompt_group`. Numbers grow, so that none is used twice."""
        if prompt_group <= self._newest_group:
            raise ValueError(f"prompt group {prompt_group} after group {self._newest_group}")
        self._newest_group = prompt_group
        self._groups[prompt_group] = _Group()

    def add(self, rollout: Rollout) -> bool:
        """Take in a finished rollout; True when it completes its group.

        A rollout whose group is gone is dropped as `group_failed`, one too many as `surplus`. The
        same rollout twice is a programmer's error.
        """
        group = self._groups.get(rollout.prompt_group)
        if group is not None and any(r.rollout_id == rollout.rollout_id for r in group.rollouts):
            raise ValueError(f"rollout {rollout.rollout_id} was added twice")
        self._added += 1
        if group is None:
            self._count("group_failed")
            return False
        if self._is_complete(group):
            self._count("surplus")
            return False
        group.rollouts.append(rollout)
        return self._is_complete(group)

    def fail_group(self, prompt_group: int) -> int:
        """Drop a group because one of its rollouts will never come; number of rollouts dropped."""
        group = self._groups.pop(prompt_group, None)
        if group is None:
            return 0
        self._count("group_failed", len(group.rollouts))
        return len(group.rollouts)

    def drop_refused(self, judge: Judge) -> list[Verdict]:
        """Drop every group, open or complete, with a rollout that `judge` refuses."""
        verdicts: list[Verdict] = []
        for number in sorted(self._groups):
            found = [judge(rollout.sample) for rollout in self._groups[number].rollouts]
            refused = [verdict for verdict in found if verdict is not None]
            if not refused:
                continue
            del self._groups[number]
            for verdict in refused:
                self._count(verdict.reason)
            self._count("group_failed", len(found) - len(refused))
            verdicts.extend(refused)
        return verdicts

    def drop_zero_variance(self) -> int:
        """Drop complete groups whose rewards are all equal; number of groups dropped."""
        flat = [
            number
            for number, group in self._groups.items()
            if self._is_complete(group) and is_zero_variance(group.rollouts)
        ]
        for number in flat:
            self._count("zero_variance", len(self._groups.pop(number).rollouts))
        return len(flat)

    def take(self, num_groups: int) -> list[list[Rollout]] | None:
        """The `num_groups` oldest complete groups, consumed; None (and nothing taken) if fewer.

        Rollouts of a group come in the order of their ids, groups in the order of their numbers:
        the batch does not depend on which engine was faster.
        """
        complete = [
            number for number in sorted(self._groups) if self._is_complete(self._groups[number])
        ]
        if len(complete) < num_groups:
            return None
        taken = [self._groups.pop(number).rollouts for number in complete[:num_groups]]
        self._consumed += sum(map(len, taken))
        return [sorted(rollouts, key=lambda rollout: rollout.rollout_id) for rollouts in taken]

    def _is_complete(self, group: _Group) -> bool:
        return len(group.rollouts) == self._group_size

    def _count(self, reason: DropReason, num_rollouts: int = 1) -> None:
        if num_rollouts:
            self._dropped[reason] = self._dropped.get(reason, 0) + num_rollouts


def is_zero_variance(rollouts: list[Rollout]) -> bool:
    """Whether all rewards are equal, so that no rollout is better than its group."""
    return all(rollout.reward == rollouts[0].reward for rollout in rollouts)
