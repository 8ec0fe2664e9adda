"""What a run on this machine starts, as data. Pure: config and facts in, plan out.

`muster run --dry-run` shows exactly this; `launch.local_run` carries it out.

Rules: nothing secret is in a plan (tokens travel by the environment that the launcher adds);
every process of ours gets its whole config as one resolved file, `plan/<process>.json`; what
differs between engines of a run (group, index, life, port) is on their command line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.process_files import process_files
from launch.processes import ProcessSpec
from launch.relaunch import RelaunchPolicy
from launch.run_secrets import ADMIN_TOKEN_VARIABLE
from slurm.topology import EnginePlace, Topology, build_topology

if TYPE_CHECKING:
    from launch.config import RunConfig

_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
# Threads of one process would fight with those of the other six.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_NO_PROXY = "127.0.0.1,localhost"
# Flags of vllm-router: it starts empty, the admin plane fills it; `/ready` is the engines' gate.
_ROUTER_FLAGS = (
    *("--policy", "consistent_hash"),
    *("--worker-startup-timeout-secs", "5", "--worker-startup-check-interval", "1"),
    *("--health-check-endpoint", "/ready", "--health-check-interval-secs", "1"),
    *("--health-check-timeout-secs", "2"),
    *("--health-failure-threshold", "2", "--health-success-threshold", "1"),
    *("--cb-failure-threshold", "5", "--cb-timeout-duration-secs", "5"),
    *("--cb-success-threshold", "1"),
    # Our client tries again by itself, and must see which engine failed.
    *("--request-timeout-secs", "14400", "--disable-retries", "--log-level", "warning"),
)


class PlanError(ValueError):
    """The config asks for something that this machine does not have."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the plan depends on beside the config."""

    run_id: str
    output_dir: Path
    model_dir: Path
    scratch_dir: Path
    python: str
    ports: Mapping[str, int]
    num_gpus: int
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run starts. `engines` is in the order of `topology.engines`.

    `files` maps names under `plan/` to their text.
    """

    run_id: str
    output_dir: Path
    topology: Topology
    router: ProcessSpec
    engines: tuple[ProcessSpec, ...]
    trainer: ProcessSpec
    orchestrator: ProcessSpec
    files: Mapping[str, str]
    policy: RelaunchPolicy
    stop_grace_s: float

    def members(self) -> dict[int, list[ProcessSpec]]:
        """Engine processes by group, by index."""
        found: dict[int, list[ProcessSpec]] = {group: [] for group in self.topology.groups}
        for spec, place in zip(self.engines, self.topology.engines, strict=True):
            found[place.slot.group].append(spec)
        return found


@dataclass(frozen=True, slots=True)
class GpuShares:
    """Which GPUs each process sees; None leaves that to the machine (no GPU, or one for all)."""

    engines: tuple[tuple[int, ...], ...] | None
    trainer: tuple[int, ...] | None
    is_shared: bool


def share_gpus(num_gpus: int, engine_sizes: Sequence[int], trainer_size: int) -> GpuShares:
    """GPUs of each engine, then of the trainer, in order; one GPU is shared by all.

    Raises PlanError when there are GPUs, more than one is needed, and they do not suffice.
    """
    needed = sum(engine_sizes) + trainer_size
    if num_gpus == 0:
        return GpuShares(None, None, is_shared=False)
    if num_gpus >= needed:
        starts = [sum(engine_sizes[:number]) for number in range(len(engine_sizes))]
        engines = tuple(
            tuple(range(start, start + size))
            for start, size in zip(starts, engine_sizes, strict=True)
        )
        return GpuShares(engines, tuple(range(sum(engine_sizes), needed)), is_shared=False)
    if num_gpus == 1 and max(engine_sizes) == 1 and trainer_size == 1:
        return GpuShares(None, None, is_shared=True)
    raise PlanError(
        f"{len(engine_sizes)} engines and {trainer_size} trainer ranks need {needed} GPUs, "
        f"this machine has {num_gpus}"
    )


def build_plan(config: RunConfig, facts: Facts) -> Plan:
    """The plan of `config` on the machine that `facts` describe. Raises PlanError."""
    deployment = config.deployment
    assert deployment.engine_groups is not None
    topology = build_topology(deployment.engine_groups, facts.ports, host=facts.host)
    engine_size = config.inference.tensor_parallel_size * config.inference.data_parallel_size
    num_ranks = config.trainer.num_ranks
    shares = share_gpus(facts.num_gpus, [engine_size] * len(topology.engines), num_ranks)
    relaunch = deployment.relaunch
    router = _router(facts, topology)
    engines = tuple(
        _engine(facts, place, shares.engines[number] if shares.engines else None)
        for number, place in enumerate(topology.engines)
    )
    trainer = _trainer(facts, topology, num_ranks, shares.trainer)
    orchestrator = _orchestrator(facts)
    files = process_files(config, facts, topology, is_gpu_shared=shares.is_shared)
    specs = [router, *engines, trainer, orchestrator]
    return Plan(
        run_id=facts.run_id,
        output_dir=facts.output_dir,
        topology=topology,
        router=router,
        engines=engines,
        trainer=trainer,
        orchestrator=orchestrator,
        files={
            **files,
            "run.json": config.model_dump_json(indent=1) + "\n",
            "plan.json": _summary(facts, topology, specs),
        },
        policy=RelaunchPolicy(
            backoff_initial_s=relaunch.backoff_initial_s,
            backoff_max_s=relaunch.backoff_max_s,
            max_restarts=relaunch.max_restarts,
            max_never_healthy=relaunch.max_never_healthy,
            healthy_after_s=relaunch.healthy_after_s,
            startup_timeout_s=relaunch.startup_timeout_s,
        ),
        stop_grace_s=relaunch.stop_grace_s,
    )


def _router(facts: Facts, topology: Topology) -> ProcessSpec:
    argv = (
        *(facts.python, "-m", "vllm_router.launch_router"),
        *("--host", topology.host, "--port", str(topology.router_port)),
        *_ROUTER_FLAGS,
        *("--prometheus-port", str(topology.router_metrics_port)),
        *("--request-id-headers", "x-session-id"),
    )
    proxies = {name: None for upper in _PROXY_VARIABLES for name in (upper, upper.lower())}
    return ProcessSpec(
        name="router",
        argv=argv,
        log=_log(facts, "router"),
        role="router",
        # It answers to anybody: it gets no secret to give away.
        env={**proxies, ADMIN_TOKEN_VARIABLE: None, "TMPDIR": str(facts.scratch_dir)},
    )


def _engine(facts: Facts, place: EnginePlace, gpus: Sequence[int] | None) -> ProcessSpec:
    slot = place.slot
    flags = ("--group", str(slot.group), "--index", str(slot.index), "--port", str(place.port))
    name = f"engine-{slot.engine_id}"
    env = _environment(facts, gpus)
    # Sockets between the processes of one engine: their paths have about 100 characters.
    env["VLLM_RPC_BASE_PATH"] = str(facts.scratch_dir)
    return ProcessSpec(
        name=name,
        argv=(*_muster(facts, "engine"), *flags),
        log=_log(facts, name),
        role="engine",
        env=env,
        group=slot.group,
        index=slot.index,
        takes_life=True,
    )


def _trainer(
    facts: Facts, topology: Topology, num_ranks: int, gpus: Sequence[int] | None
) -> ProcessSpec:
    """One rank runs as a plain process (an agent beside it would cost a second and 200 MB)."""
    env = _environment(facts, gpus)
    port = str(topology.rendezvous_port)
    argv = _muster(facts, "trainer")
    if num_ranks == 1:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": topology.host, "MASTER_PORT": port}
    else:
        agent = (
            *("-m", "torch.distributed.run", "--nnodes", "1"),
            *("--nproc-per-node", str(num_ranks), "--max-restarts", "0"),
            *("--master-addr", topology.host, "--master-port", port),
        )
        argv = (facts.python, *agent, *argv[1:])
    return ProcessSpec(
        name="trainer", argv=argv, log=_log(facts, "trainer"), role="trainer", env=env
    )


def _orchestrator(facts: Facts) -> ProcessSpec:
    return ProcessSpec(
        name="orchestrator",
        argv=_muster(facts, "orchestrator"),
        log=_log(facts, "orchestrator"),
        role="orchestrator",
        env=_environment(facts, None),
        has_console=True,
    )


def _muster(facts: Facts, process: str) -> tuple[str, ...]:
    config = facts.output_dir / "plan" / f"{process}.json"
    return (facts.python, "-m", "launch.cli", process, "@", str(config))


def _environment(facts: Facts, gpus: Sequence[int] | None) -> dict[str, str | None]:
    """Variables of one of our processes, secrets aside."""
    env: dict[str, str | None] = {
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(facts.scratch_dir),
        "NO_PROXY": _NO_PROXY,
        "no_proxy": _NO_PROXY,
    }
    if facts.num_gpus == 0:
        env |= dict.fromkeys(_THREAD_VARIABLES, "1")
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return env


def _log(facts: Facts, name: str) -> Path:
    return facts.output_dir / "logs" / name


def _summary(facts: Facts, topology: Topology, specs: Sequence[ProcessSpec]) -> str:
    """plan.json: what people and tools want to know about a run's layout."""
    summary = {
        "run_id": facts.run_id,
        "router_url": topology.router_url,
        "orchestrator_url": topology.orchestrator_url,
        "trainer_url": topology.trainer_url,
        "admin_base_url": topology.admin_base_urls,
        "admin_engine_groups": topology.admin_engine_groups,
        "ports": dict(facts.ports),
        "processes": [
            {
                "name": spec.name,
                "command": shlex.join(spec.command(0)),
                "env": dict(spec.env),
                "log": f"{spec.log}.0.log",
            }
            for spec in specs
        ],
    }
    return json.dumps(summary, indent=1) + "\n"
