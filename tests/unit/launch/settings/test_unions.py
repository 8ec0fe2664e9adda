"""Unions told apart by `type`, in every source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from launch.settings.errors import ConfigError
from launch.settings.load import load
from launch.settings.render import help_text, type_text
from protocol.config import Config


class Adam(Config):
    """Adam."""

    type: Literal["adam"] = "adam"
    rate: float = Field(1.0, ge=0, description="Rate.")
    beta: float = Field(0.9, description="Decay.")


class Sgd(Config):
    """SGD."""

    type: Literal["sgd"] = "sgd"
    rate: float = Field(2.0, ge=0, description="Rate.")
    momentum: float = Field(0.0, description="Momentum.")


class Root(Config):
    """A root."""

    optimizer: Annotated[Adam | Sgd, Field(discriminator="type")] = Field(
        default_factory=Adam, description="Optimizer."
    )
    sizes: list[Annotated[int, Field(ge=1)]] | int = Field(1, description="Sizes.")


def load_root(argv: str, folder: Path = Path()) -> Root:
    return load(Root, argv.split(), directory=folder)[0]


def messages(argv: str, folder: Path = Path()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_root(argv, folder)
    return [str(problem) for problem in caught.value.problems]


def test_type_chooses_the_member() -> None:
    assert load_root("--optimizer.type sgd --optimizer.momentum 0.5").optimizer == Sgd(momentum=0.5)
    assert load_root("--optimizer.type adam --optimizer.beta=0.5").optimizer == Adam(beta=0.5)


def test_a_changed_type_starts_the_section_anew(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[optimizer]\ntype = "adam"\nrate = 5\nbeta = 0.1')
    (tmp_path / "b.toml").write_text('[optimizer]\ntype = "sgd"\nmomentum = 0.2')
    assert load_root("@ a.toml @ b.toml", tmp_path).optimizer == Sgd(momentum=0.2)


def test_key_of_another_member_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[optimizer]\ntype = "sgd"\nrate = -1\nbeta = 0.1')
    assert messages("@ a.toml", tmp_path) == [
        "a.toml: optimizer.rate = -1: expected at least 0",
        "a.toml: optimizer.beta = 0.1: no such key with this `type`",
    ]


def test_unknown_and_missing_type() -> None:
    assert messages("--optimizer.type adan") == [
        '--optimizer.type: optimizer.type = "adan": expected one of adam, sgd; did you mean "adam"?'
    ]
    assert messages("--optimizer.rate 1") == ["--optimizer.rate: optimizer.type is required"]


def test_one_line_a_key_also_for_a_plain_union() -> None:
    assert load_root("--sizes 1 2").sizes == [1, 2]
    assert messages("--sizes x") == ['--sizes: sizes[0] = "x": expected an integer']


def test_words_of_a_union() -> None:
    assert type_text(Root.model_fields["sizes"]) == "list of integer or integer"
    assert "--optimizer.momentum" in help_text(Root, "usage", "about")
