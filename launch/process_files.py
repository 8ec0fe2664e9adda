"""The resolved config file of each process of a run on this machine. Pure.

What a user wrote, with what only the launcher knows filled in: ids, addresses, directories.
Every file is checked as the process will check it, so a plan that cannot start is no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import EngineConfig
from orchestrator.config import OrchestratorConfig
from trainer.config import TrainerConfig

if TYPE_CHECKING:
    from pydantic import BaseModel

    from launch.config import RunConfig
    from slurm.topology import Topology


class RunFacts(Protocol):
    """What the files depend on beside the config and the topology."""

    @property
    def run_id(self) -> str:
        """Id of the run."""

    @property
    def output_dir(self) -> Path:
        """Directory of the run, absolute."""

    @property
    def model_dir(self) -> Path:
        """Directory of the policy, absolute."""


def process_files(
    config: RunConfig, facts: RunFacts, topology: Topology, *, is_gpu_shared: bool
) -> dict[str, str]:
    """Text of `engine.json`, `trainer.json` and `orchestrator.json`.

    `is_gpu_shared`: several processes use one GPU, which NCCL refuses; weights then travel by Gloo
    unless the user chose.
    """
    broadcast = config.weight_broadcast.model_dump(mode="json")
    if is_gpu_shared and broadcast["backend"] == "auto":
        broadcast["backend"] = "gloo"
    shared: dict[str, Any] = {
        "run_id": facts.run_id,
        "output_dir": str(facts.output_dir),
        "weight_broadcast": broadcast,
        "host": topology.host,
    }
    model = {**config.model.model_dump(mode="json"), "path": str(facts.model_dir)}
    client = {
        **config.orchestrator.model.client.model_dump(mode="json"),
        "base_url": topology.router_url,
        "admin_base_url": topology.admin_base_urls,
        "admin_engine_groups": topology.admin_engine_groups,
    }
    engine = {
        **shared,
        "model": model,
        "inference": config.inference.model_dump(mode="json"),
    }
    trainer = {"model": model, "port": topology.trainer_port}
    orchestrator = {
        "model": {**model, "client": client},
        "port": topology.orchestrator_port,
        "trainer_url": topology.trainer_url,
        "has_launcher": True,
        "wandb": config.wandb.model_dump(mode="json"),
    }
    return {
        "engine.json": _text(EngineConfig, engine),
        "trainer.json": _text(TrainerConfig, _filled(config.trainer, shared, trainer)),
        "orchestrator.json": _text(
            OrchestratorConfig, _filled(config.orchestrator, shared, orchestrator)
        ),
    }


def _filled(section: BaseModel, *layers: Mapping[str, Any]) -> dict[str, Any]:
    values = section.model_dump(mode="json")
    for layer in layers:
        values.update(layer)
    return values


def _text(kind: type[BaseModel], values: Mapping[str, Any]) -> str:
    return kind.model_validate(values).model_dump_json(indent=1) + "\n"
