"""HTTP bodies of the trainer's control server (rank 0). Called by the orchestrator only.

All routes need the admin bearer token.

| route | body -> answer |
|---|---|
| GET /status?since=<seq>&wait_s=<s> | -> TrainerStatus, at once when `seq` > since, else after wait_s |
| POST /transfer/open | OpenRequest -> OpenReply: listens on port 0, starts to join as rank 0 in a thread; aborts and drops any older generation; generation not above the last one: 409 |
| POST /transfer/join | JoinRequest -> SendReply-less 200 once all ranks are in; 504 at timeout, 500 with the cause |
| POST /transfer/send | SendRequest -> SendReply once all bytes are out; 500 with the cause; 409 foreign generation or a version that is not the published one |
| POST /transfer/abort | protocol.engine_api.AbortRequest -> {} ; frees a blocked sender; idempotent |
| POST /finish | FinishRequest -> {}: the version is in service, the step loop goes on |
| POST /batch | msgpack TrainBatch (protocol.records) -> {} when queued; 409 for any other step than the next; 503 + Retry-After when the queue is full |
| POST /stop | {} -> ends the step loop after the current step, writes a checkpoint, exit 0 |
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from protocol.engine_api import Body

TrainerState = Literal["starting", "publishing", "waiting_batch", "training", "stopping"]


class StepMetrics(Body):
    """Numbers of one finished optimizer step; `values` maps series name to number."""

    step: int = Field(description="0-based; the step turns version `step` into `step + 1`")
    values: dict[str, float]


class TrainerStatus(Body):
    """What the trainer is doing. `published_version` is the version whose weights a send ships."""

    run_id: str
    trainer_boot: str
    seq: int = Field(description="bumps on every change")
    state: TrainerState
    next_step: int = Field(description="step of the batch it wants next")
    published_version: int | None = Field(description="None until the first publish")
    finished_version: int | None = Field(description="last version confirmed by /finish")
    generation: int
    num_bytes: int = Field(description="payload of one full weight transfer")
    recent_steps: list[StepMetrics] = Field(description="up to the last 64 steps")
    error: str | None = None


class OpenRequest(Body):
    """Open a generation. world_size counts the sender."""

    generation: int = Field(ge=1)
    world_size: int = Field(ge=2)
    timeout_s: float = Field(gt=0)


class OpenReply(Body):
    """Where engines find the generation's store."""

    host: str
    port: int


class JoinRequest(Body):
    """Wait until every rank of the generation has joined."""

    generation: int
    timeout_s: float = Field(gt=0)


class SendRequest(Body):
    """Ship the published version to every rank of the generation."""

    generation: int
    version: int
    timeout_s: float = Field(gt=0)


class SendReply(Body):
    """What went over the wire. `digest` equals each receiver's `TransferStatus.digest`."""

    num_bytes: int
    num_buckets: int
    duration_s: float
    digest: str


class FinishRequest(Body):
    """Version `version` is in service on these engines (engine ids)."""

    version: int
    members: list[str]
