"""Order of the sources, spelling of flags, and what a run's config makes of shared values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.config import RunConfig, load_run_config
from launch.machine import Machine
from launch.settings.errors import ConfigError
from launch.settings.render import to_json, to_schema, to_toml


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.toml").write_text("seed = 1\n[orchestrator]\nmax_steps = 10\n")
    (tmp_path / "b.toml").write_text("[orchestrator]\nmax_steps = 20\n[wandb]\ntags = ['b']\n")
    return tmp_path


def load(
    argv: str, folder: Path = Path(), environ: Mapping[str, str] | None = None, cuda: bool = False
) -> RunConfig:
    machine = Machine(has_cuda=cuda)
    return load_run_config(argv.split(), environ=environ or {}, directory=folder, machine=machine)[
        0
    ]


def test_defaults() -> None:
    assert load("") == RunConfig()


def test_later_files_win_and_keep_the_rest(folder: Path) -> None:
    config = load("@ a.toml @ b.toml", folder)
    assert (config.seed, config.orchestrator.max_steps) == (1, 20)
    assert load("@ b.toml @a.toml", folder).orchestrator.max_steps == 10


def test_environment_beats_files_and_flags_beat_it(folder: Path) -> None:
    environ = {"MUSTER_ORCHESTRATOR__MAX_STEPS": "30", "MUSTER_WANDB__TAGS": "x, y"}
    config = load("@ a.toml @ b.toml", folder, environ)
    assert config.orchestrator.max_steps == 30
    assert config.wandb.tags == ["x", "y"]
    # The place of a flag does not matter.
    config = load("--orchestrator.max-steps 40 @ a.toml @ b.toml", folder, environ)
    assert config.orchestrator.max_steps == 40


def test_secrets_and_other_variables_are_no_settings() -> None:
    environ = {"MUSTER_ADMIN_TOKEN": "s", "MUSTER_API_KEY": "k", "HOME": "/root"}
    config = load("", environ=environ)
    assert config == RunConfig()
    assert "MUSTER" not in to_json(config)


@pytest.mark.parametrize(
    "argv",
    [
        "--orchestrator.max-steps 7",
        "--orchestrator.max_steps 7",
        "--orchestrator.max-steps=7",
        "--orchestrator.max_steps=7",
        "--orchestrator.max-steps 3 --orchestrator.max_steps 7",
        "--trainer.max-steps 7",
    ],
)
def test_spellings_of_a_flag(argv: str) -> None:
    config = load(argv)
    assert (config.orchestrator.max_steps, config.trainer.max_steps) == (7, 7)


@pytest.mark.parametrize(
    "argv",
    [
        "--deployment.engine-groups 0 0 1 1",
        "--deployment.engine-groups 0 0 --deployment.engine_groups=1 --deployment.engine-groups 1",
        "--deployment.engine-groups [0,0,1,1]",
        "--orchestrator.model.client.admin-engine-groups 0 0 1 1",
    ],
)
def test_lists_are_several_values(argv: str) -> None:
    config = load(argv)
    assert config.deployment.engine_groups == [0, 0, 1, 1]
    assert config.orchestrator.model.client.admin_engine_groups == [0, 0, 1, 1]


def test_empty_list_and_nothing() -> None:
    config = load("--wandb.tags [] --wandb.entity none --wandb.project none")
    assert (config.wandb.tags, config.wandb.entity) == ([], None)
    # A key that cannot be empty takes the word as it is.
    assert config.wandb.project == "none"


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ("--trainer.checkpoint.resume", True),
        ("--trainer.checkpoint.resume true", True),
        ("--trainer.checkpoint.resume=false", False),
        ("--trainer.checkpoint.resume false", False),
        ("--no-trainer.checkpoint.resume", False),
        ("--trainer.checkpoint.no-resume --seed 3", False),
    ],
)
def test_true_and_false(argv: str, value: bool) -> None:
    assert load(argv).trainer.checkpoint.resume is value


def test_tables_take_any_key() -> None:
    names = ("swap-space 4", "quantization fp8", "enable-lora")
    extra = load(" ".join(f"--inference.extra-args.{name}" for name in names)).inference.extra_args
    assert extra == {"swap-space": 4, "quantization": "fp8", "enable-lora": True}


def test_a_text_that_looks_like_a_number_stays_a_text() -> None:
    assert load("--name 60").name == "60"


def test_shared_values_reach_every_process() -> None:
    config = load("--model.path m --seed 5 --output-dir out --weight-broadcast.bucket-mb 8")
    assert config.trainer.model.path == config.orchestrator.model.path == "m"
    assert config.trainer.seed == config.orchestrator.rollouts.env_seed == 5
    assert config.trainer.output_dir == config.orchestrator.output_dir == Path("out")
    assert config.trainer.weight_broadcast == config.weight_broadcast
    assert config.orchestrator.weight_broadcast.bucket_mb == 8


def test_repeating_a_shared_value_is_no_contradiction() -> None:
    assert load("--seed 5 --trainer.seed 5").trainer.seed == 5


def test_prompts_may_have_a_seed_of_their_own() -> None:
    config = load("--seed 5 --orchestrator.rollouts.env-seed 6")
    assert (config.trainer.seed, config.orchestrator.rollouts.env_seed) == (5, 6)


def test_nccl_needs_cuda() -> None:
    assert load("--weight-broadcast.backend nccl", cuda=True).weight_broadcast.backend == "nccl"
    with pytest.raises(ConfigError, match="no CUDA device"):
        load("--weight-broadcast.backend nccl")


@pytest.mark.parametrize(("render", "name"), [(to_json, "r.json"), (to_toml, "r.toml")])
def test_a_resolved_config_reads_back_as_itself(render: object, name: str, tmp_path: Path) -> None:
    config = load("--deployment.engine-groups 0 0 1 --wandb.tags a --trainer.optimizer.beta1 0.8")
    (tmp_path / name).write_text(render(config))  # type: ignore[operator]
    assert load(f"@ {name}", tmp_path) == config


def test_schema_has_every_section_and_forbids_others() -> None:
    schema = json.loads(to_schema(RunConfig))
    assert set(schema["properties"]) >= {
        *("model", "trainer", "orchestrator", "inference"),
        *("weight_broadcast", "deployment", "slurm", "wandb"),
    }
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[3].glob("configs/**/*.toml")))
def test_configs_that_we_ship_are_valid(path: Path) -> None:
    assert load(f"@ {path}").name == path.stem
