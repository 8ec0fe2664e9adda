"""The real trainer, one and two ranks, driven over HTTP; weights arrive over a real group."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.trainer_api import TrainerStatus
from tests.batches import make_batch
from tests.models import build_tiny_qwen3
from tests.trainer_process import (
    ROOT,
    TIMEOUT_S,
    Receivers,
    TrainerProcess,
    free_port,
    trainer_process,
)
from trainer.checkpoint import newest
from trainer.config import RankEnvironment, TrainerConfig
from trainer.learner import Learner
from trainer.model import load_model, wire_layers
from trainer.world import World
from transfer.receive import Staged

# Mostly imports of torch and transformers, in up to three processes at once.
pytestmark = pytest.mark.timeout(300)

RUN_ID = "test"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def make_config(model_path: Path, directory: Path, **changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "run_id": RUN_ID,
            "model": {"path": str(model_path)},
            "weight_broadcast": {"bucket_mb": 1},
            "output_dir": directory / "out",
            "port": free_port(),
            "max_steps": 3,
            **changes,
        }
    )


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_same(staged: Staged, expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(dict(staged.tensors()), expected, atol=0, rtol=0)


def stop(trainer: TrainerProcess) -> None:
    trainer.post("/stop")
    assert trainer.wait_exit() == 0, trainer.log.read_text()
    assert "Traceback" not in trainer.log.read_text()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_run(model_path: Path, tmp_path: Path, num_ranks: int) -> None:
    config = make_config(
        model_path, tmp_path, num_ranks=num_ranks, checkpoint={"interval_steps": 1, "keep": 9}
    )
    with (
        trainer_process(config, tmp_path, num_ranks=num_ranks) as trainer,
        Receivers(trainer, num=2) as receivers,
    ):
        status = trainer.wait_for(state="publishing", published_version=0)
        assert (status.next_step, status.finished_version, status.error) == (0, None, None)
        receivers.join(1)
        reply, staged = receivers.update(0)
        assert reply.num_bytes == status.num_bytes
        assert_same(staged[0], weights_of(model_path))
        for step in range(config.max_steps):
            trainer.post("/finish", version=step, members=["g0e0"])
            trainer.post_batch(make_batch(step))
            status = trainer.wait_for(published_version=step + 1)
            assert status.recent_steps[-1].step == step
            assert status.recent_steps[-1].values["grad_norm"] > 0
            _, staged = receivers.update(step + 1)
            for received in staged:
                assert_same(received, weights_of(tmp_path / f"out/checkpoints/v{step + 1:06d}"))
        trainer.post("/finish", version=config.max_steps, members=["g0e0"])
        status = trainer.wait_for(state="stopping")
        assert len(status.recent_steps) == config.max_steps
        stop(trainer)


def test_two_ranks_learn_what_one_rank_learns(model_path: Path, tmp_path: Path) -> None:
    # A large epsilon: AdamW's first steps are the gradient's sign otherwise.
    optimizer = {"epsilon": 1e-2}
    changes = {"max_steps": 2, "micro_batch_tokens": 128, "optimizer": optimizer}
    config = make_config(model_path, tmp_path, num_ranks=2, **changes)
    with trainer_process(config, tmp_path, num_ranks=2) as trainer:
        for step in range(2):
            trainer.wait_for(published_version=step)
            trainer.post("/finish", version=step, members=[])
            trainer.post_batch(make_batch(step))
        status = trainer.wait_for(published_version=2)
        stop(trainer)
    world = World(RankEnvironment(0, 0, 1), timeout_s=TIMEOUT_S, has_rendezvous=False)
    try:
        alone = Learner(load_model(model_path, world), world, config)
        expected = [alone.train(make_batch(step)) for step in range(2)]
        weights = dict(item for layer in wire_layers(alone.model, torch.float32) for item in layer)
    finally:
        world.close()
    found = weights_of(tmp_path / "out/checkpoints/v000002")
    torch.testing.assert_close(found, weights, atol=1e-6, rtol=1e-5)
    for step, values in zip(status.recent_steps, expected, strict=True):
        for name in ("loss", "grad_norm", "ratio_mean", "ratio_max", "entropy"):
            assert step.values[name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_transfer_fails_and_is_repeated(model_path: Path, tmp_path: Path, num_ranks: int) -> None:
    config = make_config(model_path, tmp_path, num_ranks=num_ranks)
    with (
        trainer_process(config, tmp_path, num_ranks=num_ranks) as trainer,
        Receivers(trainer, num=2) as receivers,
    ):
        trainer.wait_for(published_version=0)
        receivers.join(1)
        # Nobody receives: the sender blocks until somebody aborts it.
        sending = receivers.start_send(0)
        trainer.post("/transfer/abort", generation=1, reason="operator says so")
        answer = sending.result(TIMEOUT_S)
        assert answer.status_code == 500
        assert "operator says so" in answer.text or "PeerLost" in answer.text
        trainer.post("/transfer/abort", generation=1)  # idempotent
        # One of two receivers leaves in the middle.
        receivers.join(2)
        staged = receivers.start_receive(0)[1:]
        receivers.groups[0].abort("engine died")
        answer = receivers.start_send(0).result(TIMEOUT_S)
        assert answer.status_code == 500
        assert all(future.exception(TIMEOUT_S) is not None for future in staged)
        # A newer generation ends an older one that is still in use.
        receivers.join(3)
        sending = receivers.start_send(0)
        old = list(receivers.groups)
        receivers.groups = []
        receivers.join(4)
        assert sending.result(TIMEOUT_S).status_code in (409, 500)
        for group in old:
            group.close()
        _, results = receivers.update(0)
        assert_same(results[1], weights_of(model_path))
        assert trainer.status().generation == 4
        stop(trainer)


RECEIVER = """
import sys, time
from transfer.join import join
from transfer.wire import empty_header
group = join("127.0.0.1", int(sys.argv[1]), generation=1, rank=2, world_size=3, backend="gloo",
             device="cpu", timeout_s=60)
