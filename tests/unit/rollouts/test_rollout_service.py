"""Dispatch, back-pressure and batches, with a client that answers when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from orchestrator.rollouts.client import GenerationRequest
from orchestrator.rollouts.config import RolloutsConfig
from orchestrator.rollouts.env import Prompt
from orchestrator.rollouts.errors import RolloutLost, RolloutsFailed
from orchestrator.rollouts.service import RolloutService
from orchestrator.rollouts.staleness import Admissions
from protocol.records import Sample
from tests.unit.rollouts.samples import make_sample


class Client:
    """Holds requests until `answer` or `lose`."""

    def __init__(self) -> None:
        self.open: list[tuple[GenerationRequest, asyncio.Future[Sample]]] = []
        self.num_cancelled = 0

    async def generate(self, request: GenerationRequest) -> tuple[Sample, int]:
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self.open.append((request, future))
        try:
            return await future, 1
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def answer(self, number: int | None = None, version: int = 0) -> None:
        for _, future in self._pop(number):
            future.set_result(make_sample(version))
        await settle()

    async def lose(self, number: int | None = None) -> None:
        for _, future in self._pop(number):
            future.set_exception(RolloutLost("timeout", "no engine", 3))
        await settle()

    def _pop(self, number: int | None) -> list[tuple[GenerationRequest, asyncio.Future[Sample]]]:
        number = len(self.open) if number is None else number
        popped, self.open = self.open[:number], self.open[number:]
        return popped


class Environment:
    """Rewards count up; `broken` makes the reward raise."""

    def __init__(self) -> None:
        self.broken = False
        self.rewards: Callable[[int], float] = float
        self.num_graded = 0

    def prompt(self, index: int) -> Prompt:
        return Prompt(user=f"prompt {index}", answer="")

    def reward(self, prompt: Prompt, completion: str) -> float:
        if self.broken:
            raise KeyError("no such word")
        self.num_graded += 1
        return self.rewards(self.num_graded)


class Tokenizer:
    """One token a prompt."""

    def encode_prompt(self, user: str, system: str | None = None) -> list[int]:
        return [len(user)]

    def decode(self, token_ids: list[int]) -> str:
        return str(token_ids)


class Bench:
    """A started service with everything around it."""

    def __init__(self, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "prompts_per_step": 2,
            "group_size": 2,
            "max_in_flight": 100,
            "max_off_policy_steps": 0,
        }
        self.client = Client()
        self.env = Environment()
        self.admissions = Admissions()
        self.admissions.admit("g0e0", "boot-a", 0)
        self.service = RolloutService(
            RolloutsConfig(**(defaults | settings)),
            self.client,
            self.env,
            Tokenizer(),  # type: ignore[arg-type]
            run_id="run",
            admissions=self.admissions,
        )

    def serve(self, version: int) -> None:
        self.admissions.admit("g0e0", "boot-a", version)
        self.service.set_policy_version(version)

    def check_accounts(self) -> None:
        stats = self.service.stats()
        assert stats.num_started == (
            stats.num_in_flight
            + stats.buffer.added
            + stats.num_lost
            + stats.num_env_errors
            + stats.num_discarded
        )


async def settle() -> None:
    """Let every task run until all of them wait."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    made = Bench(**settings)
    await made.service.start()
    made.service.set_dispatch(True)
    await settle()
    try:
        yield made
    finally:
        await made.service.stop()
        made.check_accounts()


async def test_nothing_starts_before_dispatch_is_on() -> None:
    made = Bench()
    await made.service.start()
    await settle()
    assert made.client.open == []
    made.service.set_dispatch(True)
    await settle()
    assert len(made.client.open) == 4
    await made.service.stop()
    assert made.client.num_cancelled == 4


