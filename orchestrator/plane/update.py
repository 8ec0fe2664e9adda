"""One update at a time: a policy version on its way to all groups in service. Pure.

    open -> join -> stage -> pause -> commit -> verify -> admit -> resume -> finish
      \\______\\______\\-> abort -> open (generation + 1, what is left of the targets)

Rules:
- open and join are skipped when the live generation has exactly the targets' boots.
- Until every byte is staged nothing has changed in any engine: a failure aborts the generation on
  both sides and the same version is sent again to the rest. Who cannot answer the abort is evicted.
- From the pause on, a failure evicts the member's group; it stays paused and fenced. The rest goes
  on. Nobody is resumed after a failed or unknown commit.
- The targets are computed anew after each phase: a sibling of an evicted member takes no part.
- Groups are admitted, and the policy version moves, before anyone makes a token with it.
- A collective is never repeated in the same generation.

After a restart of the orchestrator nothing of an update in flight is assumed. Up to the pause all
groups hold the version that they served; from the verification on, all that are left have loaded
the next one, each known to have succeeded. Either way they return by an update of that version that
begins with the verification. A commit without an outcome may still happen: whoever was told to
commit is fenced, and comes back by a whole update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.plane.commands import (
    AbortGeneration,
    Admit,
    Commit,
    EvictReason,
    Fence,
    Finish,
    Join,
    Op,
    Open,
    Pause,
    ReadVersion,
    Resume,
    Send,
    Stage,
    UpdateEnded,
)
from orchestrator.plane.events import BroadcastReady, OpFailed, OpResult, OpSucceeded, OpUnknown
from orchestrator.plane.fleet import Fleet
from orchestrator.plane.state import Generation, Group, Member, Phase, Update, members_of
from protocol.ids import Slot

Completion = OpSucceeded | OpFailed | OpUnknown
_BEFORE_COMMIT: tuple[Phase, ...] = ("open", "join", "stage", "abort")
_BREAKS_GENERATION: tuple[Phase, ...] = ("open", "join", "stage")
# A failed transfer may be the fault of any member; the second time in a row it is believed.
_ACCUSATIONS = 2


class Updates:
    """The update under way, the live generation, the policy version."""

    def __init__(self, fleet: Fleet, now: float) -> None:
        self.fleet = fleet
        self.update: Update | None = None
        self.generation = Generation(0, (), "", is_dead=True)
        self.policy_version: int | None = None
        self.ready_version: int | None = None
        self.trainer_boot = ""
        # What the trainer has published is not known before it was heard, by this process.
        self.is_trainer_known = False
        self.num_failures = 0
        self.retry_at = now
        self.first_candidate_at: float | None = None

    # -- events ---------------------------------------------------------------------------------

    def broadcast_ready(self, now: float, event: BroadcastReady) -> None:
        """The trainer published a version, or is a new trainer."""
        self.is_trainer_known = True
        is_other = event.trainer_boot != self.trainer_boot
        if is_other:
            self.trainer_boot = event.trainer_boot
            self.ready_version = None  # the former trainer's
            self._kill_generation()
            if self.update is not None and self.update.phase in _BEFORE_COMMIT:
                self._end(now, "failed", "the trainer restarted")
        finished, update = self.policy_version, self.update
        # A trainer that begins with the version in service waits for its confirmation as well.
        is_again = is_other and event.version == finished
        is_again = is_again and (update is None or update.version != finished)
        if finished is None or event.version > finished or is_again:
            self.ready_version = event.version
            self.retry_at = now

    def completed(self, now: float, event: Completion) -> None:
        """A command of the update ended. Commands that nobody waits for any more are ignored."""
        update = self.update
        if update is None:
            return
        if event.op_id in update.sends and isinstance(event, OpUnknown):
            update.suspect = None  # the trainer never began, or is gone: no engine's fault
            update.accused.clear()
        if event.op_id not in update.pending:
            return
        slot = update.pending.pop(event.op_id)
        if isinstance(event, OpSucceeded):
            self._succeeded(now, update, slot, event.result)
            return
        who = "trainer" if slot is None else slot.engine_id
        text = f"{update.phase} on {who}: {event.error}"
        is_unknown = isinstance(event, OpUnknown)
        if update.phase == "finish":
            update.retry_finish_at = now + self.fleet.settings.retry_wait_s
        elif update.phase == "abort":
            self._not_aborted(now, update, slot, text, is_unknown)
        elif slot is None:
            self._abort(now, update, text)
        elif update.phase in ("join", "stage") and not is_unknown:
            update.suspect = (slot.group, text)
            self._abort(now, update, text)
        else:
            self._evict(now, slot, "op_unknown" if is_unknown else "op_failed", text)

    def restarted(self, now: float) -> None:
        """End what was in flight, on both sides; what was sent or published is asked for anew."""
        update = self.update
        if update is not None:
            is_in_service = update.phase in ("resume", "finish")
            if update.phase in ("pause", "commit"):
                self._kill_generation()
                self._abort_everyone(now, update)
            cause = f"the orchestrator restarted in {update.phase}"
            self._end(now, "finished" if is_in_service else "failed", cause)
        self.ready_version = None
        self.is_trainer_known = False
        self.num_failures = 0
        self.retry_at = now
        self.first_candidate_at = None

    def reconcile(self, now: float) -> None:
        """Drop targets that left service, move on when a phase is complete, start what is due."""
        while self._advance(now):
            continue

    def next_deadline(self) -> list[float]:
        """When `reconcile` has something to do."""
        deadlines: list[float] = []
        if self.update is not None:
            deadlines += [self.update.transfer_deadline, self.update.deadline]
            if self.update.retry_finish_at is not None:
                deadlines.append(self.update.retry_finish_at)
        elif self._due_version() is not None:
            deadlines.append(self.retry_at)
            if self.policy_version is None and self.first_candidate_at is not None:
                deadlines.append(self.first_candidate_at + self.fleet.settings.startup_wait_s)
        return deadlines

    # -- the machine ----------------------------------------------------------------------------

    def _advance(self, now: float) -> bool:
        update = self.update
        if update is None:
            return self._maybe_start(now)
        groups = self.fleet.groups
        lost = [n for n in update.targets if groups[n].state not in ("candidate", "admitted")]
        if lost:
            self._drop(now, update, lost)
        elif update.retry_finish_at is not None and now >= update.retry_finish_at:
            update.retry_finish_at = None
            self._finish(now, update)
        elif now >= update.transfer_deadline and update.phase in _BEFORE_COMMIT:
            self._end(now, "failed", f"update timed out in {update.phase}; {update.cause}")
        elif now >= update.deadline and update.phase == "finish":
            self._end(now, "finished", "the trainer did not take the confirmation")
        elif not update.pending and update.retry_finish_at is None:
            self._next_phase(now, update)
        else:
            return False
        return True

    def _maybe_start(self, now: float) -> bool:
        if self._maybe_return(now):
            return True
        version = self._due_version()
        targets = self.fleet.in_service()
        if targets and self.first_candidate_at is None:
            self.first_candidate_at = now
        if version is None or now < self.retry_at or not targets or not self._is_due(now):
            return False
        update = self._new(now, version, targets)
        self._enter(now, update, "stage") if self._is_live(targets) else self._open(now, update)
        return True

    def _maybe_return(self, now: float) -> bool:
        """Groups that answered after a restart as what they were go back to service."""
        groups = [g for g in self.fleet.in_service() if g.kept is not None]
        if not groups:
            return False
        version = groups[0].kept
        assert version is not None
        update = self._new(now, version, [group for group in groups if group.kept == version])
        update.is_return = True
        self._enter(now, update, "verify")
        return True

    def _new(self, now: float, version: int, targets: list[Group]) -> Update:
        settings = self.fleet.settings
        timeout_s = settings.update_timeout_s
        # pause, commit, verify, admit and resume must never be cut short by a slow transfer: that
        # would evict a fleet that did nothing wrong.
        swap_s = 2 * (settings.pause_timeout_s + settings.admin_timeout_s)
        swap_s = min(swap_s + settings.commit_timeout_s, timeout_s / 2)
        self.update = update = Update(
            version=version,
            targets=[group.number for group in targets],
            started=now,
            deadline=now + timeout_s,
            transfer_deadline=now + timeout_s - swap_s,
            phase_started=now,
        )
        return update

    def _due_version(self) -> int | None:
        """What to send next. Between updates the current version goes out again only when too few
        groups serve: the trainer waits for rollouts then, and would never publish another."""
        if self.ready_version is not None:
            return self.ready_version
        fleet = self.fleet
        is_short = len(fleet.admitted()) < fleet.settings.min_serving_groups
        if is_short and any(group.state == "candidate" for group in fleet.groups.values()):
            return self.policy_version
        return None

    def _is_due(self, now: float) -> bool:
        """The first update waits a little, so that the fleet starts as one. After a restart of the
        orchestrator every update waits for the groups that may return (their time is short), and
        for the trainer."""
        groups = self.fleet.groups.values()
        if not self.is_trainer_known or any(group.awaited for group in groups):
            return False
        if self.policy_version is not None or self.first_candidate_at is None:
            return True
        fleet = self.fleet
        if all(group.state != "starting" for group in groups):
            return True
        waited = now >= self.first_candidate_at + fleet.settings.startup_wait_s
        return waited and len(fleet.in_service()) >= fleet.settings.min_serving_groups

    def _is_live(self, groups: list[Group]) -> bool:
        generation = self.generation
        members = tuple((m.slot, m.boot_id) for m in members_of(groups))
        is_same = generation.members == members and generation.trainer_boot == self.trainer_boot
        return is_same and not generation.is_dead

    def _targets(self, update: Update) -> list[Group]:
        return [self.fleet.groups[number] for number in update.targets]

    def _drop(self, now: float, update: Update, lost: list[int]) -> None:
        update.targets = [number for number in update.targets if number not in lost]
        kept = {
            op_id: slot
            for op_id, slot in update.pending.items()
            if slot is None or slot.group not in lost
        }
        update.pending = kept
        self._kill_generation()
        causes = [f"g{number} left ({self.fleet.groups[number].reason})" for number in lost]
        if not update.targets and update.phase != "finish":
            self._end(now, "failed", "; ".join([*causes, "no group is left"]))
        elif update.phase in _BREAKS_GENERATION:
            self._abort(now, update, "; ".join(causes))

    def _kill_generation(self) -> None:
        self.generation = replace(self.generation, is_dead=True)

    def _open(self, now: float, update: Update) -> None:
        targets = self._targets(update)
        self.generation = Generation(
            self.generation.number + 1,
            tuple((m.slot, m.boot_id) for m in members_of(targets)),
            self.trainer_boot,
        )
        self._enter(now, update, "open")

    def _next_phase(self, now: float, update: Update) -> None:
        following: dict[Phase, Phase] = {
            "open": "join",
            "join": "stage",
            "stage": "pause",
            "pause": "commit",
            "commit": "verify",
            "verify": "admit",
            "resume": "finish",
        }
        if update.phase == "abort":
            self._regroup(now, update)
        elif update.phase == "finish":
            self._end(now, "finished", "returned without a reload" if update.is_return else "")
        elif update.phase == "admit":
            self._put_in_service(now, update)
            self._enter(now, update, "resume")
        else:
            self._enter(now, update, following[update.phase])

    def _regroup(self, now: float, update: Update) -> None:
        suspect, update.suspect = update.suspect, None
        if suspect is not None and self._accuse(now, update, *suspect):
            return  # it leaves the targets first
        update.num_regroups += 1
        if update.num_regroups > self.fleet.settings.max_regroups:
            self._end(now, "failed", f"{update.num_regroups - 1} regroups; last: {update.cause}")
        else:
            self._open(now, update)

    def _put_in_service(self, now: float, update: Update) -> None:
        for group in self._targets(update):
            self.fleet.admit(now, group, update.version)
        self.policy_version = update.version
        if self.ready_version is not None and self.ready_version <= update.version:
            self.ready_version = None
        # Whoever serves an older version by now took no part, and is not in service any more.
        self.fleet.route(f"v{update.version} is in service")

    def _enter(self, now: float, update: Update, phase: Phase) -> None:
        spent = now - update.phase_started
        update.phase_s[update.phase] = update.phase_s.get(update.phase, 0.0) + spent
        update.phase = phase
        update.phase_started = now
        update.pending = {}
        self.fleet.phase = phase
        if phase == "finish":
            for group in self._targets(update):
                group.resumed_at = now
            self._finish(now, update)
        else:
            self._commands(now, update)

    def _commands(self, now: float, update: Update) -> None:
        settings = self.fleet.settings
        number, version = self.generation.number, update.version
        reason = f"update v{version}"

        is_transfer = update.phase in _BEFORE_COMMIT
        limit = update.transfer_deadline if is_transfer else update.deadline

        def op(timeout_s: float) -> tuple[int, float, str]:
            return self.fleet.next_op_id(), min(now + timeout_s, limit), reason

        members = members_of(self._targets(update))
        world_size = 1 + sum(member.world_size for member in members)
        if update.phase == "open":
            # Rank 0 waits from now on for engines that are asked to join after its answer.
            join_s = settings.admin_timeout_s + settings.join_timeout_s
            self._issue(None, Open(*op(settings.admin_timeout_s), number, world_size, join_s))
        elif update.phase == "join":
            self._join(update, members, world_size, lambda: op(settings.join_timeout_s))
        elif update.phase == "stage":
            self._issue(None, Send(*op(settings.stage_timeout_s), number, version))
            update.sends.append(self.fleet.last_op_id)
        elif update.phase == "abort":
            self._issue(None, AbortGeneration(*op(settings.admin_timeout_s), None, number))
        for member in members:
            slot = member.slot
            if update.phase == "stage":
                self._issue(slot, Stage(*op(settings.stage_timeout_s), slot, number, version))
            elif update.phase == "abort":
                self._issue(slot, AbortGeneration(*op(settings.admin_timeout_s), slot, number))
            elif update.phase == "pause":
                self._issue(slot, Pause(*op(settings.pause_timeout_s), slot))
                if not self.fleet.groups[slot.group].is_routed and self.policy_version is not None:
                    # Nobody waited for the fence of its eviction: its gate may still be open.
                    self._issue(slot, Fence(*op(settings.admin_timeout_s), slot))
            elif update.phase == "commit":
                self._issue(slot, Commit(*op(settings.commit_timeout_s), slot, number, version))
            elif update.phase == "verify":
                self._issue(slot, ReadVersion(*op(settings.admin_timeout_s), slot))
            elif update.phase == "admit" and not self.fleet.groups[slot.group].is_routed:
                boot_id = member.boot_id
                self._issue(slot, Admit(*op(settings.admin_timeout_s), slot, boot_id, version))
            elif update.phase == "resume":
                self._issue(slot, Resume(*op(settings.pause_timeout_s), slot))

    def _join(
        self,
        update: Update,
        members: list[Member],
        world_size: int,
        op: Callable[[], tuple[int, float, str]],
    ) -> None:
        """Ranks are laid out by group, by index, each as wide as the engine says it is."""
        number, host, port = self.generation.number, update.host, update.port
        self._issue(None, Join(*op(), None, number, host, port, 0, world_size))
        rank = 1
        for member in members:
            slot = member.slot
            self._issue(slot, Join(*op(), slot, number, host, port, rank, world_size))
            rank += member.world_size

    def _issue(self, slot: Slot | None, command: Op) -> None:
        assert self.update is not None
        self.update.pending[command.op_id] = slot
        self.fleet.out.append(command)  # type: ignore[arg-type]

    def _finish(self, now: float, update: Update) -> None:
        members = tuple(m.slot.engine_id for m in members_of(self._targets(update)))
        deadline = now + self.fleet.settings.admin_timeout_s
        reason = f"update v{update.version}"
        command = Finish(self.fleet.next_op_id(), deadline, reason, update.version, members)
        self._issue(None, command)

    # -- outcomes -------------------------------------------------------------------------------

    def _succeeded(self, now: float, update: Update, slot: Slot | None, result: OpResult) -> None:
        if update.phase == "open":
            update.host, update.port = result.host, result.port
        elif update.phase == "stage" and slot is None:
            update.num_bytes = result.num_bytes
        elif update.phase == "verify" and slot is not None:
            boot_id = self.fleet.member(slot).boot_id
            if result.boot_id != boot_id:
                detail = f"{slot.engine_id} boot {boot_id} answered as {result.boot_id}"
                self._evict(now, slot, "boot_changed", detail)
            elif result.version != update.version:
                says = "no version" if result.version is None else f"v{result.version}"
                detail = f"{slot.engine_id} reports {says} after the commit of v{update.version}"
                self._evict(now, slot, "version_mismatch", detail)

    def _evict(self, now: float, slot: Slot, reason: EvictReason, detail: str) -> None:
        group = self.fleet.groups[slot.group]
        if group.state in ("candidate", "admitted"):
            self.fleet.evict(now, group, reason, detail)

    def _not_aborted(
        self, now: float, update: Update, slot: Slot | None, text: str, is_unknown: bool
    ) -> None:
        """Who is silent has broken the transfer, and not who reported it. An engine that refuses an
        abort answers, and has nothing to abort: it may never have joined."""
        if slot is None or is_unknown:
            update.suspect = None
        if slot is not None and is_unknown:
            self._evict(now, slot, "op_unknown", text)

    def _accuse(self, now: float, update: Update, number: int, text: str) -> bool:
        """Evict a group that reports failed transfers again while most others do not."""
        update.accused[number] = update.accused.get(number, 0) + 1
        is_minority = 2 * len(update.accused) <= len(update.targets)
        is_guilty = update.accused[number] >= _ACCUSATIONS and is_minority
        if is_guilty:
            self.fleet.evict(now, self.fleet.groups[number], "op_failed", text)
        return is_guilty

    def _abort(self, now: float, update: Update, cause: str) -> None:
        update.cause = cause
        self._kill_generation()
        groups = self.fleet.groups
        in_service = ("candidate", "admitted")
        update.targets = [n for n in update.targets if groups[n].state in in_service]
        if update.targets:
            self._enter(now, update, "abort")
        else:
            self._end(now, "failed", f"{cause}; no group is left")

    def _end(self, now: float, outcome: str, reason: str) -> None:
        update = self.update
        assert update is not None
        spent = now - update.phase_started
        update.phase_s[update.phase] = update.phase_s.get(update.phase, 0.0) + spent
        self.update = None
        self.fleet.phase = None
        settings = self.fleet.settings
        is_finished = outcome == "finished"
        if not is_finished:
            self.num_failures += 1
            if update.phase in (*_BREAKS_GENERATION, "abort"):
                self._kill_generation()
                self._abort_everyone(now, update)
        wait_s = settings.retry_wait_s * 2.0 ** min(self.num_failures, 16)
        self.retry_at = now if is_finished else now + min(wait_s, settings.retry_wait_max_s)
        if is_finished:
            self.num_failures = 0
        self.fleet.out.append(
            UpdateEnded(
                version=update.version,
                generation=self.generation.number,
                outcome="finished" if is_finished else "failed",
                members=tuple(m.slot.engine_id for m in members_of(self._targets(update))),
                num_regroups=update.num_regroups,
                phase_s=tuple(update.phase_s.items()),
                num_bytes=update.num_bytes,
                reason=reason,
            )
        )

    def _abort_everyone(self, now: float, update: Update) -> None:
        """A failed update leaves nobody in a collective; nobody waits for the answers."""
        deadline = now + self.fleet.settings.admin_timeout_s
        number = self.generation.number
        slots = [None, *(member.slot for member in members_of(self._targets(update)))]
        for slot in slots:
            op_id = self.fleet.next_op_id()
            reason = f"update v{update.version} failed"
            self.fleet.out.append(AbortGeneration(op_id, deadline, reason, slot, number))
