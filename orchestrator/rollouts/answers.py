"""From an engine's answer to a `Sample`. Pure: bytes and headers in, a value or an error out.

An answer says which weights made which token (`weight_versions`, opaque strings) and which boot
of which engine sent it (headers). All of it must be there and be ours: a version that is not a
plain decimal number (an engine that was never given weights says `default`) is an error, never a
guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from protocol.ids import HEADER_BOOT_ID, HEADER_ENGINE_ID, Slot
from protocol.records import Sample, VersionSpan

# An engine says this for a token whose log probability it does not know.
_LOGPROB_UNKNOWN = -9999.0
_FINISHED = ("stop", "length")


class BadAnswer(ValueError):
    """A 200 answer that breaks the contract."""


class AbortedAnswer(Exception):
    """A 200 answer whose request the engine was told to abort."""


class CutAnswer(Exception):
    """A 200 answer whose body ends too early or is not JSON."""


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def parse_answer(body: bytes, headers: Mapping[str, str], prompt_ids: list[int]) -> Sample:
    """Sample of one `/inference/v1/generate` answer. `headers` are looked up as they are.

    Raises CutAnswer and AbortedAnswer for what another engine may do better, BadAnswer otherwise.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.ValidationError as error:
        raise BadAnswer(f"answer does not parse: {error}") from error
    except msgspec.DecodeError as error:
        raise CutAnswer(f"answer of {len(body)} bytes is not whole: {error}") from error
    if len(answer.choices) != 1:
        raise BadAnswer(f"{len(answer.choices)} choices, asked for 1")
    choice = answer.choices[0]
    if choice.finish_reason == "abort":
        raise AbortedAnswer(f"aborted after {len(choice.token_ids or ())} tokens")
    if choice.finish_reason not in _FINISHED:
        raise BadAnswer(f"unknown finish_reason {choice.finish_reason!r}")
    engine_id, boot_id = _identity(headers)
    completion_ids = choice.token_ids or []
    if not completion_ids:
        raise BadAnswer("no tokens")
    return Sample(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=_logprobs(choice.logprobs, completion_ids),
        spans=_spans(choice.weight_versions, len(completion_ids)),
        engine_id=engine_id,
        boot_id=boot_id,
        finish_reason=choice.finish_reason,
    )


def _identity(headers: Mapping[str, str]) -> tuple[str, str]:
    engine_id = headers.get(HEADER_ENGINE_ID)
    boot_id = headers.get(HEADER_BOOT_ID)
    if not engine_id or not boot_id:
        missing = [
            name
            for name, value in ((HEADER_ENGINE_ID, engine_id), (HEADER_BOOT_ID, boot_id))
            if not value
        ]
        raise BadAnswer(f"no {' and no '.join(missing)} in the answer's headers")
    try:
        Slot.parse(engine_id)
    except ValueError as error:
        raise BadAnswer(str(error)) from error
    return engine_id, boot_id


def _logprobs(logprobs: _Logprobs | None, completion_ids: Sequence[int]) -> list[float]:
    if logprobs is None or logprobs.content is None:
        raise BadAnswer("no logprobs")
    content = logprobs.content
    if [entry.token_id for entry in content] != list(completion_ids):
        raise BadAnswer("logprobs belong to other tokens than the completion")
    for position, entry in enumerate(content):
        if not math.isfinite(entry.logprob) or not _LOGPROB_UNKNOWN < entry.logprob <= 1e-3:
            raise BadAnswer(f"logprob {entry.logprob} of token {position} is not one")
    return [entry.logprob for entry in content]


def _spans(spans: list[_Span] | None, num_tokens: int) -> list[VersionSpan]:
    if not spans:
        raise BadAnswer("no weight_versions")
    parsed: list[VersionSpan] = []
    position = 0
    for span in spans:
        if span.start == span.end and len(spans) > 1:
            continue  # a version that made no token of this completion
        if span.start != position or span.end <= span.start:
            raise BadAnswer(f"weight_versions do not tile the completion at token {position}")
        if not (span.version.isascii() and span.version.isdecimal()):
            raise BadAnswer(f"weight version {span.version!r} is not a policy version")
        parsed.append(VersionSpan(int(span.version), span.start, span.end))
        position = span.end
    if position != num_tokens:
        raise BadAnswer(f"weight_versions cover {position} of {num_tokens} tokens")
    return parsed
