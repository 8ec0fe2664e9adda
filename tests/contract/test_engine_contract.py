"""What protocol/engine_api.py promises, held against the fake engine and against a real vLLM.

One engine serves the whole module (a real one takes long to start), so every test begins by asking
the engine where it stands, and takes the next generation and the next version from the answer. Only
`test_boot` needs to be first: it looks at an engine that nobody has touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from protocol.engine_api import ErrorBody, Identity, TransferStatus, WeightVersion
from protocol.ids import HEADER_BOOT_ID, HEADER_ENGINE_ID, HEADER_WEIGHT_VERSION, Slot
from tests.contract.sender import Sender

TOKEN = "contract-token"
DEADLINE_S = 30.0
LEASE_S = 120.0
PROMPT = [5, 6, 7, 8]
LONG = 240  # tokens; about a second on either engine

ADMIN_ROUTES: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/identity", {}),
    ("GET", "/weight_version", {}),
    ("GET", "/is_paused", {}),
    ("POST", "/admit", {"boot_id": "x", "version": 0, "lease_s": 1.0}),
    ("POST", "/fence", {"reason": "nobody"}),
    ("POST", "/abort_requests", {}),
    ("POST", "/pause?mode=keep", {}),
    ("POST", "/resume", {}),
    ("POST", "/init_weight_transfer_engine", {"init_info": {}}),
    ("POST", "/start_weight_update", {}),
    ("POST", "/update_weights", {"update_info": {}}),
    ("POST", "/await_weight_transfer", {"generation": 1, "stage": "joined", "timeout_s": 0.0}),
    ("POST", "/finish_weight_update", {"weight_version": "0", "generation": 1}),
    ("POST", "/abort_weight_transfer", {"generation": 1}),
    ("POST", "/shutdown_weight_transfer_engine", {}),
]


@dataclass
class Engine:
    """An engine under test, and what a well-behaved admin plane does with it."""

    url: str
    slot: Slot
    run_id: str
    world_size: int
    weights: dict[str, torch.Tensor]
    http: httpx.Client

    def identity(self) -> Identity:
        """GET /identity."""
        return Identity.model_validate(self.get("/identity").json())

    def get(self, path: str) -> httpx.Response:
        """A GET with the admin token."""
        return self.http.get(path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """A POST with the admin token."""
        return self.http.post(path, json=body if body is not None else {})

    def ok(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A POST that must answer 200."""
        answer = self.post(path, body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def next_version(self) -> int:
        """A version that the engine does not hold."""
        held = self.identity().weight_version
        return 0 if held is None else held + 1

    def new_sender(self) -> Sender:
        """A sender of the next generation."""
        return Sender(self.identity().generation + 1, 1 + self.world_size)

    def init_body(self, sender: Sender, *, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """Body of /init_weight_transfer_engine."""
        info = {
            "host": "127.0.0.1",
            "port": sender.port,
            "generation": sender.generation,
            "rank_offset": 1,
            "world_size": sender.world_size,
            "timeout_s": timeout_s,
        }
        return {"init_info": info}

    def wait(self, generation: int, stage: str, timeout_s: float = DEADLINE_S) -> TransferStatus:
        """POST /await_weight_transfer."""
        body = {"generation": generation, "stage": stage, "timeout_s": timeout_s}
        return TransferStatus.model_validate(self.ok("/await_weight_transfer", body))

    def join(self, sender: Sender) -> None:
        """Both sides into the generation."""
        sender.start_join()
        self.ok("/init_weight_transfer_engine", self.init_body(sender))
        status = self.wait(sender.generation, "joined")
        assert status.state == "joined", status

    def stage(self, sender: Sender, version: int) -> TransferStatus:
        """All bytes of `version` into staging buffers."""
        self.ok("/start_weight_update")
        info = {"generation": sender.generation, "version": version, "timeout_s": DEADLINE_S}
        self.ok("/update_weights", {"update_info": info})
        sent = sender.start_send(version, self.weights).result(DEADLINE_S)
        status = self.wait(sender.generation, "staged")
        assert status.state == "staged", status
        assert (status.digest, status.num_bytes) == (sent.digest, sent.num_bytes)
        return status

    def commit(self, generation: int, version: int) -> None:
        """Pause, load, read back, resume."""
        self.ok("/pause?mode=keep")
        self.ok("/finish_weight_update", {"weight_version": str(version), "generation": generation})
        read_back = WeightVersion.model_validate(self.get("/weight_version").json())
        assert read_back.version == version
        self.ok("/resume")

    def install(self) -> int:
        """One whole update; the version that the engine holds then."""
        version = self.next_version()
        sender = self.new_sender()
        try:
            self.join(sender)
            self.stage(sender, version)
            self.commit(sender.generation, version)
        finally:
            sender.close()
        return version

    def admit(self, lease_s: float = LEASE_S) -> None:
        """Open the gate; installs a version first where there is none."""
        if self.identity().weight_version is None:
            self.install()
        me = self.identity()
        body = {"boot_id": me.boot_id, "version": me.weight_version, "lease_s": lease_s}
        self.ok("/admit", body)

    def generate(self, max_tokens: int, **more: Any) -> httpx.Response:
        """POST /inference/v1/generate, without any token."""
        sampling = {
            "max_tokens": max_tokens,
            "logprobs": 0,
            "temperature": 1.0,
            "seed": 1,
            "ignore_eos": True,
        }
        body = {"token_ids": PROMPT, "sampling_params": sampling, **more}
        return httpx.post(
            f"{self.url}/inference/v1/generate", json=body, timeout=DEADLINE_S, trust_env=False
        )


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.vllm_cpu)])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The engine under test; both kinds are real processes."""
    directory = tmp_path_factory.mktemp(request.param)
    start = {"fake": _fake_engine, "real": _real_engine}[request.param]
    for started in start(directory):
        with httpx.Client(
            base_url=started.url,
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=DEADLINE_S,
            trust_env=False,
        ) as client:
            started.http = client
            yield started


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests in flight."""
    with ThreadPoolExecutor(4) as threads:
        yield threads


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask until it is so; fails at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def problem(answer: httpx.Response, status: int) -> str:
    """Error text of one of our own routes' answers, which must have this status."""
    assert answer.status_code == status, answer.text
    return ErrorBody.model_validate(answer.json()).error


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    """The only choice of a generate answer."""
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return dict(choice)


