"""HTTP bodies of an engine's admin routes.

Who calls: the orchestrator's engine driver. Who answers: `muster engine` (vLLM with our plugins)
and the fake engine; one contract test holds both to this file. All admin routes need
`Authorization: Bearer <admin token>`; without it the answer is 401 and nothing changes.

| route | body -> answer |
|---|---|
| GET /identity | -> Identity; never blocks on the engine core |
| GET /weight_version | -> WeightVersion |
| GET /ready (no token) | 200, or 503 with a reason; 200 only while admission is open |
| GET /liveness (no token) | 200, or 503 when the core has not answered for too long |
| POST /admit | AdmitRequest -> Identity; foreign boot id or other weight version: 409 |
| POST /fence | FenceRequest -> Identity; closes admission (idempotent) |
| POST /abort_requests | {} ends every request in flight |
| POST /pause?mode=keep, POST /resume, GET /is_paused | vLLM's own |
| POST /init_weight_transfer_engine | {"init_info": InitInfo, "wait_s": 0} -> TransferStatus; the join runs beside the core (after a commit that is under way), the answer waits for it up to `wait_s`; generation not above the last one: 409 |
| POST /start_weight_update | {} |
| POST /update_weights | {"update_info": UpdateInfo, "wait_s": 0} -> TransferStatus; starts to receive, the answer waits up to `wait_s` for `staged`; foreign generation: 409 |
| POST /await_weight_transfer | AwaitRequest -> TransferStatus once `stage` is reached, failed, or `timeout_s` is over (still 200: look at `state`); foreign generation: 409 |
| POST /finish_weight_update | {"weight_version": "<int>", "generation": int}; loads what was staged; 409 for a foreign generation or another version than the staged one |
| POST /abort_weight_transfer | AbortRequest -> TransferStatus; frees a blocked receiver, drops staged bytes; a foreign generation: 409; idempotent |
| POST /shutdown_weight_transfer_engine | {} |

Data routes (everything else that generates) need the API key when one is configured, and answer
503 with `Retry-After` while admission is closed. Their answers carry X-Engine-Id, X-Boot-Id and
X-Weight-Version.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Admission = Literal["closed", "open"]
TransferState = Literal["idle", "joining", "joined", "receiving", "staged", "failed", "aborted"]


class Body(BaseModel):
    """Base of all HTTP bodies: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Identity(Body):
    """What an engine says it is. `weight_version` None means: holds no policy version."""

    run_id: str
    group: int
    index: int
    life: int = Field(description="incarnation of the group's step; 0 is the first")
    boot_id: str
    world_size: int = Field(ge=1, description="ranks that take part in a transfer (TP x PP x DP)")
    weight_version: int | None
    admission: Admission
    admission_reason: str
    paused: bool
    core_age_s: float = Field(ge=0, description="seconds since the engine core last answered")
    generation: int = Field(description="generation joined or joining; 0 = none yet")
    transfer_state: TransferState
    staged_version: int | None
    running_requests: int
    generated_tokens: int = Field(
        description="counter since boot; stands still in a stalled engine"
    )
    started_at: float = Field(description="unix seconds")
    fault_tolerance: bool


class WeightVersion(Body):
    """Policy version that the loaded weights belong to; None = unknown, equal to nothing."""

    version: int | None
    boot_id: str


class AdmitRequest(Body):
    """Open the gate, or renew the lease of an open one."""

    boot_id: str
    version: int
    lease_s: float = Field(gt=0)


class FenceRequest(Body):
    """Close the gate."""

    reason: str


class InitInfo(Body):
    """Where and as whom to join a generation. An engine takes ranks
    `rank_offset .. rank_offset + its world_size - 1`; the trainer's sender is rank 0."""

    host: str
    port: int
    generation: int = Field(ge=1)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2, description="of the whole generation, sender included")
    timeout_s: float = Field(gt=0)


class UpdateInfo(Body):
    """Receive policy version `version` over generation `generation` into staging buffers."""

    generation: int
    version: int = Field(ge=0)
    timeout_s: float = Field(gt=0)


class AwaitRequest(Body):
    """Long poll for a stage of the transfer."""

    generation: int
    stage: Literal["joined", "staged"]
    timeout_s: float = Field(ge=0)


class AbortRequest(Body):
    """Abort a generation (both sides get one)."""

    generation: int
    reason: str = ""


class TransferStatus(Body):
    """State of an engine's receiver. With several ranks: the least advanced one."""

    generation: int
    state: TransferState
    staged_version: int | None = None
    error: str | None = None
    num_bytes: int = 0
    digest: str | None = Field(default=None, description="of the received bytes, all buckets")


class ErrorBody(Body):
    """Every non-2xx answer of our own routes."""

    error: str
