"""Which samples may be trained on."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.rollouts.staleness import Admissions, judge, num_off_policy_steps
from protocol.records import Sample, VersionSpan
from tests.unit.rollouts.samples import make_sample


def admissions(*versions: int) -> Admissions:
    admitted = Admissions()
    for version in versions:
        admitted.admit("g0e0", "boot-a", version)
    return admitted


def test_age_counts_from_the_oldest_token() -> None:
    assert num_off_policy_steps(make_sample([3, 3, 5]), 5) == 2
    assert num_off_policy_steps(make_sample([6]), 5) == -1


@pytest.mark.parametrize(
    ("sample", "reason", "detail"),
    [
        (make_sample([5, 5]), None, ""),
        (make_sample([4, 5]), None, ""),
        (make_sample([3, 5]), "stale", "2 steps off policy, at most 1 allowed"),
        (make_sample([5, 6]), "future_version", "g0e0 boot boot-a sampled with 6, policy is 5"),
        (make_sample(5, boot_id="boot-b"), "unknown_engine", "g0e0 boot boot-b was never admitted"),
        (make_sample(5, engine_id="g1e0"), "unknown_engine", "g1e0 boot boot-a was never admitted"),
        (make_sample([]), "empty", "no completion tokens"),
    ],
)
def test_verdicts(sample: Sample, reason: str | None, detail: str) -> None:
    verdict = judge(sample, 5, 1, admissions(3, 4, 5, 6))
    if reason is None:
        assert verdict is None
    else:
        assert verdict is not None
        assert (verdict.reason, verdict.detail) == (reason, detail)


def test_an_engine_is_not_believed_at_a_version_it_was_not_admitted_at() -> None:
    verdict = judge(make_sample([4, 5]), 5, 1, admissions(5))
    assert verdict is not None
    assert verdict.reason == "not_admitted"
    assert verdict.detail == "g0e0 boot boot-a was not admitted at version 4"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"logprobs": [-1.0]}, "1 logprobs for 3 tokens"),
        ({"spans": []}, "version spans cover 0 of 3 tokens"),
        ({"spans": [VersionSpan(5, 0, 2)]}, "version spans cover 2 of 3 tokens"),
        ({"spans": [VersionSpan(5, 1, 3)]}, "version spans do not tile the completion at token 0"),
        (
            {"spans": [VersionSpan(5, 0, 2), VersionSpan(5, 1, 3)]},
            "version spans do not tile the completion at token 2",
        ),
        ({"spans": [VersionSpan(5, 0, 0)]}, "version spans do not tile the completion at token 0"),
    ],
)
def test_a_sample_that_breaks_its_contract_is_refused(
    changes: dict[str, object], detail: str
) -> None:
    broken = msgspec.structs.replace(make_sample(5), **changes)
    verdict = judge(broken, 5, 1, admissions(5))
    assert verdict is not None
    assert (verdict.reason, verdict.detail) == ("bad_sample", detail)


def test_old_admissions_are_forgotten_and_new_ones_kept() -> None:
    admitted = Admissions(keep_versions=2)
    admitted.admit("g0e0", "boot-a", 0)
    admitted.admit("g0e1", "boot-b", 3)
    assert not admitted.is_known("g0e0", "boot-a")
    assert admitted.was_admitted("g0e1", "boot-b", 3)
    admitted.admit("g0e0", "boot-c", 2)
    assert admitted.was_admitted("g0e0", "boot-c", 2)
    admitted.admit("g0e1", "boot-b", 5)
    assert not admitted.was_admitted("g0e0", "boot-c", 2)
    assert admitted.was_admitted("g0e1", "boot-b", 3)
