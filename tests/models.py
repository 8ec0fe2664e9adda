"""Tiny random models for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 271


def build_tiny_qwen3(
    path: Path, seed: int, *, tie_word_embeddings: bool = True, head_dim: int = 16
) -> Path:
    """A random Qwen3 without tokenizer (hidden 64, 2 layers); the same seed, the same weights.
    vLLM's attention for CPUs wants a `head_dim` of 32 or more."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path
