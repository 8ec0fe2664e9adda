"""Where values come from: files and environment. Each source is a tree that remembers who wrote it.

Texts of the environment and the command line become values by what the key admits ("60" is a number
for an int and a text for a str); what does not fit stays a text, and validation says so. Keys
that do not exist stay in the tree, too: validation finds all mistakes in one place.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from launch.settings.errors import Problem, nearest
from launch.settings.fields import Key, Kind, item_annotation, kinds, lookup

Tree = dict[str, Any]

ENVIRONMENT_PREFIX = "MUSTER_"
# Secrets and the launcher's mark on its processes: not settings.
RESERVED_VARIABLES = frozenset({"MUSTER_ADMIN_TOKEN", "MUSTER_API_KEY", "MUSTER_LAUNCH"})
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_MAX_LISTED_FILES = 6


@dataclass(slots=True)
class Layer:
    """One source: a tree of values, and for each key that it sets, who wrote it."""

    tree: Tree = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def put(self, key: Key, value: Any, where: str) -> None:
        """Set `key`. A value in the way of a section gives way."""
        place = self.tree
        for name in key[:-1]:
            below = place.get(name)
            if not isinstance(below, dict):
                below = place[name] = {}
            place = below
        place[key[-1]] = value
        self.origins[key] = where


def read_file(name: str, root: Path) -> Layer | Problem:
    """Values of a TOML or JSON file; `name` is relative to `root` and used in messages as it is."""
    path = root / name
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Problem(name, f"no such file{_files_near(path, root)}")
    except IsADirectoryError:
        return Problem(name, f"is a directory, expected a file{_files_near(path, root)}")
    except UnicodeDecodeError as error:
        return Problem(name, f"is not UTF-8 text (byte {error.start})")
    except OSError as error:
        return Problem(name, f"cannot be read: {error.strerror}")
    parsed = _parse_json(name, text) if path.suffix == ".json" else _parse_toml(name, text)
    if isinstance(parsed, Problem):
        return parsed
    return Layer(parsed, {key: name for key in _leaf_keys(parsed)})


def _parse_toml(name: str, text: str) -> Tree | Problem:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return Problem(name, f"is not valid TOML: {_toml_message(str(error), text)}")


def _toml_message(message: str, text: str) -> str:
    """`line 3, column 9: <what>`; the parser's own words, place first."""
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    if match is not None:
        return f"line {match[2]}, column {match[3]}: {match[1]}"
    last = text.splitlines()[-1:] or [""]
    what = message.removesuffix(" (at end of document)")
    return f"line {max(len(text.splitlines()), 1)}, column {len(last[0]) + 1}: {what}"


def _parse_json(name: str, text: str) -> Tree | Problem:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        return Problem(name, f"is not valid JSON: {place}: {error.msg}")
    if not isinstance(tree, dict):
        return Problem(name, "is not a JSON object")
    return tree


def _files_near(path: Path, root: Path) -> str:
    """What else could have been meant: the most alike file, else what the folder has."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f" (and no directory {_relative(folder, root)})"
    found = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".toml", ".json"))
    if not found:
        return f"; {_relative(folder, root)} has no .toml or .json file"
    best = nearest(path.name, found)
    if best is not None:
        return f"; did you mean {_relative(folder / best, root)}?"
    listed = ", ".join(found[:_MAX_LISTED_FILES]) + (", ..." if found[_MAX_LISTED_FILES:] else "")
    return f"; {_relative(folder, root)} has {listed}"


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _leaf_keys(tree: Tree, prefix: Key = ()) -> list[Key]:
    keys: list[Key] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            keys += _leaf_keys(value, (*prefix, name))
        else:
            keys.append((*prefix, name))
    return keys


def read_environment(environ: Mapping[str, str], root: type[BaseModel]) -> Layer:
    """Values of `MUSTER_SECTION__KEY` variables; case does not matter after the prefix."""
    layer = Layer()
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in RESERVED_VARIABLES:
            continue
        key = tuple(variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
        annotation = lookup(root, key)
        text = environ[variable]
        value: Any = text
        if annotation is not None:
            value = (
                from_texts(text.replace(",", " ").split(), annotation)
                if is_list(annotation) and not text.lstrip().startswith("[")
                else from_text(text, annotation)
            )
        layer.put(key, value, variable)
    return layer


def is_list(annotation: Any) -> bool:
    """Whether a key takes several values on the command line."""
    return "list" in kinds(annotation)


def from_text(text: str, annotation: Any) -> Any:
    """A single text as the value that the key admits; itself when it admits no such value."""
    admitted = kinds(annotation)
    if "none" in admitted and text == "none":
        return None
    if text[:1] in ("[", "{") and admitted & {"list", "table", "section"}:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return _scalar(text, admitted)


def from_texts(texts: list[str], annotation: Any) -> Any:
    """Several texts as a list, each as an item of it."""
    if len(texts) == 1 and (texts[0][:1] == "[" or texts[0] == "none"):
        return from_text(texts[0], annotation)
    item_kinds = kinds(item_annotation(annotation))
    return [_scalar(text, item_kinds) for text in texts]


def _scalar(text: str, admitted: frozenset[Kind]) -> Any:
    if "bool" in admitted and text in ("true", "false"):
        return text == "true"
    if "int" in admitted and _INTEGER.fullmatch(text):
        return int(text)
    if "float" in admitted:
        try:
            return float(text)
        except ValueError:
            return text
    return text
