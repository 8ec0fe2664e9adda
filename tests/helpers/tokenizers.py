"""Small tokenizers for tests."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.rollouts.tokenizer import PromptTokenizer


def letters_tokenizer(directory: Path) -> PromptTokenizer:
    """A token a letter."""
    vocabulary = {char: i for i, char in enumerate(["?", *string.ascii_letters, " ", ":"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory / "tokenizer.json"))
    return PromptTokenizer(directory)