async def test_sampling_and_training_take_turns_with_no_off_policy_steps() -> None:
    async with bench(max_off_policy_steps=0) as made:
        assert len(made.client.open) == 4
        await made.client.answer()
        batch, stats = await made.service.next_batch(0)
        assert [sample.rollout_id for sample in batch.samples] == [0, 1, 2, 3]
        assert (batch.run_id, batch.step, stats.num_groups) == ("run", 0, 2)
        await settle()
        assert made.client.open == []
        made.serve(1)
        await settle()
        assert len(made.client.open) == 4
        await made.client.answer(version=1)
        batch, _ = await made.service.next_batch(1)
        assert [sample.min_version for sample in batch.samples] == [1] * 4


async def test_one_batch_is_sampled_ahead_with_one_off_policy_step() -> None:
    async with bench(max_off_policy_steps=1) as made:
        assert len(made.client.open) == 8
        await made.client.answer()
        await settle()
        assert made.client.open == []
        await made.service.next_batch(0)
        assert made.service.stats().num_complete_groups == 2
        made.serve(1)
        _, stats = await made.service.next_batch(1)
        assert stats.off_policy_steps_max == 1


async def test_in_flight_is_bounded() -> None:
    async with bench(max_in_flight=3, max_off_policy_steps=1) as made:
        assert len(made.client.open) == 3
        await made.client.answer(1)
        assert len(made.client.open) == 3
        assert made.service.stats().num_in_flight == 3


async def test_requests_name_the_rollout_and_salt_the_cache() -> None:
    async with bench(sampling_seed=1) as made:
        request = made.client.open[1][0]
        assert request.key == "run-r1"
        assert request.cache_salt == "v0"
        assert request.seed == 1_000_004


async def test_a_batch_is_waited_for() -> None:
    async with bench() as made:
        waiting = asyncio.create_task(made.service.next_batch(0))
        await made.client.answer(3)
        assert not waiting.done()
        await made.client.answer(1)
        batch, _ = await waiting
        assert len(batch.samples) == 4


async def test_dispatch_off_starts_nothing_and_keeps_what_is_in_flight() -> None:
    async with bench() as made:
        made.service.set_dispatch(False, "no capacity")
        await made.client.answer(1)
        await made.client.lose(1)
        await settle()
        assert len(made.client.open) == 2
        made.service.set_dispatch(True)
        await settle()
        assert len(made.client.open) == 4


async def test_a_lost_rollout_takes_its_group_along_and_is_replaced_by_another() -> None:
    async with bench() as made:
        await made.client.lose(1)
        stats = made.service.stats()
        assert stats.lost == {"timeout": 1}
        assert len(made.client.open) == 5
        await made.client.answer()
        batch, _ = await made.service.next_batch(0)
        assert [sample.rollout_id for sample in batch.samples] == [2, 3, 4, 5]
        assert made.service.stats().buffer.dropped == {"group_failed": 1}


async def test_a_group_of_an_engine_that_was_not_admitted_never_reaches_a_batch() -> None:
    async with bench() as made:
        request, future = made.client.open.pop(0)
        assert request.key == "run-r0"
        future.set_result(make_sample(0, boot_id="stranger"))
        await made.client.answer()
        waiting = asyncio.create_task(made.service.next_batch(0))
        await settle()
        assert not waiting.done()
        assert made.service.stats().buffer.dropped == {"unknown_engine": 1, "group_failed": 1}
        await made.client.answer()
        batch, _ = await waiting
        assert [sample.rollout_id for sample in batch.samples] == [2, 3, 4, 5]


async def test_stale_groups_are_dropped_and_sampled_anew() -> None:
    async with bench(max_off_policy_steps=1) as made:
        await made.client.answer(4)
        await made.service.next_batch(0)
        made.serve(1)
        await made.client.answer(4)
        await made.service.next_batch(1)
        assert made.service.stats().next_step == 2
        await made.client.answer(3)
        made.serve(2)
        dropped = made.service.stats().buffer.dropped
        assert dropped == {"stale": 3}
        await settle()
        waiting = asyncio.create_task(made.service.next_batch(2))
        await made.client.answer(version=2)
        batch, stats = await waiting
        assert stats.off_policy_steps_max == 0
        assert {sample.min_version for sample in batch.samples} == {2}


