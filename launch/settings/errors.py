"""Mistakes of a configuration, as a user reads them. Pure.

One line a mistake: where it was written (file, flag or variable), the dotted key with its value,
what was expected, and the nearest valid key or value.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from launch.settings.fields import Key, all_keys, lookup, models, names

_MAX_VALUE_CHARS = 60
# Below this ratio a suggestion is noise: "wandb" for "seed" helps nobody.
_MIN_LIKENESS = 0.6
_MIN_SAMENESS = 0.85


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `where` is empty when nothing that was written is to blame."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class ConfigError(Exception):
    """All mistakes of one configuration."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def render(self, command: str) -> str:
        """What goes to stderr before exit code 2."""
        count = len(self.problems)
        head = f"{command}: {count} configuration error{'s' if count > 1 else ''}"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


def dotted(key: Iterable[str | int]) -> str:
    """`a.b[2].c` for ("a", "b", 2, "c")."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def shown(value: object) -> str:
    """A value as JSON, cut to a readable length."""
    text = json.dumps(value, default=str)
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    return text[: _MAX_VALUE_CHARS - 3] + "..."


def nearest(word: str, words: Sequence[str]) -> str | None:
    """The word most like `word`, or None when none is like it."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=_MIN_LIKENESS)
    return found[0] if found else None


def unknown_key_text(root: type[BaseModel], key: Key, value: object) -> str:
    """`a.b = 1: no such key` with the nearest valid key: a sibling, else one of that name."""
    text = f"{dotted(key)} = {shown(value)}: no such key"
    if lookup(root, key) is not None:  # of another member of a union
        return f"{text} with this `type`"
    best = _nearest_key(root, key)
    if best is not None:
        return f"{text}; did you mean `{dotted(best)}`?"
    siblings = names(models(lookup(root, key[:-1])))
    place = f"`{dotted(key[:-1])}`" if len(key) > 1 else "the top level"
    return f"{text}; {place} has {', '.join(siblings)}"


def _nearest_key(root: type[BaseModel], key: Key) -> Key | None:
    parent, name = key[:-1], key[-1]
    sibling = nearest(name, names(models(lookup(root, parent))))
    if sibling is not None:
        return (*parent, sibling)
    others = [other for other in all_keys(root) if key[: len(other)] != other]
    # Far from where it was written: only a name that is nearly the same is meant.
    found = difflib.get_close_matches(name, [other[-1] for other in others], 1, _MIN_SAMENESS)
    return next((other for other in others if found and other[-1] == found[0]), None)
