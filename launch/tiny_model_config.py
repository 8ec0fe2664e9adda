"""Settings of `muster tiny-model`. Importable without torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from protocol.config import Config


class TinyModelConfig(Config):
    """Which tiny model to build, and where."""

    output_dir: Path = Field(
        Path("outputs/tiny-model"), description="Directory that the model and tokenizer go to."
    )
    seed: int = Field(0, ge=0, description="Seed of the weights and of the warm-up.")
    num_threads: int = Field(
        1, ge=1, description="CPU threads of the warm-up. Other numbers may change the weights."
    )