group.broadcast(empty_header(), timeout_s=60)
print("receiving", flush=True)
time.sleep(600)
"""


def test_receiver_is_killed_in_the_middle(model_path: Path, tmp_path: Path) -> None:
    config = make_config(model_path, tmp_path)
    with trainer_process(config, tmp_path) as trainer, Receivers(trainer, num=2) as receivers:
        trainer.wait_for(published_version=0)
        body = {"generation": 1, "world_size": 3, "timeout_s": TIMEOUT_S}
        place = trainer.post("/transfer/open", **body)
        with subprocess.Popen(
            [sys.executable, "-c", RECEIVER, str(place["port"])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                survivor = receivers._pool.submit(
                    _join_as_rank_1, place["host"], int(place["port"])
                )
                trainer.post("/transfer/join", generation=1, timeout_s=TIMEOUT_S)
                receivers.groups, receivers.generation = [survivor.result(TIMEOUT_S)], 1
                staged = receivers.start_receive(0)
                sending = receivers.start_send(0)
                assert process.stdout is not None
                assert process.stdout.readline() == "receiving\n"
                process.kill()
                killed = time.monotonic()
                assert sending.result(TIMEOUT_S).status_code == 500
                assert time.monotonic() - killed < 5.0
            finally:
                process.kill()
        receivers.groups[0].abort("told by the orchestrator")
        staged[0].exception(TIMEOUT_S)  # free; it may have had all bytes before its peer died
        receivers.join(2)
        receivers.update(0)
        stop(trainer)


def _join_as_rank_1(host: str, port: int) -> Any:
    from transfer.join import join

    return join(
        host,
        port,
        generation=1,
        rank=1,
        world_size=3,
        backend="gloo",
        device="cpu",
        timeout_s=TIMEOUT_S,
    )


def test_requests_that_do_not_fit(model_path: Path, tmp_path: Path) -> None:
    config = make_config(model_path, tmp_path)
    with trainer_process(config, tmp_path) as trainer:
        before = trainer.wait_for(published_version=0)
        url = str(trainer.client.base_url)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = httpx.post(f"{url}/stop", headers=headers, trust_env=False)
            assert answer.status_code == 401
        assert trainer.status() == before
        for path, body, status, message in (
            ("/finish", {"version": 1, "members": []}, 409, "version 1 is not published, 0 is"),
            ("/finish", {"version": 0}, 400, "members"),
            ("/transfer/send", _send(1, 1), 409, "version 1 is not the published one, 0 is"),
            ("/transfer/send", _send(1, 0), 409, "generation 1 is not the current one, 0"),
            ("/transfer/join", {"generation": 1, "timeout_s": 1}, 409, "not the current one"),
            ("/transfer/abort", {"generation": 9}, 409, "generation 9 was never opened"),
            ("/transfer/open", {"generation": 0}, 400, "generation"),
        ):
            assert message in trainer.post(path, status, **body)["error"]
        body = {"generation": 5, "world_size": 2, "timeout_s": 1.0}
        trainer.post("/transfer/open", **body)
        answer = trainer.post("/transfer/open", 409, **body)
        assert answer["error"] == "generation 5 is not above the last one, 5"
        answer = trainer.post("/transfer/join", 504, generation=5, timeout_s=0.1)
        assert answer["error"] == "generation 5 has not joined in 0.1 s"
        answer = trainer.post("/transfer/join", 500, generation=5, timeout_s=TIMEOUT_S)
        assert "ranks [1] are missing" in answer["error"]
        assert "run 'other'" in trainer.post_batch(make_batch(0, run_id="other"), 409)["error"]
        assert "the next one is 0" in trainer.post_batch(make_batch(1), 409)["error"]
        assert "no samples" in trainer.post_batch(make_batch(0, num_samples=0), 400)["error"]
        assert trainer.client.post("/batch", content=b"x").status_code == 400
        for step in range(config.max_queued_batches):
            trainer.post_batch(make_batch(step))  # not in service yet: they wait
        full = trainer.client.get("/status").json()["next_step"]
        assert full == config.max_queued_batches
        answer = trainer.post_batch(make_batch(full), 503)
        assert answer["error"] == "2 batches are waiting"
        assert trainer.status().published_version == 0
        stop(trainer)


def test_sigterm_writes_a_checkpoint_and_a_resumed_trainer_goes_on(
    model_path: Path, tmp_path: Path
) -> None:
    config = make_config(model_path, tmp_path, max_steps=9)
    with trainer_process(config, tmp_path) as trainer:
        trainer.wait_for(published_version=0)
        trainer.post("/finish", version=0, members=[])
        trainer.post_batch(make_batch(0))
        trainer.wait_for(published_version=1)
        trainer.process.send_signal(signal.SIGTERM)
        assert trainer.wait_exit() == 0
    found = newest(tmp_path / "out/checkpoints")
    assert found is not None
    assert found[1].version == 1
    with trainer_process(config, tmp_path) as trainer, Receivers(trainer) as receivers:
        status = trainer.wait_for(published_version=1)
        assert status.next_step == 1
        receivers.join(1)
        _, staged = receivers.update(1)
        assert_same(staged[0], weights_of(found[0]))
        stop(trainer)


def test_update_that_never_finishes_does_not_hold_the_trainer(
    model_path: Path, tmp_path: Path
) -> None:
    phases = ("join_timeout_s", "stage_timeout_s", "pause_timeout_s", "commit_timeout_s")
    broadcast = {**dict.fromkeys(phases, 0.5), "update_timeout_s": 1.0}
    config = make_config(model_path, tmp_path, weight_broadcast=broadcast)
    with trainer_process(config, tmp_path) as trainer:
        trainer.wait_for(published_version=0)
        trainer.post_batch(make_batch(0))
        status: TrainerStatus = trainer.wait_for(published_version=1)
        assert status.error == "version 0 was not in service after 1 s; going on"
        stop(trainer)


def test_ranks_end_when_their_agent_is_killed(model_path: Path, tmp_path: Path) -> None:
    config = make_config(model_path, tmp_path, num_ranks=2)
    with trainer_process(config, tmp_path, num_ranks=2) as trainer:
        trainer.wait_for(published_version=0)
        children = Path(f"/proc/{trainer.process.pid}/task/{trainer.process.pid}/children")
        ranks = [int(pid) for pid in children.read_text().split()]
        assert len(ranks) == 2
        trainer.process.kill()
        trainer.wait_exit()
        deadline = time.monotonic() + 10.0
        while any(_is_running(pid) for pid in ranks):
            assert time.monotonic() < deadline, "a rank outlived its agent"
            time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _send(generation: int, version: int) -> dict[str, Any]:
    return {"generation": generation, "version": version, "timeout_s": 5.0}
