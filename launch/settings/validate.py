"""A tree of values to a checked config, or to the mistakes in it. Pure.

A text is no number, true is no number, 2.0 is no integer: a value of a kind that its key does not
admit is wrapped, so that validation cannot convert it. Beyond that a list is a tuple where one is
wanted, and a text is a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launch.settings.errors import Problem, dotted, nearest, shown, unknown_key_text
from launch.settings.fields import Key, Kind, below, item_annotation, kinds, models

Part = str | int
_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", str: "text"}
ConfigT = TypeVar("ConfigT", bound=BaseModel)

_EXPECTED = {
    "int": "expected an integer",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected a text",
    "path": "expected a path",
    "list": "expected a list",
    "tuple": "expected a list",
    "set": "expected a list",
    "dict": "expected a table",
    "model": "expected a section",
    "none": "expected nothing",
}
_BOUNDS = {
    "greater_than": "expected a number above {gt:g}",
    "greater_than_equal": "expected at least {ge:g}",
    "less_than": "expected a number below {lt:g}",
    "less_than_equal": "expected at most {le:g}",
    "finite_number": "expected a finite number",
    "multiple_of": "expected a multiple of {multiple_of:g}",
    "string_pattern_mismatch": "expected a text like {pattern}",
}


def validate(
    root: type[ConfigT], tree: Mapping[str, Any], origins: Mapping[Key, str]
) -> ConfigT | list[Problem]:
    """Check `tree` against `root`; `origins` names who wrote each key."""
    try:
        return root.model_validate(_strict(root, tree))
    except ValidationError as error:
        return _problems(root, error.errors(include_url=False), origins)


class _Misfit:
    """A value of a kind that its key does not admit."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _strict(annotation: Any, value: Any) -> Any:
    """`value` with everything wrapped that must not be converted."""
    if annotation is None or annotation is Any:
        return value
    admitted = kinds(annotation)
    if isinstance(value, Mapping):
        return {name: _strict(below(annotation, name), item) for name, item in value.items()}
    if isinstance(value, list):
        if "list" not in admitted:
            return value
        items = item_annotation(annotation)
        return [_strict(items, item) for item in value]
    kind = _KINDS.get(type(value))
    if value is None or kind in admitted or (kind == "int" and "float" in admitted):
        return value
    return _Misfit(value)


def _problems(
    root: type[BaseModel], details: list[ErrorDetails], origins: Mapping[Key, str]
) -> list[Problem]:
    """One problem a key: a union complains once for each of its members."""
    by_key: dict[tuple[tuple[Part, ...], str], list[str]] = {}
    for detail in details:
        key = real_key(root, detail["loc"])
        if detail["type"] == "union_tag_invalid" or detail["type"] == "union_tag_not_found":
            key = (*key, "type")
        where = _where(key, origins)
        texts = by_key.setdefault((key, where), [])
        text = _text(root, key, detail)
        if text not in texts:
            texts.append(text)
    return [
        Problem(where, texts[0] if len(texts) == 1 else _joined(texts))
        for (key, where), texts in by_key.items()
        if not any(_is_inside(other, key) for other, _ in by_key)
    ]


def _is_inside(key: tuple[Part, ...], outer: tuple[Part, ...]) -> bool:
    """Whether `key` is an item of the list at `outer`: of a union the nearer complaint counts."""
    inner = key[len(outer) : len(outer) + 1]
    return key[: len(outer)] == outer and bool(inner) and isinstance(inner[0], int)


def real_key(root: type[BaseModel], loc: tuple[Part, ...]) -> tuple[Part, ...]:
    """`loc` of a validation error without the names of union members in it."""
    key: list[Part] = []
    annotation: Any = root
    for part in loc:
        if isinstance(part, int):
            key.append(part)
            continue
        found = None if annotation is None else below(annotation, part)
        if found is not None:
            key.append(part)
            annotation = found
        elif models(annotation) and not _is_tag(annotation, part):
            key.append(part)  # a key that does not exist
            annotation = None
    return tuple(key)


def _is_tag(annotation: Any, part: str) -> bool:
    """Whether `part` names a member of a union of sections rather than a key."""
    candidates = models(annotation)
    if len(candidates) < 2:
        return False
    tags = {
        tag
        for model in candidates
        for tag in getattr(
            getattr(model.model_fields.get("type"), "annotation", None), "__args__", ()
        )
    }
    return part in tags or part in {model.__name__ for model in candidates}


def _where(key: tuple[Part, ...], origins: Mapping[Key, str]) -> str:
    """Who wrote `key`; for a section everybody who wrote into it, in order of their weight."""
    path = tuple(part for part in key if isinstance(part, str))
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    inside = [where for written, where in origins.items() if written[: len(path)] == path]
    if not inside and len(path) > 1:  # a key that is missing from a section
        return _where(path[:-1], origins)
    return ", ".join(dict.fromkeys(inside))


def _text(root: type[BaseModel], key: tuple[Part, ...], detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], _unwrapped(detail["input"]), detail.get("ctx", {})
    path = tuple(part for part in key if isinstance(part, str))
    if kind == "extra_forbidden":
        return unknown_key_text(root, path, value)
    if kind in ("missing", "union_tag_not_found"):
        return f"{dotted(key)} is required"
    if kind == "value_error":
        reason = str(context["error"])
        if isinstance(value, dict):  # of a whole section: its message names the keys
            return f"{dotted(key)}: {reason}" if key else reason
        return f"{dotted(key)} = {shown(value)}: {reason}"
    if kind == "union_tag_invalid":
        return _choice(
            f"{dotted(key)} = {shown(context['tag'])}",
            context["tag"],
            str(context["expected_tags"]).replace("'", "").split(", "),
        )
    head = f"{dotted(key)} = {shown(value)}" if key else shown(value)
    if kind in ("literal_error", "enum"):
        words = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
        return _choice(head, value, words)
    if kind in _BOUNDS:
        return f"{head}: {_BOUNDS[kind].format(**context)}"
    expected = _EXPECTED.get(kind.split("_")[0])
    if expected is not None and kind.endswith(("_type", "_parsing", "_from_float")):
        return f"{head}: {expected}"
    return f"{head}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _Misfit):
        return value.value
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    return value


def _choice(head: str, value: object, words: list[str]) -> str:
    listed = ", ".join(words)
    best = nearest(value, words) if isinstance(value, str) else None
    hint = f'; did you mean "{best}"?' if best else ""
    return f"{head}: expected {'one of ' if len(words) > 1 else ''}{listed}{hint}"


def _joined(texts: list[str]) -> str:
    """`x = 1: expected a or expected b` to one line with one head."""
    head, mark, _ = texts[0].partition(": expected ")
    if mark and all(text.startswith(head + mark) for text in texts):
        return head + mark + " or ".join(text[len(head + mark) :] for text in texts)
    return "; ".join(texts)