# -- identity and boot


def test_boot(engine: Engine) -> None:
    me = engine.identity()
    assert (me.run_id, Slot(me.group, me.index)) == (engine.run_id, engine.slot)
    assert (me.life, me.world_size) == (0, engine.world_size)
    assert me.boot_id
    assert me.weight_version is None
    assert (me.admission, me.admission_reason) == ("closed", "booted")
    assert (me.paused, me.running_requests, me.generated_tokens) == (False, 0, 0)
    assert (me.generation, me.transfer_state, me.staged_version) == (0, "idle", None)
    assert me.core_age_s < DEADLINE_S
    assert abs(me.started_at - time.time()) < 600

    version = WeightVersion.model_validate(engine.get("/weight_version").json())
    assert version == WeightVersion(version=None, boot_id=me.boot_id)
    assert "booted" in problem(engine.get("/ready"), 503)
    assert engine.get("/liveness").status_code == 200
    assert "booted" in problem(engine.generate(1), 503)


def test_boot_id_stays(engine: Engine) -> None:
    assert engine.identity().boot_id == engine.identity().boot_id


def test_public_routes_need_no_token(engine: Engine) -> None:
    for path in ("/liveness", "/health", "/metrics", "/v1/models"):
        answer = httpx.get(f"{engine.url}{path}", timeout=DEADLINE_S, trust_env=False)
        assert answer.status_code == 200, (path, answer.text)
    assert "vllm:generation_tokens_total" in engine.get("/metrics").text
    assert engine.get("/v1/models").json()["data"][0]["id"]


# -- tokens


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", f"Basic {TOKEN}", TOKEN])
@pytest.mark.parametrize(("method", "path", "body"), ADMIN_ROUTES)
def test_admin_routes_need_the_token(
    engine: Engine, method: str, path: str, body: dict[str, Any], header: str | None
) -> None:
    before = engine.identity()
    answer = httpx.request(
        method,
        f"{engine.url}{path}",
        json=body if method == "POST" else None,
        headers={} if header is None else {"Authorization": header},
        timeout=DEADLINE_S,
        trust_env=False,
    )
    assert "admin token" in problem(answer, 401)
    assert TOKEN not in answer.text
    after = engine.identity()
    assert after.model_copy(update={"core_age_s": before.core_age_s}) == before


def test_unknown_routes_need_the_token(engine: Engine) -> None:
    answer = httpx.post(f"{engine.url}/no_such_route", timeout=DEADLINE_S, trust_env=False)
    assert answer.status_code == 401
    assert engine.post("/no_such_route").status_code == 404


