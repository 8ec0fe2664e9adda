"""Builders of samples and rollouts for the tests of this folder."""

from __future__ import annotations

from protocol.records import Rollout, Sample, VersionSpan


def make_sample(
    versions: list[int] | int = 0,
    *,
    engine_id: str = "g0e0",
    boot_id: str = "boot-a",
    finish_reason: str = "stop",
) -> Sample:
    """One token a version in `versions`, or three of one version."""
    tokens = [versions] * 3 if isinstance(versions, int) else versions
    spans: list[VersionSpan] = []
    for position, version in enumerate(tokens):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(VersionSpan(version, position, position + 1))
    return Sample(
        prompt_ids=[1, 2],
        completion_ids=[10 + position for position in range(len(tokens))],
        logprobs=[-0.5] * len(tokens),
        spans=spans,
        engine_id=engine_id,
        boot_id=boot_id,
        finish_reason=finish_reason,
    )


def make_rollout(
    rollout_id: int, prompt_group: int, reward: float = 0.0, sample: Sample | None = None
) -> Rollout:
    """A rollout that took one attempt and half a second."""
    return Rollout(
        rollout_id=rollout_id,
        prompt_group=prompt_group,
        sample=sample or make_sample(),
        reward=reward,
        num_attempts=1,
        duration_s=0.5,
    )
