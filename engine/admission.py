"""The admission gate of one engine, as a pure state machine.

    boot -> closed --admit(boot id, version, lease)--> open
    open --fence, lease over, weights lost--> closed

Rules:
- An engine boots closed and holds no policy version.
- It opens only for its own boot id and only at the version that it holds; a refused admit changes
  nothing, whatever the gate's state.
- Admitting an open gate renews its lease. A lease that runs out closes the gate: an engine that its
  admin plane has lost must not go on serving.
- Loading another version leaves an open gate open (the admin plane pauses and checks around it);
  losing the weights (a failed load) closes it.
- `now` is any clock that does not go backwards, in seconds; the same one in every call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from protocol.engine_api import Admission

AdmitResult = Literal["ok", "foreign_boot", "wrong_version"]

REASON_BOOTED = "booted"
REASON_ADMITTED = "admitted"
REASON_LEASE_EXPIRED = "lease_expired"
REASON_WEIGHTS_LOST = "weights_lost"


@dataclass(frozen=True, slots=True)
class Gate:
    """One state of the gate. `reason` says why it is open or closed; `weight_version` None means
    that the engine holds no policy version; `lease_until` is None while closed."""

    boot_id: str
    weight_version: int | None = None
    admission: Admission = "closed"
    reason: str = REASON_BOOTED
    lease_until: float | None = None

    @property
    def is_open(self) -> bool:
        """As of the last transition; `expire` first when time has passed."""
        return self.admission == "open"

    def admit(self, now: float, *, boot_id: str, version: int, lease_s: float) -> Admitted:
        """Open the gate for `lease_s` seconds, or renew the lease."""
        state = self.expire(now)
        if boot_id != self.boot_id:
            return Admitted(state, "foreign_boot")
        if state.weight_version is None or version != state.weight_version:
            return Admitted(state, "wrong_version")
        opened = replace(state, admission="open", reason=REASON_ADMITTED, lease_until=now + lease_s)
        return Admitted(opened, "ok")

    def fence(self, reason: str) -> Gate:
        """Close the gate. The first reason stays when it is closed already."""
        if not self.is_open:
            return self
        return replace(self, admission="closed", reason=reason, lease_until=None)

    def expire(self, now: float) -> Gate:
        """Close the gate when its lease is over."""
        if self.lease_until is None or now < self.lease_until:
            return self
        return self.fence(REASON_LEASE_EXPIRED)

    def hold(self, version: int | None) -> Gate:
        """The loaded weights are now policy `version`; None = they belong to no version."""
        state = replace(self, weight_version=version)
        return state.fence(REASON_WEIGHTS_LOST) if version is None else state


class Admitted(NamedTuple):
    """Outcome of `Gate.admit`: the state that follows, and why."""

    gate: Gate
    result: AdmitResult
