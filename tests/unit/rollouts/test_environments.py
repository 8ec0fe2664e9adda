"""Built-in and user environments, and the tokenizer they are rendered with."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.rollouts.config import RolloutsConfig
from orchestrator.rollouts.env import EnvironmentLoadError, Prompt, load_environment
from orchestrator.rollouts.reverse_text import ReverseText
from orchestrator.rollouts.tokenizer import PromptTokenizer, TokenizerError


def test_prompts_are_a_function_of_seed_and_index() -> None:
    first, again, other = ReverseText(0), ReverseText(0), ReverseText(1)
    prompts = [first.prompt(index) for index in range(50)]
    assert prompts == [again.prompt(index) for index in reversed(range(50))][::-1]
    assert prompts != [other.prompt(index) for index in range(50)]
    assert all(4 <= len(prompt.answer) <= 8 for prompt in prompts)
    assert prompts[0].user == "Reverse the text: " + prompts[0].answer[::-1]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("dcba", 1.0), ("abcd", 0.0), (" dcba\n", 1.0), ("dcxx", 0.5), ("", 0.0), ("dcbaabcd", 0.5)],
)
def test_reward_counts_letters_in_their_place(completion: str, reward: float) -> None:
    prompt = Prompt(user="Reverse the text: abcd", answer="dcba")
    assert ReverseText(0).reward(prompt, completion) == reward


def test_user_environments_are_found_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_envs")
    module.Mine = ReverseText  # type: ignore[attr-defined]
    module.Half = lambda seed: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_envs", module)
    assert isinstance(load_environment("my_envs:Mine", 3), ReverseText)
    assert isinstance(load_environment("reverse-text", 0), ReverseText)
    for name, message in [
        ("revers-text", "neither one of reverse-text nor of the form module:Class"),
        ("no_such_module:Mine", "cannot import no_such_module"),
        ("my_envs:Other", "my_envs has no Other"),
        ("my_envs:Half", r"Half has no prompt\(\)"),
    ]:
        with pytest.raises(EnvironmentLoadError, match=message):
            load_environment(name, 0)


def write_tokenizer(directory: Path) -> None:
    words = ["[UNK]", "<user>", "<bot>", "<sys>", "a", "b", "c"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(words[1:4])
    tokenizer.save(str(directory / "tokenizer.json"))


def test_prompts_are_rendered_with_the_chat_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert PromptTokenizer(tmp_path).encode_prompt("ab") == [4, 5]
    template = (
        "{% for m in messages %}{{ '<sys>' if m.role == 'system' else '<user>' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = PromptTokenizer(tmp_path)
    assert tokenizer.encode_prompt("ab") == [1, 4, 5, 2]
    assert tokenizer.encode_prompt("ab", system="c") == [3, 6, 1, 4, 5, 2]
    assert tokenizer.encode_text("ab") == [4, 5]
    assert tokenizer.token_id("<bot>") == 2
    assert tokenizer.vocab_size == 7
    with pytest.raises(TokenizerError, match="no token '<eos>'"):
        tokenizer.token_id("<eos>")


def test_a_model_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json in"):
        PromptTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"request_timeout_s": 300.0},
            r"request_timeout_s \(300\) must be below rollout_timeout_s",
        ),
        ({"rollout_timeout_s": 1800.0}, r"rollout_timeout_s \(1800\) must be below batch_timeout"),
        ({"retry_wait_s": 3.0}, r"retry_wait_s \(3\) must not be above retry_wait_max_s \(2\)"),
    ],
)
def test_settings_that_do_not_fit_together(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutsConfig(**settings)  # type: ignore[arg-type]
