"""Keeps rollouts running, and turns them into batches.

    env.prompt -> [gate] -> client (router, engines) -> env.reward -> GroupBuffer -> next_batch

Back-pressure
| loop | waits for | is let go by |
|---|---|---|
| open a group | room in the pipeline, dispatch on | a batch, a new version, a dropped group |
| start a rollout | fewer than `max_in_flight` running | a rollout that ends |
| `next_batch` | whole groups that pass `staleness.judge` | a group completed |

Room in the pipeline: group number k in line (0 = the next to be trained) lands in the batch of step
`next_step + k // prompts_per_step`. Sampled now, with policy version v, it is that step minus v
off policy; it is started only if that is at most `max_off_policy_steps`. So nothing is sampled that
could not be used, and with 0 sampling and training take turns.

A bad rollout is data: what is lost, refused by the judge, or broken by the environment is counted
by reason and its group replaced. Only a long row of them, or no batch in time, ends the run
(`RolloutsFailed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.rollouts.batch import BatchStats, batch_stats, build_batch
from orchestrator.rollouts.buffer import BufferCounts, GroupBuffer
from orchestrator.rollouts.client import GenerationRequest, Generator
from orchestrator.rollouts.config import RolloutsConfig
from orchestrator.rollouts.env import Environment, Prompt
from orchestrator.rollouts.errors import EnvironmentFailed, RolloutLost, RolloutsFailed
from orchestrator.rollouts.staleness import Admissions, Verdict, judge
from orchestrator.rollouts.tokenizer import PromptTokenizer
from protocol.records import Rollout, Sample, TrainBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Snapshot of the service. Counts are since the start.

    `num_started == num_in_flight + buffer.added + num_lost + num_env_errors + num_discarded`:
    discarded are those that were cut off by `stop`, or whose group was gone before they were sent.
    """

    policy_version: int
    next_step: int
    is_dispatching: bool
    num_in_flight: int
    num_queued: int
    num_started: int
    num_discarded: int
    num_env_errors: int
    lost: dict[str, int]
    buffer: BufferCounts
    num_complete_groups: int
    num_open_groups: int

    @property
    def num_lost(self) -> int:
        """Rollouts that never got a good answer."""
        return sum(self.lost.values())


@dataclass(frozen=True, slots=True)
class _Ticket:
    """One rollout that may be started."""

    rollout_id: int
    prompt_group: int
    prompt: Prompt
    prompt_ids: list[int]


@dataclass(slots=True)
class _Counts:
    started: int = 0
    discarded: int = 0
    env_errors: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    env_errors_in_row: int = 0
    lost_in_row: int = 0


