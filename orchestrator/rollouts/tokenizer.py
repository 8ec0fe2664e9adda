"""Text to tokens and back, with the model's own tokenizer files and no torch.

A prompt is rendered with the model's chat template (where it has one) and encoded once. A
completion is only ever decoded, for the reward: its token ids go from the engine to the trainer
untouched, because encoding decoded text again may give other tokens than those that were sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers


class TokenizerError(ValueError):
    """The tokenizer files of a model are missing or broken."""


class PromptTokenizer:
    """Tokenizer of one model directory."""

    def __init__(self, model_dir: Path) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template, if there is one."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"no tokenizer.json in {model_dir}")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        config = _read_json(model_dir / "tokenizer_config.json")
        self._variables = {
            name: _token_text(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name) is not None
        }
        self._template = _load_template(model_dir, config)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode_prompt(self, user: str, system: str | None = None) -> list[int]:
        """Token ids of one turn, up to where the answer begins."""
        if self._template is None:
            text = user if system is None else f"{system}\n{user}"
            return list(self._tokenizer.encode(text).ids)
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": user})
        text = self._template.render(
            messages=messages, add_generation_prompt=True, **self._variables
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text: no template, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def token_id(self, token: str) -> int:
        """Id of one token by its exact name. Raises TokenizerError when there is none."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerError(f"the tokenizer has no token {token!r}")
        return int(found)

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return loaded


def _token_text(value: object) -> str:
    """Special tokens are written as plain text or as an object with `content`."""
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _load_template(model_dir: Path, config: dict[str, Any]) -> jinja2.Template | None:
    path = model_dir / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{model_dir}: several named chat templates; keep one")
    # Same switches as the libraries that wrote the template: whitespace is part of the prompt.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
