"""The fake core: deterministic tokens, spans, pause modes, freeze."""

from __future__ import annotations

import asyncio

from engine.fake_core import Completion, FakeCore, prompt_digest, sample_token

_VOCAB = 50


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _core(tokens_per_s: float = 1e5) -> FakeCore:
    return FakeCore(seed=1, vocab_size=_VOCAB, tokens_per_s=tokens_per_s, clock=_Clock())


def _request(max_tokens: int = 5, name: str = "r", stop: tuple[int, ...] = ()) -> Completion:
    return Completion(name, prompt_digest([1, 2, 3]), max_tokens, frozenset(stop))


async def _started(core: FakeCore, completion: Completion) -> asyncio.Task[Completion]:
    """A request that has made a token."""
    task = asyncio.create_task(core.generate(completion))
    for _ in range(10**6):
        await asyncio.sleep(0)
        if completion.tokens:
            return task
    raise AssertionError("the core makes no token")


async def test_tokens_depend_on_seed_version_prompt_and_position_only() -> None:
    core = _core()
    core.version = 3
    done = await core.generate(_request())
    again = await core.generate(_request(name="other"))
    expected = [sample_token(1, 3, prompt_digest([1, 2, 3]), i, _VOCAB) for i in range(5)]
    assert done.tokens == again.tokens == expected
    assert all(0 <= token.token_id < _VOCAB and token.logprob < 0 for token in expected)
    assert done.spans == [(3, 0, 5)]
    assert (done.finish_reason, core.generated_tokens, core.num_running) == ("length", 10, 0)
    core.version = 4
    assert (await core.generate(_request())).tokens != expected


async def test_stop_token_ends() -> None:
    core = _core()
    first = sample_token(1, None, prompt_digest([1, 2, 3]), 0, _VOCAB).token_id
    done = await core.generate(_request(stop=(first,)))
    assert (done.finish_reason, done.stop_reason, len(done.tokens)) == ("stop", first, 1)
    assert done.spans == [(None, 0, 1)]


async def test_pause_keep_holds_and_a_commit_starts_a_new_span() -> None:
    core = _core(tokens_per_s=500)
    core.version = 1
    completion = _request(max_tokens=8)
    task = await _started(core, completion)
    await core.pause("keep")
    made = len(completion.tokens)
    core.version = 2
    await core.resume()
    done = await task
    assert done.spans == [(1, 0, made), (2, made, 8)]


async def test_pause_abort_cuts() -> None:
    core = _core(tokens_per_s=500)
    task = await _started(core, completion := _request(max_tokens=10**6))
    await core.pause("abort")
    assert (await task).finish_reason == "abort"
    assert 0 < len(completion.tokens) < 10**6
    assert core.paused


async def test_pause_wait_waits() -> None:
    core = _core()
    task = await _started(core, _request(max_tokens=20_000))
    await core.pause("wait")
    assert task.done() or core.num_running == 0
    assert (await task).finish_reason == "length"


async def test_abort_by_request_id() -> None:
    core = _core(tokens_per_s=500)
    cut = await _started(core, _request(10**6, name="a"))
    kept = await _started(core, _request(3, name="b"))
    assert core.abort(["a", "unknown"]) == 1
    assert (await cut).finish_reason == "abort"
    assert (await kept).finish_reason == "length"


async def test_client_that_leaves_drops_its_request() -> None:
    core = _core(tokens_per_s=500)
    task = await _started(core, _request(10**6))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert core.num_running == 0


async def test_frozen_core_ages_and_answers_nothing() -> None:
    clock = _Clock()
    core = FakeCore(seed=1, vocab_size=_VOCAB, tokens_per_s=500, clock=clock)
    task = await _started(core, _request(4))
    core.freeze()
    made = core.generated_tokens
    clock.now = 7.0
    assert core.age_s == 7.0
    pausing = asyncio.create_task(core.pause("keep"))
    await asyncio.sleep(0)
    assert not pausing.done()
    assert not core.paused
    core.freeze()  # a second time changes nothing
    assert core.age_s == 7.0
    assert core.generated_tokens == made
    core.thaw()
    await pausing
    assert (core.age_s, core.paused) == (0.0, True)
    await core.resume()
    assert (await task).finish_reason == "length"
