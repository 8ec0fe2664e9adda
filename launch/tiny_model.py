"""`muster tiny-model`: a model that is small enough to learn on a CPU while one watches.

A Qwen3 of 0.3 M parameters is taught the reverse-text task for some seconds, and then half of it
is taken back: in the second part of the warm-up every other answer is the word as it stands. The
result reverses or repeats, as by the toss of a coin. Reinforcement learning has something to find
within a few steps, and the mean reward of about one half has far to go.

The tokenizer is byte-level, one token a byte, so that a letter is a token; the instruction of the
task is one token more. torch is imported only when a model is built.
"""

from __future__ import annotations

import importlib.metadata
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.model_dir import ModelBuildError, Progress, ensure_model_dir
from launch.tiny_model_config import TinyModelConfig
from orchestrator.rollouts.reverse_text import INSTRUCTION, ReverseText
from orchestrator.rollouts.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

_SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>")
_END, _PAD = "<|end|>", "<|pad|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 264,
    "max_position_embeddings": 512,
}
_WARM_UP = {
    "steps_reversed": 300,
    "steps_mixed": 100,
    "batch_size": 64,
    "learning_rate": 3e-3,
    "repeated_fraction": 0.5,
}
# Of the environment that the warm-up draws words from; far from the seeds of runs.
_WORDS_SEED = 1_000_003
_NUM_GRADED = 256
# Below it there is hardly anything to find, above it hardly anything to gain.
_USEFUL_REWARD = (0.25, 0.7)
_MAX_COMPLETION_TOKENS = 12
_IGNORE = -100


def run(config: TinyModelConfig) -> int:
    """Entry of the command; exit code."""
    try:
        if config.kind == "smollm2":
            from launch.smollm2 import ensure_smollm2

            ensure_smollm2(config.output_dir, _print)
        else:
            ensure_tiny_model(config.output_dir, config.seed, _print)
    except ModelBuildError as error:
        print(f"muster tiny-model: {error}", file=sys.stderr)
        return 1
    return 0


def ensure_tiny_model(target: Path, seed: int, progress: Progress | None = None) -> Path:
    """Directory with the tiny model of `seed`, built unless an equal one is there."""
    recipe = {
        "kind": "tiny",
        "seed": seed,
        "shape": _SHAPE,
        "warm_up": _WARM_UP,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "tokenizers")
        },
    }

    def build(directory: Path) -> dict[str, Any]:
        return _build(directory, seed, progress or _silent)

    return ensure_model_dir(target, recipe, build, progress or _silent)


