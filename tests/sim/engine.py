"""An engine process: gate, weights, core, transfer state. It does what `engine/` does.

Its core is one queue: pause, commit and resume happen in the order in which they came, however late.
The gate, the version and the transfer state belong to the API server, which answers at once.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Commit,
    Fence,
    Join,
    Pause,
    ReadVersion,
    Resume,
    RouteEntry,
    Stage,
)
from orchestrator.plane.events import OpResult
from protocol.ids import Slot
from tests.sim.server import Call, Server
from tests.sim.transfer import Collective

if TYPE_CHECKING:
    from tests.sim.world import World

_CLOSED = -1.0
_TOKENS_PER_S = 100.0


class Engine(Server):
    """One boot of one slot; a restart makes a new object. `is_torn`: half of the weights are new.
    `meddled_at`: since then somebody else's weights are loaded."""

    def __init__(self, world: World, slot: Slot, url: str, boot_id: str, life: int) -> None:
        super().__init__(world, f"{slot.engine_id}/{boot_id}")
        self.slot = slot
        self.url = url
        self.boot_id = boot_id
        self.life = life
        self.world_size = world.world_sizes[slot]
        self.version: int | None = None
        self.is_loading = False
        self.is_torn = False
        self.is_paused = False
        self.lease_until = _CLOSED
        self.hung_since: float | None = None
        self.stalled_since: float | None = None
        self.meddled_at: float | None = None
        self.num_partial_writes = 0
        self.is_unkillable = False
        self.generation = 0
        self.state = "idle"
        self.staged: int | None = None
        self._collective: Collective | None = None
        self._waiting: list[Call] = []
        self._core_free_at = 0.0
        self._backlog: list[Callable[[], None]] = []
        self._late_renewals: list[RouteEntry] = []

    # -- what is true

    def serves(self) -> bool:
        """Whether a request that comes now would get tokens."""
        return (
            self.lease_until > self.world.loop.now
            and not self.is_paused
            and self.is_alive
            and not self.is_frozen
            and self.hung_since is None
        )

    def core_age_s(self, now: float) -> float:
        """Seconds since the core answered."""
        return 0.0 if self.hung_since is None else now - self.hung_since

    def num_tokens(self, now: float) -> int:
        """Tokens since boot; it stands still while nothing is made."""
        since = self.stalled_since if self.stalled_since is not None else self.hung_since
        return int((now if since is None else since) * _TOKENS_PER_S)

    def num_running(self) -> int:
        """Requests in the core."""
        return int(self.lease_until > self.world.loop.now)

    # -- faults

    def hang(self) -> None:
        """The core stops, the API server answers on."""
        self.hung_since = self.world.loop.now

    def unhang(self) -> None:
        """The core goes on."""
        self.hung_since = None
        self.thawed()

    def meddle(self, version: int) -> None:
        """Somebody loads other weights by hand."""
        self.version = version
        self.meddled_at = self.world.loop.now

    # -- gate, version, core

    def handle(self, call: Call) -> None:
        """Carry it out."""
        _HANDLERS[type(call.op)](self, call)
        self.world.checks.touch(self)

    def renew(self, entry: RouteEntry) -> bool:
        """A lease renewal arrives; False when it is refused."""
        if self.is_frozen:
            self._late_renewals.append(entry)
        elif (entry.boot_id, entry.version) != (self.boot_id, self.version):
            return False
        else:
            self.lease_until = self.world.loop.now + self.world.timing["lease_s"]
            self.world.checks.touch(self)
        return True

    def _admit(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Admit)
        if op.boot_id != self.boot_id:
            self.answer(call, "failed", error=f"boot id is {self.boot_id}, not {op.boot_id}")
        elif op.version != self.version:
            self.answer(call, "failed", error=f"weight version is {self.version}")
        else:
            self.lease_until = self.world.loop.now + self.world.timing["lease_s"]
            self.answer(call, "succeeded")

    def _fence(self, call: Call) -> None:
        self.lease_until = _CLOSED
        self._in_core(0.0, lambda: self.answer(call, "succeeded"))

    def _read_version(self, call: Call) -> None:
        self.answer(call, "succeeded", OpResult(version=self.version, boot_id=self.boot_id))

    def _pause(self, call: Call) -> None:
        self._in_core(0.01, lambda: self._set_paused(call, True))

    def _resume(self, call: Call) -> None:
        self._in_core(0.0, lambda: self._set_paused(call, False))

    def _set_paused(self, call: Call, is_paused: bool) -> None:
        self.is_paused = is_paused
        if is_paused and call.is_done:
            self.world.checks.paused_late(self)
        self.answer(call, "succeeded")
        self.world.checks.touch(self)

    def _commit(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Commit)
        if op.generation != self.generation or self.is_loading:
            self.answer(call, "failed", error=f"generation is {self.generation}")
        elif self.state != "staged" or self.staged != op.version:
            self.answer(call, "failed", error=f"staged is {self.staged}, {self.state}")
        else:
            self.is_loading = True
            seconds = self.world.timing["commit_s"] * self.world.noise.uniform(0.5, 1.5)
            self._in_core(seconds, lambda: self._loaded(call, op.version))

    def _loaded(self, call: Call, version: int) -> None:
        self.is_loading = False
        if self.num_partial_writes:
            self.num_partial_writes -= 1
            self.version, self.is_torn, self.lease_until = None, True, _CLOSED
            self.answer(call, "failed", error="half of the weights are loaded")
        else:
            self.version, self.is_torn, self.meddled_at = version, False, None
            if self.state == "staged" and self.staged == version:
                self.state, self.staged = "joined", None
            self.answer(call, "succeeded")
        self.world.checks.touch(self)

    # -- transfer

    def _join(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Join)
        if op.generation <= self.generation:
            self.answer(call, "failed", error=f"the last generation is {self.generation}")
            return
        self._drop("a new generation begins")
        self.generation, self.state = op.generation, "joining"
        self._wait(call)
        collective = self.world.trainer.collective_at(op.port)
        if collective is None:
            self.transfer_failed("nobody listens there")
        else:
            self._collective = collective
            collective.enter(self, op.rank_offset, self.world_size, op.world_size)

    def _stage(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, Stage)
        if op.generation != self.generation or self.state not in ("joined", "staged"):
            error = f"generation is {self.generation}, {self.state}"
            self.answer(call, "failed", error=error)
            return
        assert self._collective is not None
        self.staged, self.state = None, "receiving"
        self._wait(call)
        self._collective.start(self, op.version)

    def _abort(self, call: Call) -> None:
        op = call.op
        assert isinstance(op, AbortGeneration)
        if op.generation != self.generation:
            self.answer(call, "failed", error=f"generation is {self.generation}")
            return
        if self.state not in ("idle", "failed", "aborted"):
            self._drop("aborted")
            self.state = "aborted"
        self.answer(call, "succeeded")

    def _drop(self, reason: str) -> None:
        """Leave the generation, forget what is staged, free whoever waits."""
        collective, self._collective = self._collective, None
        self.staged = None
        if collective is not None:
            collective.leave(f"{self.name}: {reason}")
        self._answer_waiting("failed", f"transfer is over: {reason}")

    def _wait(self, call: Call) -> None:
        self._waiting.append(call)
        self.world.loop.at(call.wait_until, self._not_in_time, call)

    def _not_in_time(self, call: Call) -> None:
        if call in self._waiting:
            self._waiting.remove(call)
            self.answer(call, "failed", error=f"transfer is {self.state}: not in time")

    def _answer_waiting(self, outcome: str, error: str = "") -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.answer(call, outcome, error=error)

    def joined(self) -> None:
        """All ranks are in."""
        self.state = "joined"
        self._answer_waiting("succeeded")

    def received(self, version: int) -> None:
        """All bytes are here."""
        self.state, self.staged = "staged", version
        self._answer_waiting("succeeded")

    def transfer_failed(self, reason: str) -> None:
        """The collective broke. Who does nothing with it now notices later."""
        if self.state in ("joining", "receiving"):
            self._collective, self.staged, self.state = None, None, "failed"
            self._answer_waiting("failed", f"transfer is failed: {reason}")

    # -- core

    def _in_core(self, seconds: float, action: Callable[[], None]) -> None:
        self._core_free_at = max(self.world.loop.now, self._core_free_at) + seconds
        if self._core_free_at <= self.world.loop.now:
            self._run(action)
        else:
            self.world.loop.at(self._core_free_at, self._run, action)

    def _run(self, action: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_frozen or self.hung_since is not None or self._backlog:
            self._backlog.append(action)
        else:
            action()

    def thawed(self) -> None:
        """What the core had before it goes on."""
        if self.is_frozen:
            return
        renewals, self._late_renewals = self._late_renewals, []
        for entry in renewals:
            self.renew(entry)
        if self.hung_since is None:
            backlog, self._backlog = self._backlog, []
            for action in backlog:
                self._run(action)
        self.world.checks.touch(self)

    def died(self) -> None:
        """The end of the process breaks its collective."""
        self._waiting.clear()
        collective, self._collective = self._collective, None
        if collective is not None:
            collective.leave(f"{self.name} died")


_HANDLERS: dict[type[Any], Callable[[Engine, Call], None]] = {
    AbortGeneration: Engine._abort,
    Admit: Engine._admit,
    Commit: Engine._commit,
    Fence: Engine._fence,
    Join: Engine._join,
    Pause: Engine._pause,
    ReadVersion: Engine._read_version,
    Resume: Engine._resume,
    Stage: Engine._stage,
}
