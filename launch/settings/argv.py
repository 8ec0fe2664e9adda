"""Command line to config files and values. Pure.

    @ FILE ...   --section.key VALUE   --section.key=VALUE   --flag / --no-flag   --list A B C

| rule | |
|---|---|
| names | snake_case and kebab-case are the same |
| one value | exactly one; the last one given counts |
| several values | up to the next flag; a flag given again adds to them; `[]` is the empty list |
| true or false | `--flag`, `--no-flag`, `--flag true`, `--section.no-flag` |
| nothing | `none`, where a key may be empty |
| a value that starts with `--` | only as `--key=VALUE` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from launch.settings.errors import Problem
from launch.settings.fields import Key, Kind, kinds, lookup
from launch.settings.sources import Layer, from_text, from_texts, is_list

FILE_MARK = "@"


@dataclass(slots=True)
class CommandLine:
    """What a command line says: files left to right, values, switches, mistakes."""

    files: list[str] = field(default_factory=list)
    layer: Layer = field(default_factory=Layer)
    switches: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def parse(
    argv: Sequence[str], root: type[BaseModel], switches: frozenset[str] = frozenset()
) -> CommandLine:
    """Parse the arguments of one command. `switches` are flags without value that are no keys."""
    found = CommandLine()
    lists: dict[Key, list[str]] = {}
    position = 0
    while position < len(argv):
        token = argv[position]
        end = _end_of_values(argv, position + 1)
        values = list(argv[position + 1 : end])
        if token.startswith(FILE_MARK):
            rest = token[len(FILE_MARK) :]
            position += 1 if rest else 1 + bool(values)
            _add_file(found, rest or (values[0] if values else None))
        elif token in switches:
            found.switches.add(token)
            position += 1
        elif token.startswith("--") and len(token) > 2:
            position += 1 + _add_flag(found, root, lists, token, values)
        else:
            found.problems.append(Problem("", _unexpected(token)))
            position += 1
    return found


def _end_of_values(argv: Sequence[str], start: int) -> int:
    """Position after the last argument that can be a value of the flag before `start`."""
    for position in range(start, len(argv)):
        if argv[position].startswith(("--", FILE_MARK)):
            return position
    return len(argv)


def _add_file(found: CommandLine, name: str | None) -> None:
    if name is None:
        found.problems.append(Problem(FILE_MARK, "expected the name of a file after it"))
    else:
        found.files.append(name)


def _unexpected(token: str) -> str:
    if token.endswith((".toml", ".json")):
        return f'unexpected argument "{token}"; files are given as `@ {token}`'
    return f'unexpected argument "{token}"; values are given as `--section.key {token}`'


def _add_flag(
    found: CommandLine,
    root: type[BaseModel],
    lists: dict[Key, list[str]],
    token: str,
    values: list[str],
) -> int:
    """Put one flag into the layer; returns how many of `values` it used."""
    flag, has_value, attached = token.partition("=")
    key = tuple(flag.removeprefix("--").replace("-", "_").split("."))
    negated = _negated(root, key)
    if negated is not None:
        if has_value:
            found.problems.append(Problem(flag, f'takes no value, got "{attached}"'))
        else:
            found.layer.put(negated, False, flag)
        return 0
    texts, used = ([attached], 0) if has_value else (values, len(values))
    annotation = lookup(root, key)
    if annotation is None:
        found.layer.put(key, _guess(texts), flag)
    elif is_list(annotation):
        if not texts:
            found.problems.append(Problem(flag, "expected values after it; `[]` is the empty list"))
            return used
        lists.setdefault(key, []).extend(texts)
        found.layer.put(key, from_texts(lists[key], annotation), flag)
    elif not has_value and _is_bare(kinds(annotation), texts):
        found.layer.put(key, True, flag)
        return 0
    elif not texts:
        found.problems.append(Problem(flag, "expected a value after it"))
    else:
        found.layer.put(key, from_text(texts[0], annotation), flag)
        return min(used, 1)
    return used


def _is_bare(admitted: frozenset[Kind], texts: list[str]) -> bool:
    """Whether a flag stands alone and means true, whatever follows it."""
    if "bool" not in admitted or texts[:1] in (["true"], ["false"]):
        return False
    return not texts or admitted <= {"bool", "none"}


def _negated(root: type[BaseModel], key: Key) -> Key | None:
    """The true-or-false key that `no_<key>` switches off, or None."""
    if lookup(root, key) is not None:
        return None
    candidates = [(*key[:-1], key[-1].removeprefix("no_")), (key[0].removeprefix("no_"), *key[1:])]
    for candidate in candidates:
        annotation = lookup(root, candidate)
        if candidate != key and annotation is not None and "bool" in kinds(annotation):
            return candidate
    return None


def _guess(texts: list[str]) -> Any:
    """Value of a flag that does not exist, for the message only."""
    if not texts:
        return True
    return texts[0] if len(texts) == 1 else texts
