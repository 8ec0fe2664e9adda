"""A tree of values to a checked config, or to the mistakes in it. Pure.

Validation is strict (a text is no number, true is no number) and in JSON terms (a list is a tuple
where one is wanted, a text is a path), since every source is a text file in the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launch.settings.errors import Problem, dotted, nearest, shown, unknown_key_text
from launch.settings.fields import Key, child, models

Part = str | int
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
    "greater_than": "expected a number above {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected a number below {lt}",
    "less_than_equal": "expected at most {le}",
    "finite_number": "expected a finite number",
    "multiple_of": "expected a multiple of {multiple_of}",
    "string_pattern_mismatch": "expected a text like {pattern}",
}


def validate(
    root: type[ConfigT], tree: Mapping[str, Any], origins: Mapping[Key, str]
) -> ConfigT | list[Problem]:
    """Check `tree` against `root`; `origins` names who wrote each key."""
    try:
        return root.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        return _problems(root, error.errors(include_url=False), origins)


def _problems(
    root: type[BaseModel], details: list[ErrorDetails], origins: Mapping[Key, str]
) -> list[Problem]:
    """One problem a key: a union complains once for each of its members."""
    by_key: dict[tuple[tuple[Part, ...], str], list[str]] = {}
    inputs: dict[tuple[Part, ...], Any] = {}
    for detail in details:
        key = real_key(root, detail["loc"])
        if detail["type"] == "union_tag_invalid" or detail["type"] == "union_tag_not_found":
            key = (*key, "type")
        where = _where(key, origins)
        texts = by_key.setdefault((key, where), [])
        inputs.setdefault(key, detail["input"])
        text = _text(root, key, detail)
        if text not in texts:
            texts.append(text)
    return [
        Problem(where, texts[0] if len(texts) == 1 else _joined(texts))
        for (_, where), texts in by_key.items()
    ]


def real_key(root: type[BaseModel], loc: tuple[Part, ...]) -> tuple[Part, ...]:
    """`loc` of a validation error without the names of union members in it."""
    key: list[Part] = []
    annotation: Any = root
    for part in loc:
        if isinstance(part, int):
            key.append(part)
            continue
        below = child(models(annotation), part) if annotation is not None else None
        if below is not None:
            key.append(part)
            annotation = below
        elif models(annotation) and not _is_tag(annotation, part):
            key.append(part)  # a key that does not exist
            annotation = None
        elif annotation is not None and "dict" in repr(annotation).lower():
            key.append(part)
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
    return ", ".join(
        dict.fromkeys(where for written, where in origins.items() if written[: len(path)] == path)
    )


def _text(root: type[BaseModel], key: tuple[Part, ...], detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
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
