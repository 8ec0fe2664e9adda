"""The plan: what is started, with which command, environment and config file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from launch.config import RunConfig
from launch.local_plan import Facts, Plan, PlanError, build_plan, share_gpus
from orchestrator.config import OrchestratorConfig
from slurm.topology import port_names
from trainer.config import TrainerConfig

GROUPS = [0, 0, 1, 1]
OUT = Path("/runs/r1")


def _plan(num_gpus: int = 0, **sections: object) -> Plan:
    config = RunConfig.model_validate({"deployment": {"engine_groups": GROUPS}, **sections})
    facts = Facts(
        run_id="r1-abcd",
        output_dir=OUT,
        model_dir=Path("/models/tiny"),
        scratch_dir=Path("/tmp/m/1"),
        python="/venv/bin/python",
        ports={name: 7000 + number for number, name in enumerate(port_names(GROUPS))},
        num_gpus=num_gpus,
    )
    return build_plan(config, facts)


def test_the_router_starts_empty_with_the_gate_as_its_health_check() -> None:
    router = _plan().router
    assert " ".join(router.argv) == (
        "/venv/bin/python -m vllm_router.launch_router --host 127.0.0.1 --port 7000 "
        "--policy consistent_hash "
        "--worker-startup-timeout-secs 5 --worker-startup-check-interval 1 "
        "--health-check-endpoint /ready --health-check-interval-secs 1 "
        "--health-check-timeout-secs 2 --health-failure-threshold 2 --health-success-threshold 1 "
        "--cb-failure-threshold 5 --cb-timeout-duration-secs 5 --cb-success-threshold 1 "
        "--request-timeout-secs 14400 --disable-retries --log-level warning "
        "--prometheus-port 7001 --request-id-headers x-session-id"
    )
    removed = {name for name, value in router.env.items() if value is None}
    assert removed == {
        *("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"),
        "MUSTER_ADMIN_TOKEN",
    }


def test_engines_share_a_file_and_differ_in_flags() -> None:
    plan = _plan()
    assert [" ".join(spec.command(3)) for spec in plan.engines][1::2] == [
        "/venv/bin/python -m launch.cli engine @ /runs/r1/plan/engine.json "
        "--group 0 --index 1 --port 7006 --life 3",
        "/venv/bin/python -m launch.cli engine @ /runs/r1/plan/engine.json "
        "--group 1 --index 1 --port 7008 --life 3",
    ]
    assert [spec.log for spec in plan.engines][:1] == [OUT / "logs" / "engine-g0e0"]
    assert {group: [spec.name for spec in specs] for group, specs in plan.members().items()} == {
        0: ["engine-g0e0", "engine-g0e1"],
        1: ["engine-g1e0", "engine-g1e1"],
    }
    env = plan.engines[0].env
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["TMPDIR"] == env["VLLM_RPC_BASE_PATH"] == "/tmp/m/1"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_one_trainer_rank_is_a_plain_process_that_knows_its_place() -> None:
    trainer = _plan().trainer
    assert trainer.argv[1:] == ("-m", "launch.cli", "trainer", "@", "/runs/r1/plan/trainer.json")
    assert {key: trainer.env[key] for key in ("RANK", "WORLD_SIZE", "MASTER_PORT")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_PORT": "7004",
    }


def test_several_trainer_ranks_run_under_torchrun() -> None:
    trainer = _plan(trainer={"num_ranks": 2}).trainer
    assert " ".join(trainer.argv[1:]) == (
        "-m torch.distributed.run --nnodes 1 --nproc-per-node 2 --max-restarts 0 "
        "--master-addr 127.0.0.1 --master-port 7004 "
        "-m launch.cli trainer @ /runs/r1/plan/trainer.json"
    )
    assert "RANK" not in trainer.env


def test_only_the_orchestrator_speaks_on_the_console() -> None:
    plan = _plan()
    assert plan.orchestrator.has_console
    assert not any(spec.has_console for spec in [plan.router, plan.trainer, *plan.engines])


def test_files_are_whole_configs_with_every_address_filled_in() -> None:
    files = _plan(orchestrator={"max_steps": 7}, model={"max_model_len": 96}).files
    names = {"run.json", "engine.json", "trainer.json", "orchestrator.json", "plan.json"}
    assert set(files) == names
    engine = EngineConfig.model_validate_json(files["engine.json"])
    trainer = TrainerConfig.model_validate_json(files["trainer.json"])
    orchestrator = OrchestratorConfig.model_validate_json(files["orchestrator.json"])
    for config in (engine, trainer, orchestrator):
        assert config.run_id == "r1-abcd"
        assert config.output_dir == OUT
        assert (config.model.path, config.model.max_model_len) == ("/models/tiny", 96)
    assert trainer.port == 7003
    assert (orchestrator.port, orchestrator.trainer_url) == (7002, "http://127.0.0.1:7003")
    assert orchestrator.has_launcher
    assert orchestrator.max_steps == 7
    client = orchestrator.model.client
    assert client.base_url == "http://127.0.0.1:7000"
    assert client.admin_base_url == [f"http://127.0.0.1:{port}" for port in range(7005, 7009)]
    assert client.admin_engine_groups == GROUPS


def test_no_secret_and_no_random_number_is_in_a_plan() -> None:
    one, other = _plan(), _plan()
    assert one == other
    summary = json.loads(one.files["plan.json"])
    assert [process["name"] for process in summary["processes"]] == [
        *("router", "engine-g0e0", "engine-g0e1", "engine-g1e0", "engine-g1e1"),
        *("trainer", "orchestrator"),
    ]
    assert summary["processes"][1]["command"].endswith("--port 7005 --life 0")


@pytest.mark.parametrize(
    ("num_gpus", "sizes", "trainer", "engines", "trainer_gpus", "is_shared"),
    [
        (0, [1, 1], 1, None, None, False),
        (1, [1, 1], 1, None, None, True),
        (3, [1, 1], 1, ((0,), (1,)), (2,), False),
        (8, [2, 2], 2, ((0, 1), (2, 3)), (4, 5), False),
    ],
)
def test_gpus_go_to_engines_first_then_to_the_trainer(
    num_gpus: int,
    sizes: list[int],
    trainer: int,
    engines: tuple[tuple[int, ...], ...] | None,
    trainer_gpus: tuple[int, ...] | None,
    is_shared: bool,
) -> None:
    shares = share_gpus(num_gpus, sizes, trainer)
    assert (shares.engines, shares.trainer, shares.is_shared) == (engines, trainer_gpus, is_shared)


@pytest.mark.parametrize(("num_gpus", "sizes"), [(2, [1, 1]), (1, [2])])
def test_too_few_gpus_is_an_error(num_gpus: int, sizes: list[int]) -> None:
    with pytest.raises(PlanError, match=f"need 3 GPUs, this machine has {num_gpus}"):
        share_gpus(num_gpus, sizes, 1)


def test_gpus_are_named_in_the_environment_and_one_gpu_means_gloo() -> None:
    plan = _plan(num_gpus=5)
    visible = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in [*plan.engines, plan.trainer]]
    assert visible == ["0", "1", "2", "3", "4"]
    assert "OMP_NUM_THREADS" not in plan.trainer.env
    assert EngineConfig.model_validate_json(plan.files["engine.json"]).weight_broadcast.backend == (
        "auto"
    )
    shared = TrainerConfig.model_validate_json(_plan(num_gpus=1).files["trainer.json"])
    assert shared.weight_broadcast.backend == "gloo"
    chosen = _plan(num_gpus=1, weight_broadcast={"backend": "nccl"}).files["trainer.json"]
    assert TrainerConfig.model_validate_json(chosen).weight_broadcast.backend == "nccl"
