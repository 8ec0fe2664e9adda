"""vLLM's own routes that we use, over the fake core: same paths, bodies, answers and statuses.

| route | what of vLLM's it keeps |
|---|---|
| POST /inference/v1/generate | token ids in and out, logprobs, version spans; 400 for bad bodies |
| POST /pause?mode=, POST /resume, GET /is_paused | all modes; `abort` is the default |
| POST /abort_requests | all, or those in `request_ids` |
| GET /v1/models, /health, /metrics | one model; empty 200; the two series that we read |
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engine.fake_config import FakeSettings
from engine.fake_core import Completion, FakeCore, PauseMode, prompt_digest
from engine.fake_gate import wait_for_disconnect
from engine.fake_server import Handler

FIRST_VERSION = "default"  # vLLM's label of weights that nobody gave a version


class SamplingParams(BaseModel):
    """The sampling parameters that the fake obeys; vLLM's others are accepted and ignored."""

    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: int | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    n: int = Field(default=1, ge=1, le=1)


class GenerateRequest(BaseModel):
    """The fields of vLLM's body that the fake obeys; the others are accepted and ignored."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    model: str | None = None
    stream: bool | None = False


class VllmRoutes:
    """Handlers. `phase("generate")` is awaited before a request enters the core and may raise."""

    def __init__(
        self, core: FakeCore, settings: FakeSettings, phase: Callable[[str], Awaitable[None]]
    ) -> None:
        self._core = core
        self._settings = settings
        self._phase = phase

    def table(self) -> dict[tuple[str, str], Handler]:
        """Handlers by method and path."""
        return {
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): self._is_paused,
            ("POST", "/abort_requests"): self._abort_requests,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
        }

    async def _generate(self, request: Request) -> Response:
        try:
            body = GenerateRequest.model_validate_json(await request.body())
        except ValidationError as exc:
            return vllm_error(400, str(exc))
        room = self._settings.max_model_len - len(body.token_ids)
        if room < 1:
            text = f"The prompt has {len(body.token_ids)} tokens, no room is left for a completion"
            return vllm_error(400, text)
        if body.stream:
            return vllm_error(400, "the fake engine does not stream")
        max_tokens = min(body.sampling_params.max_tokens or room, room)
        completion = Completion(
            request_id=body.request_id,
            prompt=prompt_digest(body.token_ids),
            max_tokens=max_tokens,
            stop_ids=frozenset(body.sampling_params.stop_token_ids),
        )
        work = asyncio.ensure_future(self._complete(completion))
        gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response()  # nobody is there to read it
            if (failure := work.exception()) is not None:
                return vllm_error(500, str(failure))
            return JSONResponse(self._answer(completion, body))
        finally:
            work.cancel()
            gone.cancel()

    async def _complete(self, completion: Completion) -> None:
        await self._phase("generate")
        await self._core.generate(completion)

    def _answer(self, completion: Completion, body: GenerateRequest) -> dict[str, Any]:
        num_prompt, num_tokens = len(body.token_ids), len(completion.tokens)
        logprobs = None
        if body.sampling_params.logprobs is not None:
            content = [
                {**one, "top_logprobs": [one]}
                for token in completion.tokens
                for one in [{"token_id": token.token_id, "logprob": token.logprob, "rank": 1}]
            ]
            logprobs = {"content": content}
        choice = {
            "index": 0,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": [token.token_id for token in completion.tokens],
            "routed_experts": None,
            "weight_versions": [
                {"version": _label(version), "start": start, "end": end}
                for version, start, end in completion.spans
            ],
            "logprobs": logprobs,
        }
        return {
            "request_id": completion.request_id,
            "model": body.model or self._settings.model,
            "created": int(time.time()),
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt + num_tokens,
            },
            "output_mode": "tokens",
            "choices": [choice],
        }

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            return vllm_error(400, f"mode: Input should be 'abort', 'wait' or 'keep', got {mode!r}")
        await self._core.pause(mode)  # type: ignore[arg-type]  # checked above
        return JSONResponse({"status": "paused"})

    async def _resume(self, _request: Request) -> Response:
        await self._core.resume()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, _request: Request) -> Response:
        await self._core.answer()
        return JSONResponse({"is_paused": self._core.paused})

    async def _abort_requests(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
        except ValueError:
            return vllm_error(400, "Invalid JSON format")
        if not isinstance(body, dict):
            return vllm_error(400, "Request body must be a JSON object")
        num_aborted = self._core.abort(body.get("request_ids") or None)
        return JSONResponse({"status": "aborted", "aborted": num_aborted})

    async def _models(self, _request: Request) -> Response:
        model = {"id": self._settings.model, "object": "model", "owned_by": "vllm"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, _request: Request) -> Response:
        return Response()

    async def _metrics(self, _request: Request) -> Response:
        label = f'{{model_name="{self._settings.model}"}}'
        return PlainTextResponse(
            f"vllm:num_requests_running{label} {float(self._core.num_running)}\n"
            f"vllm:generation_tokens_total{label} {float(self._core.generated_tokens)}\n"
        )


def vllm_error(status: int, message: str) -> Response:
    """An error in vLLM's shape."""
    kind = {400: "BadRequestError", 500: "InternalServerError"}.get(status, "Error")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status)


def _label(version: int | None) -> str:
    return FIRST_VERSION if version is None else str(version)
