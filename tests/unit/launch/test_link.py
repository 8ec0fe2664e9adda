"""The launcher's link: what is posted, what is obeyed, what the user hears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from launch.link import OrchestratorLink
from protocol.launcher_api import GroupsView, LauncherReply, RelaunchWish

_VIEW = GroupsView(run_id="r", groups=[])
_WISH = LauncherReply(relaunch=[RelaunchWish(group=1, life=2, reason="engine_stalled")])


class _Bench:
    """A link against a scripted orchestrator; each answer is given once, the last one for ever."""

    def __init__(self, *answers: Callable[[], httpx.Response]) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.replies: list[LauncherReply] = []
        self.said: list[str] = []

    def run(self, num_posts: int) -> None:
        """Run the link until it has posted `num_posts` times."""
        asyncio.run(self._run(num_posts))

    async def _run(self, num_posts: int) -> None:
        done = asyncio.Event()

        def answer(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            asyncio.get_running_loop().call_soon(link.changed)
            if len(self.requests) == num_posts:
                done.set()
            script = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return script()

        link = OrchestratorLink(
            "http://orchestrator:1",
            "secret",
            view=lambda: _VIEW,
            on_reply=self.replies.append,
            say=self.said.append,
            transport=httpx.MockTransport(answer),
        )
        task = asyncio.create_task(link.run())
        async with asyncio.timeout(10):
            await done.wait()
        # The last answer is handled before the next post begins.
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _ok() -> httpx.Response:
    return httpx.Response(200, text=_WISH.model_dump_json())


def _down() -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_the_view_is_posted_with_the_token_and_wishes_come_back() -> None:
    bench = _Bench(_ok)
    bench.run(2)
    request = bench.requests[0]
    assert str(request.url) == "http://orchestrator:1/launcher/groups"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["Content-Type"] == "application/json"
    assert GroupsView.model_validate_json(request.content) == _VIEW
    assert bench.replies[0] == _WISH
    assert bench.said == []


def test_an_orchestrator_that_is_not_there_is_no_event() -> None:
    bench = _Bench(_down, _down, _ok)
    bench.run(4)
    assert bench.replies[0] == _WISH
    assert bench.said == []


def test_a_refusal_is_told_once_until_it_changes() -> None:
    bench = _Bench(
        lambda: httpx.Response(401, text="wrong token"),
        lambda: httpx.Response(401, text="wrong token"),
        _ok,
        lambda: httpx.Response(401, text="wrong token"),
        lambda: httpx.Response(200, text="[]"),
    )
    bench.run(6)
    assert bench.said[:2] == ["the orchestrator refuses the launcher's report: 401 wrong token"] * 2
    assert bench.said[2].startswith(
        "the orchestrator refuses the launcher's report: its answer does not parse"
    )
    assert len(bench.said) == 3
