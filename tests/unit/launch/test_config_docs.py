"""docs/configuration.md says what the models say, and every key says something."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from launch.config import RunConfig
from launch.config_docs import configuration_page
from launch.settings.errors import dotted
from launch.settings.fields import leaves
from launch.tiny_model_config import TinyModelConfig
from protocol.config import Config

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_page_is_current() -> None:
    assert PAGE.read_text() == configuration_page(), (
        "out of date: muster config docs > docs/configuration.md"
    )


@pytest.mark.parametrize("root", [RunConfig, EngineConfig, TinyModelConfig])
def test_every_key_has_a_description(root: type[Config]) -> None:
    missing = [dotted(leaf.key) for leaf in leaves(root) if not leaf.field.description]
    assert missing == []
