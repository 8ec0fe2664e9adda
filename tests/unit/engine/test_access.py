from __future__ import annotations

import pytest

from engine.access import access_of


@pytest.mark.parametrize(
    ("method", "path", "access"),
    [
        ("GET", "/ready", "public"),
        ("HEAD", "/ready", "public"),
        ("GET", "/metrics", "public"),
        ("GET", "/v1/models", "info"),
        ("POST", "/tokenize", "info"),
        ("POST", "/inference/v1/generate", "data"),
        ("POST", "/v1/chat/completions", "data"),
        ("GET", "/identity", "admin"),
        ("POST", "/admit", "admin"),
        ("POST", "/pause", "admin"),
        ("POST", "/update_weights", "admin"),
        ("POST", "/collective_rpc", "forbidden"),
        ("POST", "/update_weight_version", "forbidden"),
    ],
)
def test_table(method: str, path: str, access: str) -> None:
    assert access_of(method, path) == access


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/something_new"),
        ("POST", "/ready"),
        ("GET", "/inference/v1/generate"),
        ("POST", "/inference/v1/generate/"),
        ("POST", "//inference/v1/generate"),
        ("POST", "/Inference/v1/generate"),
        ("DELETE", "/v1/models"),
        ("POST", "/inference/v1/abort_requests"),
        ("POST", ""),
    ],
)
def test_unknown_needs_the_admin_token(method: str, path: str) -> None:
    assert access_of(method, path) == "admin"