async def test_zero_variance_groups_are_replaced_on_demand() -> None:
    async with bench(drop_zero_variance=True) as made:
        made.env.rewards = lambda number: float(number > 2) * number
        await made.client.answer()
        waiting = asyncio.create_task(made.service.next_batch(0))
        await settle()
        assert made.service.stats().buffer.dropped == {"zero_variance": 2}
        await made.client.answer()
        _, stats = await waiting
        assert stats.num_zero_variance_groups == 0


async def test_environment_errors_are_data_until_there_are_too_many_in_a_row() -> None:
    async with bench(max_consecutive_env_errors=2) as made:
        waiting = asyncio.create_task(made.service.next_batch(0))
        made.env.broken = True
        await made.client.answer(1)
        assert not waiting.done()
        assert made.service.stats().num_env_errors == 1
        made.env.broken = False
        await made.client.answer(2)
        made.env.broken = True
        await made.client.answer(1)
        assert not waiting.done()
        await made.client.answer(1)
        with pytest.raises(RolloutsFailed, match=r"2 environment errors in a row, last: .*reward"):
            await waiting


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_is_an_environment_error(reward: float) -> None:
    async with bench(max_consecutive_env_errors=1) as made:
        made.env.rewards = lambda number: reward
        await made.client.answer(1)
        with pytest.raises(RolloutsFailed, match=f"reward is {reward}"):
            await made.service.next_batch(0)


async def test_too_many_lost_in_a_row_end_the_run_but_not_while_dispatch_is_off() -> None:
    async with bench(max_consecutive_lost=2) as made:
        made.service.set_dispatch(False)
        await made.client.lose(3)
        made.service.set_dispatch(True)
        await settle()
        await made.client.lose(1)
        await made.client.lose(1)
        with pytest.raises(RolloutsFailed, match="2 rollouts lost in a row, last: timeout"):
            await made.service.next_batch(0)


async def test_a_broken_prompt_ends_the_run() -> None:
    made = Bench(max_prompt_tokens=4)
    await made.service.start()
    made.service.set_dispatch(True)
    await settle()
    waiting = asyncio.create_task(made.service.next_batch(0))
    await made.service.stop()
    assert not waiting.done()
    waiting.cancel()

    class Long(Tokenizer):
        def encode_prompt(self, user: str, system: str | None = None) -> list[int]:
            return [0] * 9

    service = RolloutService(
        RolloutsConfig(max_prompt_tokens=4),
        made.client,
        made.env,
        Long(),  # type: ignore[arg-type]
        run_id="run",
        admissions=Admissions(),
    )
    await service.start()
    service.set_dispatch(True)
    with pytest.raises(RolloutsFailed, match="tokenize of prompt 0: 9 tokens, allowed are 1 to 4"):
        await service.next_batch(0)
    await service.stop()


async def test_no_batch_in_time_ends_the_run_with_the_counts() -> None:
    async with bench(request_timeout_s=0.01, rollout_timeout_s=0.02, batch_timeout_s=0.03) as made:
        with pytest.raises(
            RolloutsFailed,
            match=r"no batch for step 0 within 0\.03 s: 0 of 2 groups complete, 4 rollouts in",
        ):
            await made.service.next_batch(0)


async def test_steps_come_in_order_and_versions_only_grow() -> None:
    async with bench() as made:
        with pytest.raises(ValueError, match="batch of step 1 asked for, next is 0"):
            await made.service.next_batch(1)
        made.serve(3)
        with pytest.raises(ValueError, match="policy version 2 is below 3"):
            made.service.set_policy_version(2)
        with pytest.raises(RuntimeError, match="started twice"):
            await made.service.start()


async def test_a_resumed_run_goes_on_with_other_prompts() -> None:
    made = Bench()
    service = RolloutService(
        RolloutsConfig(prompts_per_step=3, group_size=2),
        made.client,
        made.env,
        Tokenizer(),  # type: ignore[arg-type]
        run_id="run",
        admissions=Admissions(),
        first_step=4,
    )
    await service.start()
    service.set_dispatch(True)
    await settle()
    assert made.client.open[0][0].prompt_ids == [len("prompt 12")]
    await service.stop()