# -- gate


def test_closed_gate_refuses_data(engine: Engine) -> None:
    engine.ok("/fence", {"reason": "contract"})
    answer = engine.generate(1)
    assert "closed" in problem(answer, 503)
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers[HEADER_ENGINE_ID] == engine.slot.engine_id


def test_admit_foreign_boot(engine: Engine) -> None:
    engine.ok("/fence", {"reason": "contract"})
    held = engine.identity().weight_version
    body = {"boot_id": "somebody-else", "version": held or 0, "lease_s": LEASE_S}
    assert "somebody-else" in problem(engine.post("/admit", body), 409)
    assert engine.identity().admission == "closed"


def test_admit_version_that_is_not_held(engine: Engine) -> None:
    engine.ok("/fence", {"reason": "contract"})
    body = {
        "boot_id": engine.identity().boot_id,
        "version": engine.next_version(),
        "lease_s": LEASE_S,
    }
    assert str(body["version"]) in problem(engine.post("/admit", body), 409)
    assert engine.identity().admission == "closed"


def test_admit_opens_and_tells_who_answers(engine: Engine) -> None:
    engine.admit()
    me = engine.identity()
    assert me.admission == "open"
    assert engine.get("/ready").status_code == 200
    answer = engine.generate(2)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER_ENGINE_ID] == engine.slot.engine_id
    assert answer.headers[HEADER_BOOT_ID] == me.boot_id
    assert answer.headers[HEADER_WEIGHT_VERSION] == str(me.weight_version)


def test_fence_closes_and_stays_closed(engine: Engine) -> None:
    engine.admit()
    for reason in ("first", "second"):
        answer = engine.ok("/fence", {"reason": reason})
        assert Identity.model_validate(answer).admission == "closed"
    assert engine.identity().admission_reason == "first"
    engine.install()  # a commit does not open a gate
    assert engine.identity().admission == "closed"
    assert problem(engine.get("/ready"), 503)
    assert problem(engine.generate(1), 503)


def test_lease_expiry_closes(engine: Engine) -> None:
    engine.admit(lease_s=0.3)
    until(lambda: engine.get("/ready").status_code == 503, "the lease runs out")
    me = engine.identity()
    assert (me.admission, me.admission_reason) == ("closed", "lease_expired")
    assert "lease_expired" in problem(engine.generate(1), 503)


def test_admit_renews_the_lease(engine: Engine) -> None:
    engine.admit(lease_s=0.3)
    engine.admit(lease_s=LEASE_S)
    end = time.monotonic() + 0.5
    until(lambda: time.monotonic() > end, "the first lease would be over")
    assert engine.get("/ready").status_code == 200


# -- transfer


def test_update(engine: Engine) -> None:
    version = engine.next_version()
    sender = engine.new_sender()
    try:
        engine.join(sender)
        me = engine.identity()
        assert (me.generation, me.transfer_state) == (sender.generation, "joined")
        engine.stage(sender, version)
        me = engine.identity()
        assert (me.transfer_state, me.staged_version) == ("staged", version)
        assert me.weight_version != version
        engine.commit(sender.generation, version)
        me = engine.identity()
        assert (me.weight_version, me.staged_version, me.paused) == (version, None, False)
        assert me.transfer_state == "joined"

        engine.stage(sender, version + 1)  # the membership outlives a commit
        engine.commit(sender.generation, version + 1)
        assert engine.identity().weight_version == version + 1
    finally:
        sender.close()


def test_starting_a_stage_can_wait_for_it(engine: Engine) -> None:
    version = engine.next_version()
    sender = engine.new_sender()
    try:
        sender.start_join()
        body = {**engine.init_body(sender), "wait_s": DEADLINE_S}
        joined = TransferStatus.model_validate(engine.ok("/init_weight_transfer_engine", body))
        assert (joined.state, joined.generation) == ("joined", sender.generation)
        sent = sender.start_send(version, engine.weights)
        info = {"generation": sender.generation, "version": version, "timeout_s": DEADLINE_S}
        body = {"update_info": info, "wait_s": DEADLINE_S}
        staged = TransferStatus.model_validate(engine.ok("/update_weights", body))
        assert (staged.state, staged.staged_version) == ("staged", version)
        assert staged.digest == sent.result(DEADLINE_S).digest
    finally:
        sender.close()


