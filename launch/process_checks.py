"""What a process that is started alone needs to be told, and the launcher tells it otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.settings.errors import Problem
from launch.settings.fields import Key


def check_process(config: Any, origins: Mapping[Key, str]) -> list[Problem]:
    """Problems of a process config whose values are right, each looked at alone."""
    if type(config).__name__ == "OrchestratorConfig" and not config.model.client.admin_base_url:
        return [
            Problem(
                origins.get(("model", "client", "admin_base_url"), ""),
                "model.client.admin_base_url is required: the admin URL of each engine",
            )
        ]
    return []
