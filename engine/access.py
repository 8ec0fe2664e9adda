"""Who may call which route of an engine. The whole policy is the table below.

| access | needs | while the gate is closed |
|---|---|---|
| public | nothing | reachable: liveness, readiness, metrics |
| info | the API key when one is configured | reachable: answers do not depend on the weights |
| data | the API key when one is configured | 503: everything that generates |
| admin | the admin bearer token | reachable |
| forbidden | refused to everybody, 403 | would change weights or version behind the gate's back |

A route that is not in the table is an admin route: what a later vLLM adds is closed until somebody
decides. The admin token also opens data and info routes, but never a closed gate.
"""

from __future__ import annotations

from typing import Literal

Access = Literal["public", "info", "data", "admin", "forbidden"]

_TABLE: dict[Access, tuple[str, ...]] = {
    "public": (
        "GET /ready",
        "GET /liveness",
        "GET /health",
        "GET /ping",
        "GET /version",
        "GET /metrics",
        "GET /load",
    ),
    "info": (
        "GET /v1/models",
        "POST /tokenize",
        "POST /detokenize",
        "POST /v1/messages/count_tokens",
        "POST /v1/completions/render",
        "POST /v1/chat/completions/render",
        "POST /v1/completions/derender",
        "POST /v1/chat/completions/derender",
        "POST /v1/messages/render",
        "POST /v1/responses/render",
    ),
    "data": (
        "POST /inference/v1/generate",
        "POST /generate",
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/chat/completions/batch",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /v1/embeddings",
        "POST /v2/embed",
        "POST /pooling",
        "POST /classify",
        "POST /score",
        "POST /v1/score",
        "POST /rerank",
        "POST /v1/rerank",
        "POST /v2/rerank",
        "POST /generative_scoring",
        "POST /v1/systemone",
        "POST /invocations",
    ),
    "admin": (
        "GET /identity",
        "GET /weight_version",
        "GET /is_paused",
        "POST /admit",
        "POST /fence",
        "POST /pause",
        "POST /resume",
        "POST /abort_requests",
        "POST /init_weight_transfer_engine",
        "POST /start_weight_update",
        "POST /update_weights",
        "POST /await_weight_transfer",
        "POST /finish_weight_update",
        "POST /abort_weight_transfer",
        "POST /shutdown_weight_transfer_engine",
    ),
    "forbidden": (
        "POST /collective_rpc",
        "POST /update_weight_version",
        "POST /start_draft_weight_update",
        "POST /weight_checker",  # its `reset` action fills the weights with noise
        "POST /sleep",
        "POST /wake_up",
        "POST /scale_elastic_ep",
    ),
}

_BY_ROUTE: dict[str, Access] = {
    route: access for access, routes in _TABLE.items() for route in routes
}


def access_of(method: str, path: str) -> Access:
    """Access of a request line; `path` is the decoded path without the query."""
    return _BY_ROUTE.get(f"{'GET' if method == 'HEAD' else method} {path}", "admin")
