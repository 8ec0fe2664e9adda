"""Token-in, token-out generation through the router, tried until the deadline.

What is tried again, and what is not
| what happened | again? |
|---|---|
| refused, reset, timed out, cut in the middle | yes |
| 5xx; 503 after the `Retry-After` it names | yes |
| 200 with `finish_reason: abort` (the engine was fenced or paused) | yes |
| 200 that breaks the contract (no version, no identity, other tokens) | no: it would hide a fault |
| 4xx | no: the next engine would refuse it too |

The router picks the engine. Every try is a new session and a new request id, so that a policy that
hashes the session moves on to another engine. Sampling has no side effects, so a request whose
outcome is unknown may be sent again; only the answer that came back is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
import tenacity

from orchestrator.rollouts.answers import AbortedAnswer, BadAnswer, CutAnswer, parse_answer
from orchestrator.rollouts.config import RolloutsConfig
from orchestrator.rollouts.errors import RolloutLost
from protocol.ids import HEADER_ENGINE_ID
from protocol.records import Sample

GENERATE_PATH = "/inference/v1/generate"
HEADER_SESSION_ID = "X-Session-ID"
_MAX_ERROR_TEXT = 500
_MAX_RETRY_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. `engine_id` None: no engine answered (router, network).
    `status` None: no HTTP answer. A 4xx is the caller's fault, never the engine's."""

    engine_id: str | None
    ok: bool
    status: int | None
    text: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to sample. `key` names it in sessions and request ids; `cache_salt`
    separates prefix caches of different weights."""

    key: str
    prompt_ids: list[int]
    cache_salt: str | None = None
    seed: int | None = None


class Generator(Protocol):
    """What the service needs of a client."""

    async def generate(self, request: GenerationRequest) -> tuple[Sample, int]:
        """The sample and the number of attempts it took. Raises RolloutLost."""
        ...


class _TryAgain(Exception):
    """An attempt failed in a way that another engine may not."""

    def __init__(self, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class _Refused(Exception):
    """A 4xx."""


@dataclass(slots=True)
class AttemptCounts:
    """Requests sent, and how they ended. `num_attempts` is the sum of the others once none is in
    flight."""

    num_attempts: int = 0
    num_ok: int = 0
    num_retryable: int = 0
    num_refused: int = 0
    num_bad_answers: int = 0
    num_cancelled: int = 0


class GenerationClient:
    """Sends generation requests to `base_url` (the router), or, where there is none, to what
    `url_for` says for each session (None: nobody serves). Use as an async context manager."""

    def __init__(
        self,
        config: RolloutsConfig,
        base_url: str,
        *,
        api_key: str | None = None,
        url_for: Callable[[str], str | None] | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._config = config
        self._on_outcome = on_outcome
        self._url_for = url_for
        self.counts = AttemptCounts()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            transport=transport,
            trust_env=False,  # the fleet is never behind the proxy of the login shell
            timeout=httpx.Timeout(config.request_timeout_s, connect=config.connect_timeout_s),
            limits=httpx.Limits(
                max_connections=config.max_in_flight,
                max_keepalive_connections=config.max_in_flight,
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(self, request: GenerationRequest) -> tuple[Sample, int]:
        """Sample of `request` and the number of attempts. Raises RolloutLost.

        Bounded by `rollout_timeout_s` whatever happens, one attempt by `request_timeout_s`.
        """
        num_attempts = 0
        last_error = "no answer"
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_TryAgain), wait=self._wait_s, reraise=True
        )
        try:
            async with asyncio.timeout(self._config.rollout_timeout_s):
                async for attempt in retrying:
                    with attempt:
                        num_attempts += 1
                        try:
                            sample = await self._attempt(request, num_attempts)
                        except _TryAgain as error:
                            last_error = str(error)
                            raise
        except _Refused as error:
            raise RolloutLost("refused", str(error), num_attempts) from error
        except BadAnswer as error:
            raise RolloutLost("bad_answer", str(error), num_attempts) from error
        except TimeoutError as error:
            detail = f"no good answer within {self._config.rollout_timeout_s:g} s; {last_error}"
            raise RolloutLost("timeout", detail, num_attempts) from error
        return sample, num_attempts

    async def _attempt(self, request: GenerationRequest, number: int) -> Sample:
        self.counts.num_attempts += 1
        name = f"{request.key}-{number}"
        base_url = "" if self._url_for is None else self._url_for(name)
        if base_url is None:
            raise self._failed(None, None, "no engine serves")
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                response = await self._http.post(
                    base_url + GENERATE_PATH,
                    json=self._body(request, name),
                    headers={HEADER_SESSION_ID: name, "X-Request-Id": name},
                )
        except asyncio.CancelledError:
            self.counts.num_cancelled += 1
            raise
        except TimeoutError as error:
            detail = f"no answer within {self._config.request_timeout_s:g} s"
            raise self._failed(None, None, detail) from error
        except httpx.HTTPError as error:
            detail = f"{type(error).__name__}: {error}"
            raise self._failed(None, None, detail) from error
        return self._judge(response, request)

    def _judge(self, response: httpx.Response, request: GenerationRequest) -> Sample:
        """Sample of a whole answer; reports the outcome."""
        engine_id = response.headers.get(HEADER_ENGINE_ID)
        status = response.status_code
        if status != 200:
            detail = f"{engine_id or 'router'} answered {status}: {response.text[:_MAX_ERROR_TEXT]}"
            if status < 500:
                self.counts.num_refused += 1
                self._report(Outcome(engine_id, False, status, detail))
                raise _Refused(detail)
            retry_after_s = _retry_after_s(response.headers)
            raise self._failed(engine_id, status, detail, retry_after_s)
        try:
            sample = parse_answer(response.content, response.headers, request.prompt_ids)
        except CutAnswer as error:
            raise self._failed(engine_id, status, f"{engine_id}: {error}") from error
        except AbortedAnswer as error:
            # The engine did as it was told: no fault of its own.
            self.counts.num_retryable += 1
            self._report(Outcome(engine_id, True, status, str(error)))
            raise _TryAgain(f"{engine_id}: {error}") from error
        except BadAnswer as error:
            self.counts.num_bad_answers += 1
            self._report(Outcome(engine_id, False, status, str(error)))
            raise BadAnswer(f"{engine_id or 'unnamed engine'}: {error}") from error
        self.counts.num_ok += 1
        self._report(Outcome(engine_id, True, status, ""))
        return sample

    def _failed(
        self,
        engine_id: str | None,
        status: int | None,
        detail: str,
        retry_after_s: float | None = None,
    ) -> _TryAgain:
        self.counts.num_retryable += 1
        self._report(Outcome(engine_id, False, status, detail))
        return _TryAgain(detail, retry_after_s)

    def _report(self, outcome: Outcome) -> None:
        if self._on_outcome is not None:
            self._on_outcome(outcome)

    def _body(self, request: GenerationRequest, name: str) -> dict[str, Any]:
        # Everything that shapes the distribution is said, so that no default of a model's
        # generation config makes the logprobs belong to another one.
        sampling: dict[str, Any] = {
            "n": 1,
            "max_tokens": self._config.max_completion_tokens,
            "temperature": self._config.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
        }
        if request.seed is not None:
            sampling["seed"] = request.seed
        body: dict[str, Any] = {
            "request_id": name,
            "token_ids": request.prompt_ids,
            "sampling_params": sampling,
            "stream": False,
        }
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        return body

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        """Doubling wait, or what the server asked for."""
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, _TryAgain) and error.retry_after_s is not None:
            return error.retry_after_s
        exponent = min(state.attempt_number - 1, 30)
        return float(min(self._config.retry_wait_s * 2**exponent, self._config.retry_wait_max_s))


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a `Retry-After`, bounded; None when there is none in seconds."""
    value = headers.get("Retry-After", "")
    if not (value.isascii() and value.isdecimal()):
        return None
    return min(float(value), _MAX_RETRY_AFTER_S)
