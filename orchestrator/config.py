"""Config of the orchestrator. Importable without torch and vLLM.

Root of `muster orchestrator @ plan/orchestrator.json`, and the `[orchestrator]` section of a run's
TOML; what a whole run shares (run id, model, weight broadcast, places) is filled in by the
launcher. Timeouts nest: one probe < one admin call < one phase < one update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from orchestrator.rollouts.config import RolloutsConfig
from protocol.config import (
    BaseUrl,
    Config,
    ModelConfig,
    Port,
    Seconds,
    WandbConfig,
    WeightBroadcastConfig,
)
