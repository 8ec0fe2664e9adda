"""The fake's engine core: makes tokens, freezes, resumes, cuts, like vLLM's but without a model.

    request -> task that makes one token a tick while the core runs -> completion with version spans

Tokens depend only on (seed, policy version, prompt, position), so that a test can foretell them and
a retried request gives the same ones. Pausing holds every request where it is; after a commit the
next tokens belong to a new span. A frozen core answers nothing and makes nothing until thawed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PauseMode = Literal["abort", "wait", "keep"]

_MIN_TICK_S = 0.002  # faster rates make several tokens a tick; a timer a token would eat the CPU


class Token(NamedTuple):
    """One sampled token; `logprob` is a natural logarithm."""

    token_id: int
    logprob: float


def sample_token(seed: int, version: int | None, prompt: bytes, position: int, vocab: int) -> Token:
    """The token at `position` of the completion of `prompt` (any digest of it)."""
    key = f"{seed}/{version}/{position}/".encode() + prompt
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return Token(word % vocab, -((word >> 32) % 4000) / 1000 - 0.001)


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """What `sample_token` wants to know of a prompt."""
    return hashlib.blake2b(",".join(map(str, prompt_ids)).encode(), digest_size=8).digest()


@dataclass(slots=True)
class Completion:
    """A request in flight or done. `spans` are (version, start, end) and tile the tokens."""

    request_id: str
    prompt: bytes
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    tokens: list[Token] = field(default_factory=list)
    spans: list[tuple[int | None, int, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None

    def add(self, token: Token, version: int | None) -> bool:
        """Append a token; whether the completion is over now (a stop token, or the limit)."""
        end = len(self.tokens) + 1
        self.tokens.append(token)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], end)
        else:
            self.spans.append((version, end - 1, end))
        if token.token_id in self.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token.token_id
        elif end >= self.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None


class FakeCore:
    """One engine core. `clock` gives monotonic seconds."""

    def __init__(
        self, *, seed: int, vocab_size: int, tokens_per_s: float, clock: Callable[[], float]
    ) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.tokens_per_s = tokens_per_s
        self.version: int | None = None
        self.paused = False
        self.generated_tokens = 0
        self._clock = clock
        self._frozen_at: float | None = None
        self._runs = asyncio.Event()  # neither paused nor frozen
        self._runs.set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: dict[str, tuple[Completion, asyncio.Task[None]]] = {}

    @property
    def num_running(self) -> int:
        """Requests that were accepted and are not over."""
        return len(self._tasks)

    @property
    def age_s(self) -> float:
        """Seconds since the core last answered; 0 unless frozen."""
        return 0.0 if self._frozen_at is None else self._clock() - self._frozen_at

    async def answer(self) -> None:
        """Return when the core would answer a call: at once, or after `thaw`."""
        await self._thawed.wait()

    def freeze(self) -> None:
        """Hang like a core that is stuck in a kernel."""
        if self._frozen_at is None:
            self._frozen_at = self._clock()
        self._thawed.clear()
        self._update()

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._frozen_at = None
        self._thawed.set()
        self._update()

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling. `keep` holds requests, `abort` cuts them, `wait` lets them end first."""
        await self.answer()
        if mode == "wait":
            await self._idle.wait()
        self.paused = True
        self._update()
        if mode == "abort":
            self.abort()

    async def resume(self) -> None:
        """Schedule again."""
        await self.answer()
        self.paused = False
        self._update()

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cut these requests, all when None; they end with finish reason `abort`."""
        wanted = list(self._tasks) if request_ids is None else request_ids
        found = [self._tasks[request_id] for request_id in wanted if request_id in self._tasks]
        for completion, task in found:
            completion.finish_reason = "abort"
            task.cancel()
        return len(found)

    async def generate(self, completion: Completion) -> Completion:
        """Run to the end; cancelling the caller (its client left) drops the request."""
        task = asyncio.get_running_loop().create_task(self._run(completion))
        self._tasks[completion.request_id] = (completion, task)
        self._idle.clear()
        try:
            await task
        except asyncio.CancelledError:
            if completion.finish_reason != "abort":
                raise
        finally:
            self._tasks.pop(completion.request_id, None)
            if not self._tasks:
                self._idle.set()
        return completion

    async def _run(self, completion: Completion) -> None:
        tick_s = max(1 / self.tokens_per_s, _MIN_TICK_S)
        per_tick = max(round(tick_s * self.tokens_per_s), 1)
        is_over = False
        while not is_over:
            await asyncio.sleep(tick_s)
            await self._runs.wait()
            for _ in range(per_tick):
                is_over = completion.add(self._sample(completion), self.version)
                self.generated_tokens += 1
                if is_over:
                    break

    def _sample(self, completion: Completion) -> Token:
        position = len(completion.tokens)
        return sample_token(self.seed, self.version, completion.prompt, position, self.vocab_size)

    def _update(self) -> None:
        if self.paused or self._frozen_at is not None:
            self._runs.clear()
        else:
            self._runs.set()