def test_starting_a_stage_waits_no_longer_than_asked(engine: Engine) -> None:
    sender = engine.new_sender()
    try:
        body = {**engine.init_body(sender), "wait_s": 0.05}
        status = TransferStatus.model_validate(engine.ok("/init_weight_transfer_engine", body))
        assert status.state == "joining"
        engine.ok("/abort_weight_transfer", {"generation": sender.generation})
    finally:
        sender.close()


def test_old_generation_cannot_be_joined(engine: Engine) -> None:
    engine.install()
    before = engine.identity()
    sender = Sender(before.generation, 1 + engine.world_size)
    try:
        answer = engine.post("/init_weight_transfer_engine", engine.init_body(sender))
        assert str(before.generation) in problem(answer, 409)
    finally:
        sender.close()
    assert engine.identity().generation == before.generation


def test_foreign_generation_is_refused(engine: Engine) -> None:
    version = engine.next_version()
    sender = engine.new_sender()
    foreign = sender.generation + 7
    try:
        engine.join(sender)
        engine.stage(sender, version)
        info = {"generation": foreign, "version": version, "timeout_s": 1.0}
        finish = {"weight_version": str(version), "generation": foreign}
        wait = {"generation": foreign, "stage": "staged", "timeout_s": 0.0}
        for path, body in (
            ("/update_weights", {"update_info": info}),
            ("/finish_weight_update", finish),
            ("/abort_weight_transfer", {"generation": foreign}),
            ("/await_weight_transfer", wait),
        ):
            assert str(foreign) in problem(engine.post(path, body), 409), path
        me = engine.identity()
        assert (me.transfer_state, me.staged_version) == ("staged", version)
        assert me.weight_version != version
        engine.commit(sender.generation, version)
    finally:
        sender.close()


def test_finish_of_a_version_that_is_not_staged(engine: Engine) -> None:
    version = engine.next_version()
    sender = engine.new_sender()
    try:
        engine.join(sender)
        body = {"weight_version": str(version), "generation": sender.generation}
        assert "staged" in problem(engine.post("/finish_weight_update", body), 409)
        engine.stage(sender, version)
        body["weight_version"] = str(version + 1)
        assert str(version + 1) in problem(engine.post("/finish_weight_update", body), 409)
        assert engine.identity().weight_version != version + 1
        engine.commit(sender.generation, version)
    finally:
        sender.close()


def test_receive_before_join_is_refused(engine: Engine) -> None:
    sender = engine.new_sender()
    try:
        engine.ok("/init_weight_transfer_engine", engine.init_body(sender))
        info = {"generation": sender.generation, "version": 1, "timeout_s": 1.0}
        assert "joining" in problem(engine.post("/update_weights", {"update_info": info}), 409)
        engine.ok("/abort_weight_transfer", {"generation": sender.generation})
    finally:
        sender.close()


def test_abort_frees_a_blocked_join(engine: Engine, pool: ThreadPoolExecutor) -> None:
    sender = engine.new_sender()  # listens and never joins
    try:
        engine.ok("/init_weight_transfer_engine", engine.init_body(sender))
        waiting = pool.submit(engine.wait, sender.generation, "joined")
        until(lambda: engine.identity().transfer_state == "joining", "the join starts")
        start = time.monotonic()
        body = {"generation": sender.generation, "reason": "contract"}
        status = TransferStatus.model_validate(engine.ok("/abort_weight_transfer", body))
        assert (status.state, status.staged_version) == ("aborted", None)
        assert waiting.result(DEADLINE_S).state == "aborted"
        assert time.monotonic() - start < DEADLINE_S / 2  # not the join's own deadline
    finally:
        sender.close()
    engine.install()  # the next generation is not hurt


def test_abort_frees_a_blocked_receiver(engine: Engine, pool: ThreadPoolExecutor) -> None:
    version = engine.next_version()
    sender = engine.new_sender()
    try:
        engine.join(sender)
        info = {"generation": sender.generation, "version": version, "timeout_s": DEADLINE_S}
        engine.ok("/start_weight_update")
        engine.ok("/update_weights", {"update_info": info})  # and nobody sends
        waiting = pool.submit(engine.wait, sender.generation, "staged")
        start = time.monotonic()
        engine.ok("/abort_weight_transfer", {"generation": sender.generation})
        assert waiting.result(DEADLINE_S).state == "aborted"
        assert time.monotonic() - start < DEADLINE_S / 2
    finally:
        sender.close()
    assert engine.identity().weight_version != version


