"""Deployment: counts and lists agree, errors say what disagrees, dumps read back."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slurm.config import DeploymentConfig, RelaunchConfig, SlurmConfig


def test_default_is_two_groups_of_one() -> None:
    config = DeploymentConfig()
    assert config.engine_groups == [0, 1]
    assert (config.num_groups, config.engines_per_group) == (2, 1)


def test_counts_make_the_list_and_the_list_makes_the_counts() -> None:
    assert DeploymentConfig(num_groups=2, engines_per_group=2).engine_groups == [0, 0, 1, 1]
    config = DeploymentConfig(engine_groups=[0, 0, 1])
    assert (config.num_groups, config.engines_per_group) == (2, None)
    assert DeploymentConfig(engine_groups=[0, 1, 0, 1]).engines_per_group == 2


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 0, 1], [0]])
def test_a_dumped_config_reads_back_as_itself(groups: list[int]) -> None:
    config = DeploymentConfig(engine_groups=groups)
    assert DeploymentConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "slurm"}, 'type = "slurm" is not part of this version'),
        ({"type": "cloud"}, "Input should be 'local'"),
        ({"engine_groups": []}, "must name every group from 0"),
        ({"engine_groups": [0, 2]}, "must name every group from 0"),
        ({"engine_groups": [1, 2]}, "must name every group from 0"),
        ({"engine_groups": [0, 1], "num_groups": 3}, "num_groups = 3 disagrees"),
        (
            {"engine_groups": [0, 0, 1], "engines_per_group": 2},
            "engines_per_group = 2 disagrees",
        ),
        ({"first_port": 9000, "last_port": 9002}, "9000 to 9002 are 3, this run needs 7"),
        ({"first_port": 9000, "last_port": 8000}, "are 0, this run needs 7"),
        ({"num_groups": 0}, "greater than or equal to 1"),
        (
            {"relaunch": {"backoff_initial_s": 5, "backoff_max_s": 1}},
            "backoff_max_s = 1 is below backoff_initial_s = 5",
        ),
    ],
)
def test_impossible_deployments_are_errors(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeploymentConfig.model_validate(values)


def test_every_field_is_described() -> None:
    for config in (DeploymentConfig, RelaunchConfig, SlurmConfig):
        assert all(field.description for field in config.model_fields.values())
