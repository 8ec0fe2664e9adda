"""Which samples may be trained on. Pure.

A sample says, token by token, which policy version made it, and which boot of which engine. It is
good for training when every span is at most `max_off_policy_steps` behind the policy that the step
starts from, none is ahead of it, and that boot had been admitted at that version. What is unknown
equals nothing: an engine or a version that was never admitted is refused, however plausible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.records import Sample

DropReason = Literal[
    "stale",
    "future_version",
    "unknown_engine",
    "not_admitted",
    "bad_sample",
    "empty",
    "zero_variance",
    "group_failed",
    "surplus",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a sample is refused: a reason to count by, and a sentence for a log."""

    reason: DropReason
    detail: str


class Admissions:
    """Which boot of which engine was admitted at which policy versions.

    Fed by whoever admits; asked for every sample. Versions older than `keep_versions` behind the
    newest one are forgotten, since no sample that old can pass anyway.
    """

    def __init__(self, keep_versions: int = 64) -> None:
        self._keep_versions = keep_versions
        self._versions: dict[tuple[str, str], set[int]] = {}
        self._newest = -1

    def admit(self, engine_id: str, boot_id: str, version: int) -> None:
        """Record that this boot serves `version` from now on."""
        self._versions.setdefault((engine_id, boot_id), set()).add(version)
        if version > self._newest:
            self._newest = version
            self._forget(version - self._keep_versions)

    def is_known(self, engine_id: str, boot_id: str) -> bool:
        """Whether this boot was admitted at any version that is remembered."""
        return (engine_id, boot_id) in self._versions

    def was_admitted(self, engine_id: str, boot_id: str, version: int) -> bool:
        """Whether this boot was admitted at `version`."""
        return version in self._versions.get((engine_id, boot_id), ())

    def _forget(self, floor: int) -> None:
        for key in list(self._versions):
            kept = {version for version in self._versions[key] if version >= floor}
            if kept:
                self._versions[key] = kept
            else:
                del self._versions[key]


def num_off_policy_steps(sample: Sample, policy_version: int) -> int:
    """Policy version minus the oldest version in `sample`. Negative: sampled by a newer one."""
    return policy_version - min(span.version for span in sample.spans)


def judge(
    sample: Sample, policy_version: int, max_off_policy_steps: int, admissions: Admissions
) -> Verdict | None:
    """None when `sample` may be trained on by the step that starts from `policy_version`.

    The order of checks is the order of trust: shape first, then identity, then age.
    """
    if not sample.completion_ids:
        return Verdict("empty", "no completion tokens")
    shape = _shape_problem(sample)
    if shape is not None:
        return Verdict("bad_sample", shape)
    who = f"{sample.engine_id} boot {sample.boot_id}"
    if not admissions.is_known(sample.engine_id, sample.boot_id):
        return Verdict("unknown_engine", f"{who} was never admitted")
    for span in sample.spans:
        if span.version > policy_version:
            return Verdict(
                "future_version", f"{who} sampled with {span.version}, policy is {policy_version}"
            )
    age = num_off_policy_steps(sample, policy_version)
    if age > max_off_policy_steps:
        return Verdict("stale", f"{age} steps off policy, at most {max_off_policy_steps} allowed")
    for span in sample.spans:
        if not admissions.was_admitted(sample.engine_id, sample.boot_id, span.version):
            return Verdict("not_admitted", f"{who} was not admitted at version {span.version}")
    return None


def _shape_problem(sample: Sample) -> str | None:
    """What breaks the contract of `Sample`, or None."""
    num_tokens = len(sample.completion_ids)
    if len(sample.logprobs) != num_tokens:
        return f"{len(sample.logprobs)} logprobs for {num_tokens} tokens"
    position = 0
    for span in sample.spans:
        if span.start != position or span.end <= span.start:
            return f"version spans do not tile the completion at token {position}"
        position = span.end
    if position != num_tokens:
        return f"version spans cover {position} of {num_tokens} tokens"
    return None
