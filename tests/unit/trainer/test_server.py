"""The control server's own duties; its routes are tested with a real trainer."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trainer.server import start_server


def test_a_request_that_waits_at_the_end_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    is_asked = threading.Event()

    async def wait_for_ever(request: Request) -> Response:
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/status"
    server = start_server(Starlette(routes=[Route("/status", wait_for_ever)]), sock, token="t")
    answers: list[httpx.Response] = []
    headers = {"Authorization": "Bearer t"}
    asker = threading.Thread(
        target=lambda: answers.append(httpx.get(url, headers=headers, timeout=30.0))
    )
    asker.start()
    assert is_asked.wait(10.0)
    with caplog.at_level(logging.ERROR):
        server.stop()
        asker.join(10.0)
    assert not server.thread.is_alive()
    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (503, {"error": "the trainer is stopping"})
    ]
    assert [record for record in caplog.records if record.exc_info] == []
