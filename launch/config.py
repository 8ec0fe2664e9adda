"""Config of a whole run, and how its sections are made to agree.

    files, environment, flags --share--> one tree --validate--> RunConfig --check--> ready to plan

What all processes must agree on is written once, at the top level; a process may repeat it, not
contradict it. What only the launcher knows (ports, URLs, run ids of this launch) cannot be set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from engine.config import InferenceConfig
from launch.machine import Machine, this_machine
from launch.settings.argv import CommandLine
from launch.settings.errors import ConfigError, Problem, dotted, shown
from launch.settings.fields import Key, leaves, lookup
from launch.settings.load import load
from launch.settings.sources import Layer
from orchestrator.config import OrchestratorConfig
from protocol.config import Config, ModelConfig, WandbConfig, WeightBroadcastConfig
from slurm.config import DeploymentConfig, SlurmConfig
from trainer.config import TrainerConfig


class RunConfig(Config):
    """One run: a model, a trainer, an orchestrator, engines, and where they live."""

    name: str = Field(
        "muster",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run; its id is this and some random digits.",
    )
    run_id: str | None = Field(
        None, min_length=1, description="Id of the run. Empty: the launcher makes one."
    )
    output_dir: Path = Field(
        Path("outputs/run"), description="Directory that everything of this run is written to."
    )
    seed: int = Field(
        0,
        ge=0,
        description="Seed of the trainer, and of the prompts unless they have their own. Sampling "
        "has `orchestrator.rollouts.sampling_seed`.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="The policy.")
    trainer: TrainerConfig = Field(
        default_factory=TrainerConfig, description="How the policy is trained."
    )
    orchestrator: OrchestratorConfig = Field(
        default_factory=OrchestratorConfig,
        description="What is sampled, and how the engines are watched over.",
    )
    inference: InferenceConfig = Field(
        default_factory=InferenceConfig, description="How every engine serves."
    )
    weight_broadcast: WeightBroadcastConfig = Field(
        default_factory=WeightBroadcastConfig,
        description="How weights travel from the trainer to the engines.",
    )
    deployment: DeploymentConfig = Field(
        default_factory=DeploymentConfig, description="Where the processes are placed."
    )
    slurm: SlurmConfig = Field(
        default_factory=SlurmConfig, description="What a batch job would ask for."
    )
    wandb: WandbConfig = Field(
        default_factory=WandbConfig, description="Where the numbers of the run go."
    )

    @model_validator(mode="after")
    def _groups_are_the_same(self) -> Self:
        client = self.orchestrator.model.client
        if client.admin_engine_groups is None:
            client.admin_engine_groups = self.deployment.engine_groups
        return self


_PROCESSES = ("trainer", "orchestrator", "inference")
# Written once for all processes; each of them has it under the same name.
_SHARED = ("run_id", "output_dir", "seed", "model", "weight_broadcast", "wandb")
# One value under two names, since each process must be able to run alone.
_SAME: tuple[tuple[Key, Key], ...] = (
    (("orchestrator", "max_steps"), ("trainer", "max_steps")),
    (("orchestrator", "rollouts", "temperature"), ("trainer", "loss", "temperature")),
    (
        ("deployment", "engine_groups"),
        ("orchestrator", "model", "client", "admin_engine_groups"),
    ),
)
# Follows the other where it is absent, and may differ.
_FOLLOWS: tuple[tuple[Key, Key], ...] = ((("seed",), ("orchestrator", "rollouts", "env_seed")),)
# Chosen by the launcher for each run; a value from a user would be ignored, so it is refused.
_LAUNCHER_KEYS: tuple[Key, ...] = (
    ("trainer", "host"),
    ("trainer", "port"),
    ("orchestrator", "host"),
    ("orchestrator", "port"),
    ("orchestrator", "trainer_url"),
    ("orchestrator", "has_launcher"),
    ("orchestrator", "model", "client", "base_url"),
    ("orchestrator", "model", "client", "admin_base_url"),
)


def is_repeated(key: Key) -> bool:
    """Whether `key` of a process says again what the top level says for all."""
    return key[0] in _PROCESSES and key[1] in _SHARED and lookup(RunConfig, key[1:]) is not None


def load_run_config(
    argv: Sequence[str],
    switches: frozenset[str] = frozenset(),
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path = Path(),
    machine: Machine | None = None,
) -> tuple[RunConfig, CommandLine]:
    """The config of `muster run`. Raises ConfigError with every mistake that can be seen."""
    facts = machine or this_machine()
    try:
        return load(
            RunConfig,
            argv,
            environ=os.environ if environ is None else environ,
            directory=directory,
            switches=switches,
            prepare=share,
            check=lambda config, origins: check_run(config, facts, origins),
        )
    except ConfigError as error:
        raise ConfigError(_once(error.problems)) from None


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """The problems without those of a shared value that are said of its original already."""
    renames = [(f"{dotted(other)} ", f"{dotted(one)} ") for one, other in (*_SAME, *_FOLLOWS)]
    renames += [(f"{process}.", "") for process in _PROCESSES]
    known = set(problems)

    def is_copy(problem: Problem) -> bool:
        return any(
            problem.text.startswith(head)
            and Problem(problem.where, original + problem.text.removeprefix(head)) in known
            for head, original in renames
        )

    return [problem for problem in problems if not is_copy(problem)]


def share(layer: Layer) -> list[Problem]:
    """Fill shared values into the sections of the processes where they are absent.

    Returns a problem for every value that a process contradicts, and for every key that is not the
    user's to set.
    """
    problems = [
        Problem(
            layer.origins[key],
            f"{dotted(key)} = {shown(_value(layer, key))}: the launcher chooses it for each run; "
            f"set it for a process that you start alone",
        )
        for key in _LAUNCHER_KEYS
        # A resolved config has them all, as they are by default.
        if key in layer.origins and _value(layer, key) != _default(key)
    ]
    written = dict(layer.origins)
    for leaf in leaves(RunConfig):
        if leaf.key[0] not in _SHARED:
            continue
        for process in _PROCESSES:
            target = (process, *leaf.key)
            if lookup(RunConfig, target) is not None:
                problems += _agree(layer, written, leaf.key, target)
    for one, other in _FOLLOWS:
        if other not in written:
            problems += _agree(layer, written, one, other)
    for one, other in _SAME:
        source, target = (one, other) if one in written else (other, one)
        if source in written:
            problems += _agree(layer, written, source, target)
    return problems


def _agree(layer: Layer, written: Mapping[Key, str], source: Key, target: Key) -> list[Problem]:
    """Make `target` what `source` is, or say that somebody wrote something else there."""
    value = _value(layer, source)
    if value is None or _is_blocked(layer, target):
        return []
    is_written = source in written
    if target in written and _value(layer, target) is not None:
        if _value(layer, target) == value:
            return []
        authors = dict.fromkeys(written[key] for key in (target, source) if key in written)
        return [
            Problem(
                ", ".join(authors),
                f"{dotted(target)} = {shown(_value(layer, target))} disagrees with "
                f"{dotted(source)} = {shown(value)}{'' if is_written else ' (default)'}",
            )
        ]
    if (source, target) == _SAME[-1]:
        return []  # not copied, so that a mistake in it is said once; RunConfig fills it in
    layer.put(target, value, layer.origins.get(source, ""))
    if not is_written:
        del layer.origins[target]
    return []


def _value(layer: Layer, key: Key) -> Any:
    """What a key holds: as written, else the default of a whole run."""
    place: Any = layer.tree
    for name in key:
        if not isinstance(place, dict) or name not in place:
            return _default(key)
        place = place[name]
    return place


def _default(key: Key) -> Any:
    section = RunConfig
    for name in key[:-1]:
        section = section.model_fields[name].annotation  # type: ignore[assignment]
    value = section.model_fields[key[-1]].get_default(call_default_factory=True)
    return str(value) if isinstance(value, Path) else value


def _is_blocked(layer: Layer, key: Key) -> bool:
    """Whether something that is no section stands where a section of `key` belongs."""
    place: Any = layer.tree
    for name in key[:-1]:
        if not isinstance(place, dict):
            return True
        place = place.get(name, {})
    return not isinstance(place, dict)


def check_run(
    config: RunConfig, machine: Machine, origins: Mapping[Key, str] | None = None
) -> list[Problem]:
    """What is wrong with a config whose sections are right, each looked at alone."""
    problems: list[Problem] = []

    def report(key: Key, text: str) -> None:
        problems.append(Problem((origins or {}).get(key, ""), text))

    if config.weight_broadcast.backend == "nccl" and not machine.has_cuda:
        report(
            ("weight_broadcast", "backend"),
            'weight_broadcast.backend = "nccl": this machine has no CUDA device; '
            'expected "gloo" or "auto"',
        )
    router = config.orchestrator.model.client.router
    if router != "vllm":
        report(
            ("orchestrator", "model", "client", "router"),
            f'orchestrator.model.client.router = "{router}": `muster run` starts a vllm-router in '
            'regular mode; expected "vllm"',
        )
    num_groups = config.deployment.num_groups or 0
    minimum = config.orchestrator.groups.min_serving_groups
    if minimum > num_groups:
        report(
            ("orchestrator", "groups", "min_serving_groups"),
            f"orchestrator.groups.min_serving_groups = {minimum} is above the number of groups "
            f"that are started, deployment.num_groups = {num_groups}",
        )
    batch = config.orchestrator.rollouts.batch_size
    if batch < config.trainer.num_ranks:
        report(
            ("trainer", "num_ranks"),
            f"trainer.num_ranks = {config.trainer.num_ranks} is above the samples of one batch, "
            f"orchestrator.rollouts.prompts_per_step x group_size = {batch}",
        )
    lease, longest = config.orchestrator.groups.lease_s, config.inference.max_lease_s
    if lease > longest:
        report(
            ("orchestrator", "groups", "lease_s"),
            f"orchestrator.groups.lease_s = {lease:g} must not be above "
            f"inference.max_lease_s = {longest:g}",
        )
    return problems
