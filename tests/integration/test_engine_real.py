"""One real engine from closed to serving new weights, held against transformers.

    closed -> stage v0 -> commit -> admit -> serve -> stage v1 (while it generates) -> commit -> ...

The engine serves a random model with tied embeddings, the harder case: what computes the logits has
a packed copy of the tied tensor. Random models repeat tokens, so log-probabilities count too.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from protocol.engine_api import Identity, TransferStatus
from tests.contract.sender import Sender
from tests.engines import RunningEngine, build_engine_model, start_real_engine

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = [5, 6, 7, 8, 90, 91, 33] * 12  # longer than one block of the prefix cache
TIMEOUT_S = 30.0


class Weights:
    """A model as transformers has it, and its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.tensors = load_file(path / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The most likely next `count` tokens."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return list(out[0, len(prompt) :].tolist())

    def logprobs(self, prompt: list[int], completion: list[int]) -> torch.Tensor:
        """Log-probability of each token of `completion` [N]."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + completion])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return rows.gather(1, torch.tensor(completion)[:, None])[:, 0]


class Driver:
    """What an admin plane would do, by hand."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.http = httpx.Client(base_url=engine.url, timeout=TIMEOUT_S)
        self.http.headers["Authorization"] = f"Bearer {engine.admin_token}"
        self.pool = ThreadPoolExecutor(8)
        self.expected_tracebacks = 0

    def close(self) -> None:
        """Free everything."""
        self.http.close()
        self.pool.shutdown(cancel_futures=True)

    def ok(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A POST that must be answered with 200."""
        answer = self.http.post(path, json=body or {})
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def identity(self) -> Identity:
        """GET /identity."""
        return Identity.model_validate(self.http.get("/identity").json())

    def join(self, sender: Sender) -> None:
        """Both sides join."""
        sender.start_join()
        info = {
            "host": "127.0.0.1",
            "port": sender.port,
            "generation": sender.generation,
            "rank_offset": 1,
            "world_size": 2,
            "timeout_s": TIMEOUT_S,
        }
        self.ok("/init_weight_transfer_engine", {"init_info": info})
        assert self.wait(sender, "joined").state == "joined"

    def wait(self, sender: Sender, stage: str) -> TransferStatus:
        """Long poll."""
        body = {"generation": sender.generation, "stage": stage, "timeout_s": TIMEOUT_S}
        return TransferStatus.model_validate(self.ok("/await_weight_transfer", body))

    def start_receive(self, sender: Sender, version: int) -> None:
        """Nothing is sent yet."""
        info = {"generation": sender.generation, "version": version, "timeout_s": TIMEOUT_S}
        self.ok("/start_weight_update")
        self.ok("/update_weights", {"update_info": info})

    def stage(self, sender: Sender, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Send and receive."""
        self.start_receive(sender, version)
        sent = sender.start_send(version, tensors)
        status = self.wait(sender, "staged")
        assert status.state == "staged", status
        assert status.digest == sent.result(TIMEOUT_S).digest

    def finish(self, sender: Sender, version: int) -> httpx.Response:
        """The commit alone."""
        body = {"weight_version": str(version), "generation": sender.generation}
        return self.http.post("/finish_weight_update", json=body)

    def commit(self, sender: Sender, version: int) -> None:
        """Pause, load, resume."""
        self.ok("/pause?mode=keep")
        answer = self.finish(sender, version)
        assert answer.status_code == 200, answer.text
        assert self.http.get("/weight_version").json()["version"] == version
        self.ok("/resume")

    def update(self, sender: Sender, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Stage, commit, admit."""
        self.stage(sender, version, tensors)
        self.commit(sender, version)
        self.admit(version)

    def admit(self, version: int) -> None:
        """Open the gate."""
        boot_id = self.identity().boot_id
        self.ok("/admit", {"boot_id": boot_id, "version": version, "lease_s": 60.0})

    def generate(self, count: int, prompt: list[int] | None = None) -> httpx.Response:
        """Greedy, exactly `count` tokens."""
        params = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": prompt or PROMPT, "sampling_params": params}
        return self.http.post("/inference/v1/generate", json=body)

    def start_generate(self, count: int) -> Future[httpx.Response]:
        """`generate` in the background; returns once the engine is at it."""
        before = self.identity().generated_tokens
        future = self.pool.submit(self.generate, count)
        until(lambda: self.identity().generated_tokens > before)
        return future


def until(condition: Any) -> None:
    """Poll `condition` up to the deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def choice_of(answer: httpx.Response) -> dict[str, Any]:
    """The one choice of a 200."""
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def spans_of(choice: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(version, start, end) of a choice."""
    return [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]


def assert_made_by(choice: dict[str, Any], weights: Weights) -> None:
    """Tokens and log-probabilities are those of `weights`."""
    tokens = choice["token_ids"]
    assert tokens == weights.greedy(PROMPT, len(tokens))
    got = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    torch.testing.assert_close(got, weights.logprobs(PROMPT, tokens), atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    root = tmp_path_factory.mktemp("models")
    return [Weights(build_engine_model(root / str(seed), seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    directory = tmp_path_factory.mktemp("engine")
    with start_real_engine(directory) as engine:
        made = Driver(engine)
        yield made
        made.close()
    assert engine.process.returncode == 0, engine.log()[-4000:]
    assert engine.log().count("Traceback") == made.expected_tracebacks, engine.log()[-8000:]


@pytest.fixture
def sender(driver: Driver) -> Iterator[Sender]:
    made = Sender(driver.identity().generation + 1, world_size=2)
    driver.join(made)
    yield made
    made.close()


def test_boots_closed_and_believes_in_no_checkpoint(driver: Driver) -> None:
    identity = driver.identity()
    assert (identity.weight_version, identity.admission) == (None, "closed")
    assert (identity.generation, identity.transfer_state) == (0, "idle")
    assert driver.generate(1).status_code == 503
    assert driver.http.get("/ready").status_code == 503


def test_serves_what_was_committed(driver: Driver, sender: Sender, models: list[Weights]) -> None:
    for version, weights in enumerate(models):
        driver.update(sender, version, weights.tensors)
        answer = driver.generate(20)
        assert answer.headers["X-Weight-Version"] == str(version)
        choice = choice_of(answer)
        assert spans_of(choice) == [(str(version), 0, 20)]
        assert_made_by(choice, weights)


def test_prefixes_of_old_weights_are_forgotten(
    driver: Driver, sender: Sender, models: list[Weights]
) -> None:
    driver.update(sender, 10, models[0].tensors)
    choice_of(driver.generate(4))
    assert_made_by(choice_of(driver.generate(4)), models[0])  # this one from the cache
    driver.update(sender, 11, models[1].tensors)
    assert_made_by(choice_of(driver.generate(20)), models[1])


def test_request_in_flight_goes_on_with_the_new_weights(
    driver: Driver, sender: Sender, models: list[Weights]
) -> None:
    driver.update(sender, 20, models[0].tensors)
    driver.stage(sender, 21, models[1].tensors)
    request = driver.start_generate(600)
    driver.commit(sender, 21)
    choice = choice_of(request.result(TIMEOUT_S))
    tokens = choice["token_ids"]
    (first, _, switch), (second, _, end) = spans_of(choice)
    assert (first, second, end) == ("20", "21", 600)
    assert 0 < switch < 600
    assert tokens[:switch] == models[0].greedy(PROMPT, switch)
    assert tokens[switch:] == models[1].greedy(PROMPT + tokens[:switch], 600 - switch)


def test_generates_while_it_receives(driver: Driver, sender: Sender, models: list[Weights]) -> None:
    driver.update(sender, 30, models[0].tensors)
    driver.start_receive(sender, 31)
    assert driver.identity().transfer_state == "receiving"
    assert_made_by(choice_of(driver.generate(20)), models[0])
    sender.start_send(31, models[1].tensors)
    assert driver.wait(sender, "staged").state == "staged"
    assert_made_by(choice_of(driver.generate(20)), models[0])


def test_abort_in_the_middle_leaves_the_old_version_in_service(
    driver: Driver, sender: Sender, models: list[Weights]
) -> None:
    driver.update(sender, 40, models[0].tensors)
    driver.start_receive(sender, 41)
    body = {"generation": sender.generation, "reason": "a peer died"}
    status = TransferStatus.model_validate(driver.ok("/abort_weight_transfer", body))
    assert (status.state, status.error) == ("aborted", "a peer died")
    assert driver.finish(sender, 41).status_code == 409
    assert driver.identity().weight_version == 40
    assert_made_by(choice_of(driver.generate(20)), models[0])
    following = Sender(sender.generation + 1, world_size=2)
    try:
        driver.join(following)
        driver.update(following, 41, models[1].tensors)
        assert_made_by(choice_of(driver.generate(20)), models[1])
    finally:
        following.close()


@pytest.mark.parametrize("broken", ["missing", "shape"])
def test_failed_load_holds_nothing_until_a_whole_one(
    driver: Driver, sender: Sender, models: list[Weights], broken: str
) -> None:
    driver.update(sender, 50, models[0].tensors)
    tensors = dict(models[1].tensors)
    name = "model.layers.1.mlp.down_proj.weight"
    if broken == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, 1:].contiguous()
    driver.stage(sender, 51, tensors)
    driver.ok("/pause?mode=keep")
    tracebacks = driver.engine.log().count("Traceback")
    answer = driver.finish(sender, 51)
    driver.expected_tracebacks += driver.engine.log().count("Traceback") - tracebacks
    assert answer.status_code == 500
    assert "loading version 51 failed" in answer.json()["error"]
    identity = driver.identity()
    assert (identity.weight_version, identity.admission) == (None, "closed")
    assert identity.admission_reason == "weights_lost"
    assert driver.generate(1).status_code == 503
    driver.ok("/resume")
    driver.update(sender, 52, models[2].tensors)
    assert_made_by(choice_of(driver.generate(20)), models[2])


def test_only_what_is_staged_can_be_committed(
    driver: Driver, sender: Sender, models: list[Weights]
) -> None:
    driver.update(sender, 60, models[0].tensors)
    driver.stage(sender, 61, models[1].tensors)
    assert "staged version is 61, not 62" in driver.finish(sender, 62).json()["error"]
    assert driver.identity().weight_version == 60
    assert_made_by(choice_of(driver.generate(4)), models[0])


def test_closing_and_aborting_cuts_requests(
    driver: Driver, sender: Sender, models: list[Weights]
) -> None:
    driver.update(sender, 70, models[0].tensors)
    request = driver.start_generate(600)
    driver.ok("/fence", {"reason": "evicted"})
    driver.ok("/abort_requests")
    choice = choice_of(request.result(TIMEOUT_S))
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < 600


def test_frozen_core_is_seen_and_blocks_nobody(driver: Driver) -> None:
    core = _child(driver.engine.process.pid)
    os.kill(core, signal.SIGSTOP)
    try:
        until(lambda: driver.identity().core_age_s > 1.0)
        assert driver.http.get("/liveness").status_code == 200
    finally:
        os.kill(core, signal.SIGCONT)
    until(lambda: driver.identity().core_age_s < 1.0)


def test_dead_core_ends_the_engine(tmp_path: Path) -> None:
    with start_real_engine(tmp_path) as engine:
        os.kill(_child(engine.process.pid), signal.SIGKILL)
        assert engine.process.wait(TIMEOUT_S) == 1


def test_core_dies_with_the_api_server(tmp_path: Path) -> None:
    with start_real_engine(tmp_path) as engine:
        core = os.pidfd_open(_child(engine.process.pid))
        engine.process.kill()
        engine.process.wait(TIMEOUT_S)
        try:
            until(lambda: _has_ended(core))
        finally:
            os.close(core)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])