class RolloutService:
    """Samples with `client`, grades with `env`, hands out batches. One per run; one event loop."""

    def __init__(
        self,
        config: RolloutsConfig,
        client: Generator,
        env: Environment,
        tokenizer: PromptTokenizer,
        *,
        run_id: str,
        admissions: Admissions,
        first_step: int = 0,
        first_rollout: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_step`: step of the first batch; a resumed run goes on with other prompts than
        those it has seen, since prompt groups are numbered from `first_step * prompts_per_step`.
        `first_rollout`: id of the first rollout; no id is used twice in a run."""
        self._config = config
        self._client = client
        self._env = env
        self._tokenizer = tokenizer
        self._run_id = run_id
        self._admissions = admissions
        self._now = now
        self._buffer = GroupBuffer(config.group_size)
        self._counts = _Counts()
        self._policy_version = first_step
        self._next_step = first_step
        self._next_group = first_step * config.prompts_per_step
        self._next_rollout = first_rollout
        self._queue: deque[_Ticket] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._dispatcher: asyncio.Task[None] | None = None
        self._is_dispatching = False
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()

    async def start(self) -> None:
        """Start the dispatcher. Nothing is sampled before `set_dispatch(True)`."""
        if self._dispatcher is not None:
            raise RuntimeError("the rollout service was started twice")
        self._dispatcher = asyncio.create_task(self._dispatch(), name="rollouts-dispatch")
        self._dispatcher.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel what is in flight and wait for it to end. Idempotent."""
        self._is_dispatching = False
        tasks = [*self._running]
        if self._dispatcher is not None:
            tasks.append(self._dispatcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._queue.clear()

    def set_dispatch(self, is_on: bool, reason: str = "") -> None:
        """Start new rollouts, or stop doing so. Those in flight go on either way; while dispatch
        is off, `next_batch` has no deadline of its own and losses do not end the run."""
        if is_on != self._is_dispatching:
            log.info("rollouts: dispatch %s %s", "on" if is_on else "off", reason)
        self._is_dispatching = is_on
        self._counts.lost_in_row = 0
        self._notify()

    def set_policy_version(self, version: int) -> None:
        """The fleet serves `version` now. Versions only grow."""
        if version < self._policy_version:
            raise ValueError(f"policy version {version} is below {self._policy_version}")
        self._policy_version = version
        self._drop_hopeless()
        self._notify()

    async def next_batch(self, step: int) -> tuple[TrainBatch, BatchStats]:
        """The batch of `step`, once there are enough whole groups for it.

        Every sample passes `staleness.judge` for the policy version `step`, which is the one the
        step starts from. Raises RolloutsFailed when the run cannot go on.
        """
        if step != self._next_step:
            raise ValueError(f"batch of step {step} asked for, next is {self._next_step}")
        deadline = self._now() + self._config.batch_timeout_s
        while True:
            self._raise_failure()
            groups = self._take(step)
            if groups is not None:
                self._next_step = step + 1
                self._drop_hopeless()
                self._notify()
                return build_batch(self._run_id, step, groups), batch_stats(step, groups)
            self._progress.clear()
            if not self._is_dispatching:
                await self._progress.wait()  # bounded by the plane's no-capacity deadline
                deadline = self._now() + self._config.batch_timeout_s
                continue
            if self._now() >= deadline:
                raise RolloutsFailed(self._no_batch_message(step))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - self._now()):
                    await self._progress.wait()

    def stats(self) -> RolloutStats:
        """Snapshot of all counts."""
        num_complete = self._buffer.num_complete
        return RolloutStats(
            policy_version=self._policy_version,
            next_step=self._next_step,
            is_dispatching=self._is_dispatching,
            num_in_flight=len(self._running),
            num_queued=len(self._queue),
            num_started=self._counts.started,
            num_discarded=self._counts.discarded,
            num_env_errors=self._counts.env_errors,
            lost=dict(self._counts.lost),
            buffer=self._buffer.counts(),
            num_complete_groups=num_complete,
            num_open_groups=self._buffer.num_groups - num_complete,
        )

    # -- batches

    def _take(self, step: int) -> list[list[Rollout]] | None:
        """Groups for the batch of `step`, or None. Bad ones are dropped only when it is full: an
        admission that is about to be recorded must not cost a group."""
        if self._buffer.num_complete < self._config.prompts_per_step:
            return None

        def judge_sample(sample: Sample) -> Verdict | None:
            return judge(sample, step, self._config.max_off_policy_steps, self._admissions)

        verdicts = self._buffer.drop_refused(judge_sample)
        if verdicts:
            log.warning(
                "rollouts: %d refused for step %d, first: %s (%s)",
                len(verdicts),
                step,
                verdicts[0].reason,
                verdicts[0].detail,
            )
        if self._config.drop_zero_variance:
            self._buffer.drop_zero_variance()
        taken = self._buffer.take(self._config.prompts_per_step)
        if taken is None:
            self._wake.set()  # dropped groups made room
        return taken

    def _drop_hopeless(self) -> None:
        """Drop groups that are too old already for the next step, so that they are replaced now."""
        floor = self._next_step - self._config.max_off_policy_steps

        def judge_age(sample: Sample) -> Verdict | None:
            oldest = min(span.version for span in sample.spans)
            if oldest >= floor:
                return None
            return Verdict("stale", f"version {oldest}, step {self._next_step} needs {floor}")

        verdicts = self._buffer.drop_refused(judge_age)
        if verdicts:
            log.warning("rollouts: %d dropped as stale: %s", len(verdicts), verdicts[0].detail)

    def _no_batch_message(self, step: int) -> str:
        stats = self.stats()
        return (
            f"no batch for step {step} within {self._config.batch_timeout_s:g} s: "
            f"{stats.num_complete_groups} of {self._config.prompts_per_step} groups complete, "
            f"{stats.num_in_flight} rollouts in flight, lost {stats.lost}, "
            f"dropped {dict(stats.buffer.dropped)}"
        )

    # -- dispatch

    def _num_groups_wanted(self) -> int:
        """How many more groups may be opened; see the module docstring."""
        steps_ahead = self._policy_version + self._config.max_off_policy_steps - self._next_step
        room = (steps_ahead + 1) * self._config.prompts_per_step
        return max(0, room - self._buffer.num_groups)

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            while self._is_dispatching and self._start_one():
                pass
            await self._wake.wait()

    def _start_one(self) -> bool:
        """Start one rollout; False when there is no room or nothing to start."""
        if self._failure is not None or len(self._running) >= self._config.max_in_flight:
            return False
        if not self._queue and self._num_groups_wanted() > 0:
            self._open_group()
        if not self._queue:
            return False
        ticket = self._queue.popleft()
        self._counts.started += 1
        task = asyncio.create_task(self._run(ticket), name=f"rollout-{ticket.rollout_id}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return True

    def _open_group(self) -> None:
        """Queue the rollouts of the next prompt."""
        number = self._next_group
        self._next_group += 1
        prompt, prompt_ids = self._render(number)
        self._buffer.open_group(number)
        for _ in range(self._config.group_size):
            self._queue.append(_Ticket(self._next_rollout, number, prompt, prompt_ids))
            self._next_rollout += 1

    def _render(self, number: int) -> tuple[Prompt, list[int]]:
        """Prompt `number` and its tokens. What fails here fails for every rollout of the prompt,
        and is the author's to fix: it ends the run."""
        try:
            prompt = self._env.prompt(number)
        # Boundary of user code: anything may come out of it.
        except Exception as error:
            raise EnvironmentFailed("prompt", number, repr(error)) from error
        prompt_ids = self._tokenizer.encode_prompt(prompt.user, prompt.system)
        if not 0 < len(prompt_ids) <= self._config.max_prompt_tokens:
            raise EnvironmentFailed(
                "tokenize",
                number,
                f"{len(prompt_ids)} tokens, allowed are 1 to {self._config.max_prompt_tokens}",
            )
        return prompt, prompt_ids

    # -- one rollout

    async def _run(self, ticket: _Ticket) -> None:
        started_at = self._now()
        if not self._buffer.is_live(ticket.prompt_group):
            self._counts.discarded += 1
            return
        try:
            sample, num_attempts = await self._client.generate(self._request(ticket))
            self._counts.lost_in_row = 0
            rollout = Rollout(
                rollout_id=ticket.rollout_id,
                prompt_group=ticket.prompt_group,
                sample=sample,
                reward=self._reward(ticket, sample),
                num_attempts=num_attempts,
                duration_s=self._now() - started_at,
            )
        except RolloutLost as error:
            self._on_lost(ticket, error)
        except EnvironmentFailed as error:
            self._on_env_error(ticket, error)
        except asyncio.CancelledError:
            self._counts.discarded += 1
            raise
        else:
            self._counts.env_errors_in_row = 0
            if self._buffer.add(rollout):
                self._progress.set()

    def _request(self, ticket: _Ticket) -> GenerationRequest:
        seed = self._config.sampling_seed
        return GenerationRequest(
            key=f"{self._run_id}-r{ticket.rollout_id}",
            prompt_ids=ticket.prompt_ids,
            cache_salt=f"v{self._policy_version}",
            seed=None if seed is None else (seed * 1_000_003 + ticket.rollout_id) % 2**31,
        )

    def _reward(self, ticket: _Ticket, sample: Sample) -> float:
        try:
            text = self._tokenizer.decode(sample.completion_ids)
            reward = float(self._env.reward(ticket.prompt, text))
        # Boundary of user code: anything may come out of it.
        except Exception as error:
            raise EnvironmentFailed("reward", ticket.prompt_group, repr(error)) from error
        if not math.isfinite(reward):
            raise EnvironmentFailed("reward", ticket.prompt_group, f"reward is {reward}")
        return reward

    def _on_lost(self, ticket: _Ticket, error: RolloutLost) -> None:
        self._counts.lost[error.reason] = self._counts.lost.get(error.reason, 0) + 1
        self._fail_group(ticket.prompt_group)
        if not self._is_dispatching:
            return
        self._counts.lost_in_row += 1
        log.warning("rollout %d lost: %s", ticket.rollout_id, error)
        if self._counts.lost_in_row >= self._config.max_consecutive_lost:
            self._fail(
                RolloutsFailed(f"{self._counts.lost_in_row} rollouts lost in a row, last: {error}")
            )

    def _on_env_error(self, ticket: _Ticket, error: EnvironmentFailed) -> None:
        self._counts.env_errors += 1
        self._counts.env_errors_in_row += 1
        self._fail_group(ticket.prompt_group)
        log.warning("rollout %d: %s", ticket.rollout_id, error, exc_info=error.__cause__)
        if self._counts.env_errors_in_row >= self._config.max_consecutive_env_errors:
            self._fail(
                RolloutsFailed(
                    f"{self._counts.env_errors_in_row} environment errors in a row, last: {error}"
                )
            )

    def _fail_group(self, prompt_group: int) -> None:
        """Drop a group and the tickets of it that were not started."""
        self._buffer.fail_group(prompt_group)
        self._queue = deque(t for t in self._queue if t.prompt_group != prompt_group)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever ends a task by surprise ends the run: nobody may wait for it in vain."""
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(
                RolloutsFailed(str(error)) if isinstance(error, EnvironmentFailed) else error
            )
        self._wake.set()

    # -- failure and wake-up

    def _fail(self, error: BaseException) -> None:
        """Remember the first failure; `next_batch` raises it."""
        if self._failure is None:
            self._failure = error
        self._notify()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _notify(self) -> None:
        self._wake.set()
        self._progress.set()