def _print(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    del line


def _build(directory: Path, seed: int, progress: Progress) -> dict[str, Any]:
    """Write tokenizer and model; facts for the manifest."""
    import torch
    from transformers.utils import logging as hf_logging

    started_at = time.monotonic()
    num_threads = torch.get_num_threads()
    # One thread: sums are added in one order, so that a seed gives the same weights every time.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _write_tokenizer(directory)
            tokenizer = PromptTokenizer(directory)
            model = _new_model(tokenizer)
            task = _Task(tokenizer)
            _warm_up(model, task, seed, progress)
            reward = _mean_reward(model, task, seed)
            if not _USEFUL_REWARD[0] <= reward <= _USEFUL_REWARD[1]:
                raise ModelBuildError(
                    f"mean reward {reward:.3f} after the warm-up of seed {seed} is outside "
                    f"{_USEFUL_REWARD[0]} to {_USEFUL_REWARD[1]}; choose another seed"
                )
            hf_logging.disable_progress_bar()
            model.save_pretrained(directory)
    finally:
        torch.set_num_threads(num_threads)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    duration_s = time.monotonic() - started_at
    progress(f"{num_parameters} parameters, mean reward {reward:.3f}, {duration_s:.1f} s")
    return {"num_parameters": num_parameters, "mean_reward": reward, "duration_s": duration_s}


def _write_tokenizer(directory: Path) -> None:
    """Byte-level tokenizer without merges, with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(INSTRUCTION, normalized=False)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=_SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def _new_model(tokenizer: PromptTokenizer) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_SHAPE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_id(_END),
        pad_token_id=tokenizer.token_id(_PAD),
    )
    return Qwen3ForCausalLM(config)


class _Task:
    """Words of the warm-up, as tokens."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self.tokenizer = tokenizer
        self.env = ReverseText(_WORDS_SEED)
        self.end = tokenizer.token_id(_END)
        self.pad = tokenizer.token_id(_PAD)

    def pair(self, index: int, is_reversed: bool) -> tuple[list[int], list[int]]:
        """Prompt and answer number `index`, the answer with its end token."""
        prompt = self.env.prompt(index)
        answer = prompt.answer if is_reversed else prompt.answer[::-1]
        answer_ids = self.tokenizer.encode_text(answer)
        return self.tokenizer.encode_prompt(prompt.user), [*answer_ids, self.end]


def _warm_up(model: Qwen3ForCausalLM, task: _Task, seed: int, progress: Progress) -> None:
    """Supervised steps: reversed words only, then a mixture with repeated ones."""
    import torch

    coin = random.Random(seed)
    num_steps = int(_WARM_UP["steps_reversed"] + _WARM_UP["steps_mixed"])
    batch_size = int(_WARM_UP["batch_size"])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(num_steps):
        rate = _WARM_UP["learning_rate"] * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        is_mixed = step >= _WARM_UP["steps_reversed"]
        # Words are numbered across seeds: two models do not see the same ones.
        first = (seed * num_steps + step) * batch_size
        pairs = [
            task.pair(index, not (is_mixed and coin.random() < _WARM_UP["repeated_fraction"]))
            for index in range(first, first + batch_size)
        ]
        loss = _cross_entropy(model, pairs, task.pad)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            progress(f"warm-up {step + 1}/{num_steps}: loss {loss.item():.3f}")


def _cross_entropy(
    model: Qwen3ForCausalLM, pairs: list[tuple[list[int], list[int]]], pad: int
) -> torch.Tensor:
    """Mean loss over the tokens of the answers. Padding on the right is never attended to."""
    import torch

    length = max(len(prompt) + len(answer) for prompt, answer in pairs)
    token_ids = torch.full((len(pairs), length), pad)
    targets = torch.full((len(pairs), length), _IGNORE)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    mask = targets != _IGNORE
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[mask]), targets[mask])


def _mean_reward(model: Qwen3ForCausalLM, task: _Task, seed: int) -> float:
    """Mean reward of completions sampled at temperature 1, as a run would see it at first."""
    import torch

    prompts = [task.env.prompt(-1 - index) for index in range(_NUM_GRADED)]
    rows = [task.tokenizer.encode_prompt(prompt.user) for prompt in prompts]
    generator = torch.Generator().manual_seed(seed)
    completions = _sample(model, rows, task, generator)
    rewards = [
        task.env.reward(prompt, task.tokenizer.decode(completion))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return sum(rewards) / len(rewards)


def _sample(
    model: Qwen3ForCausalLM, rows: list[list[int]], task: _Task, generator: torch.Generator
) -> list[list[int]]:
    """A completion a row. Without a cache: the model is small, and rows differ in length."""
    import torch

    sequences = [list(row) for row in rows]
    live = list(range(len(rows)))
    with torch.no_grad():
        for _ in range(_MAX_COMPLETION_TOKENS):
            length = max(len(sequences[row]) for row in live)
            token_ids = torch.tensor(
                [sequences[row] + [task.pad] * (length - len(sequences[row])) for row in live]
            )
            last = torch.tensor([len(sequences[row]) - 1 for row in live])
            hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[torch.arange(len(live)), last])
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].tolist()
            for row, token in zip(live, drawn, strict=True):
                sequences[row].append(token)
            live = [row for row in live if sequences[row][-1] != task.end]
            if not live:
                break
    return [sequence[len(row) :] for sequence, row in zip(sequences, rows, strict=True)]