def test_abort_is_idempotent_and_drops_what_is_staged(engine: Engine) -> None:
    version = engine.next_version()
    sender = engine.new_sender()
    try:
        engine.join(sender)
        engine.stage(sender, version)
        body = {"generation": sender.generation, "reason": "contract"}
        for _ in range(2):
            status = TransferStatus.model_validate(engine.ok("/abort_weight_transfer", body))
            assert (status.state, status.staged_version) == ("aborted", None)
        finish = {"weight_version": str(version), "generation": sender.generation}
        assert "aborted" in problem(engine.post("/finish_weight_update", finish), 409)
    finally:
        sender.close()
    me = engine.identity()
    assert (me.generation, me.transfer_state) == (sender.generation, "aborted")
    assert me.weight_version != version


def test_join_that_nobody_answers_fails_at_its_deadline(engine: Engine) -> None:
    sender = engine.new_sender()
    try:
        body = engine.init_body(sender, timeout_s=0.3)
        engine.ok("/init_weight_transfer_engine", body)
        status = engine.wait(sender.generation, "joined")
        assert (status.state, bool(status.error)) == ("failed", True)
        aborted = engine.ok("/abort_weight_transfer", {"generation": sender.generation})
        assert TransferStatus.model_validate(aborted) == status  # it is over already
    finally:
        sender.close()


def test_wait_returns_at_its_own_timeout(engine: Engine) -> None:
    sender = engine.new_sender()
    try:
        engine.ok("/init_weight_transfer_engine", engine.init_body(sender))
        assert engine.wait(sender.generation, "joined", timeout_s=0.05).state == "joining"
        engine.ok("/abort_weight_transfer", {"generation": sender.generation})
    finally:
        sender.close()


def test_shutdown_leaves_the_generation(engine: Engine) -> None:
    engine.install()
    generation = engine.identity().generation
    for _ in range(2):
        engine.ok("/shutdown_weight_transfer_engine")
    me = engine.identity()
    assert (me.generation, me.transfer_state) == (generation, "idle")


# -- generation of tokens


def test_generate_shape(engine: Engine) -> None:
    engine.admit()
    version = engine.identity().weight_version
    answer = engine.generate(12, request_id="contract-1")
    choice = choice_of(answer)
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 12
    assert all(isinstance(token, int) and token >= 0 for token in choice["token_ids"])
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    assert all(entry["logprob"] <= 0 for entry in content)
    assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 12}]


def test_generate_refuses_what_does_not_fit(engine: Engine) -> None:
    engine.admit()
    url = f"{engine.url}/inference/v1/generate"
    sampling = {"max_tokens": 4}
    for body in ({}, {"token_ids": PROMPT}, {"token_ids": "x", "sampling_params": sampling}):
        answer = httpx.post(url, json=body, timeout=DEADLINE_S, trust_env=False)
        assert 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["message"]
    too_long = {"token_ids": [5] * 5000, "sampling_params": sampling}
    assert httpx.post(url, json=too_long, timeout=DEADLINE_S, trust_env=False).status_code == 400


def start_long(engine: Engine, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """A long request that has begun to make tokens and is not over."""
    for _ in range(5):  # a test that lost the processor may look too late
        before = engine.identity().generated_tokens
        request = pool.submit(engine.generate, LONG)
        until(lambda: engine.identity().generated_tokens > before or request.done(), "a token")  # noqa: B023
        if not request.done():
            return request
    raise AssertionError(f"no request was caught in flight: {request.result().text[:300]}")


def test_pause_keeps_and_resume_goes_on(engine: Engine, pool: ThreadPoolExecutor) -> None:
    engine.admit()
    request = start_long(engine, pool)
    engine.ok("/pause?mode=keep")
    assert engine.get("/is_paused").json() == {"is_paused": True}
    paused = engine.identity()
    assert (paused.paused, paused.running_requests) == (True, 1)
    assert not request.done()
    standing = engine.identity().generated_tokens
    end = time.monotonic() + 0.2
    until(lambda: time.monotonic() > end, "a moment passes")
    assert engine.identity().generated_tokens == standing
    engine.ok("/resume")
    choice = choice_of(request.result(DEADLINE_S))
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", LONG)
    assert engine.identity().running_requests == 0


def test_spans_tile_across_a_commit(engine: Engine, pool: ThreadPoolExecutor) -> None:
    engine.admit()
    old = engine.identity().weight_version
    assert old is not None
    sender = engine.new_sender()
    try:
        engine.join(sender)
        engine.stage(sender, old + 1)
        request = start_long(engine, pool)
        engine.commit(sender.generation, old + 1)
    finally:
        sender.close()
    choice = choice_of(request.result(DEADLINE_S))
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [str(old), str(old + 1)]
    assert spans[0]["start"] == 0
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(choice["token_ids"]) == LONG
    assert engine.identity().admission == "open"


def test_abort_requests_cuts(engine: Engine, pool: ThreadPoolExecutor) -> None:
    engine.admit()
    request = start_long(engine, pool)
    assert engine.ok("/abort_requests")["aborted"] == 1
    choice = choice_of(request.result(DEADLINE_S))
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < LONG
    until(lambda: engine.identity().running_requests == 0, "the request is gone")


def test_abort_requests_cuts_what_a_pause_holds(engine: Engine, pool: ThreadPoolExecutor) -> None:
    engine.admit()
    request = start_long(engine, pool)
    engine.ok("/pause?mode=keep")
    engine.ok("/abort_requests")
    assert choice_of(request.result(DEADLINE_S))["finish_reason"] == "abort"
    engine.ok("/resume")


# -- bodies


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/admit", {"boot_id": "x", "version": 0, "lease_s": 1, "extra": 1}, "extra"),
        ("/admit", {"boot_id": "x", "version": 0}, "lease_s"),
        ("/admit", {"boot_id": "x", "version": 0, "lease_s": -1}, "lease_s"),
        ("/admit", {"boot_id": "x", "version": "new", "lease_s": 1}, "version"),
        ("/fence", {}, "reason"),
        ("/fence", {"reason": "x", "extra": 1}, "extra"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"extra": 1}}, "init_info.extra"),
        ("/init_weight_transfer_engine", {"init_info": {"generation": 0}}, "init_info.generation"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": {"extra": 1}}, "update_info.extra"),
        ("/update_weights", {"update_info": {"version": -1}}, "update_info.version"),
        ("/init_weight_transfer_engine", {"init_info": {}, "wait_s": -1}, "wait_s"),
        ("/await_weight_transfer", {"generation": 1, "stage": "x", "timeout_s": 0}, "stage"),
        ("/await_weight_transfer", {"stage": "staged", "timeout_s": 0}, "generation"),
        ("/finish_weight_update", {"weight_version": "1"}, "generation"),
        ("/finish_weight_update", {"weight_version": "x", "generation": 1}, "weight_version"),
        ("/finish_weight_update", {"weight_version": "1", "generation": 1, "extra": 1}, "extra"),
        ("/abort_weight_transfer", {}, "generation"),
        ("/abort_weight_transfer", {"generation": 1, "extra": 1}, "extra"),
    ],
)
def test_bad_bodies(engine: Engine, path: str, body: dict[str, Any], named: str) -> None:
    before = engine.identity()
    assert named in problem(engine.post(path, body), 400)
    after = engine.identity()
    assert after.model_copy(update={"core_age_s": before.core_age_s}) == before


def test_body_that_is_no_json(engine: Engine) -> None:
    answer = engine.http.post("/admit", content=b"{", headers={"content-type": "application/json"})
    assert "JSON" in problem(answer, 400)


def test_bad_pause_mode(engine: Engine) -> None:
    answer = engine.post("/pause?mode=sometimes")
    assert 400 <= answer.status_code < 500
    assert "mode" in answer.text
    assert engine.get("/is_paused").json() == {"is_paused": False}


# -- the two kinds


def _fake_engine(directory: Any) -> Iterator[Engine]:
    from tests.fakes.processes import fake_engine_processes

    slot = Slot(1, 0)
    args = ("--transfer", "gloo", "--tokens-per-s", "300", "--run-id", "contract")
    args += ("--max-model-len", "256")
    with fake_engine_processes([slot], admin_token=TOKEN, log_dir=directory, args=args) as started:
        weights = {"weights": torch.arange(1000, dtype=torch.float32)}
        yield Engine(started[0].url, slot, "contract", 1, weights, httpx.Client())


def _real_engine(directory: Any) -> Iterator[Engine]:
    from tests.engines import start_real_engine

    slot = Slot(1, 0)
    with start_real_engine(directory, slot=slot, run_id="contract", admin_token=TOKEN) as started:
        yield Engine(started.url, slot, "contract", 1, started.weights, httpx.Client())
