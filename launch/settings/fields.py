"""What a config model consists of: its keys, their kinds, where they sit. Pure.

A key is a dotted path of snake_case names. A section is a key whose value is a config model; with a
union of models (told apart by `type`) its keys are those of all of them.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Kind = Literal["bool", "int", "float", "text", "none", "list", "table", "section"]
Key = tuple[str, ...]

_SCALARS: dict[Any, Kind] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    Path: "text",
    type(None): "none",
}


def members(annotation: Any) -> list[Any]:
    """The plain types that `annotation` admits: no Annotated, no alias, no union around them."""
    if hasattr(annotation, "__value__"):  # a named alias
        return members(annotation.__value__)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for arg in typing.get_args(annotation) for member in members(arg)]
    return [annotation]


def kinds(annotation: Any) -> frozenset[Kind]:
    """Kinds of values that `annotation` admits."""
    return frozenset(kind for member in members(annotation) for kind in _kinds_of(member))


def _kinds_of(member: Any) -> Iterator[Kind]:
    if member is Any:
        yield from ("bool", "int", "float", "text")
        return
    origin = typing.get_origin(member) or member
    if origin is Literal:
        for value in typing.get_args(member):
            yield _SCALARS[type(value)]
    elif origin in _SCALARS:
        yield _SCALARS[origin]
    elif isinstance(origin, type) and issubclass(origin, BaseModel):
        yield "section"
    elif isinstance(origin, type) and issubclass(origin, enum.Enum):
        yield "text"
    elif isinstance(origin, type) and issubclass(origin, dict):
        yield "table"
    elif isinstance(origin, type) and issubclass(origin, list | tuple | set | frozenset):
        yield "list"
    else:
        yield "text"


def models(annotation: Any) -> list[type[BaseModel]]:
    """The config models that `annotation` admits."""
    return [
        member
        for member in members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    ]


def names(candidates: Sequence[type[BaseModel]]) -> list[str]:
    """Keys that a section of one of these models may have, in order."""
    return list(dict.fromkeys(name for model in candidates for name in model.model_fields))


def child(candidates: Sequence[type[BaseModel]], name: str) -> Any | None:
    """Annotation of key `name` in a section of one of these models; None when there is none.

    Where several have it the annotation is the union of theirs.
    """
    found = [model.model_fields[name] for model in candidates if name in model.model_fields]
    if not found:
        return None
    annotation: Any = found[0].annotation
    for field in found[1:]:
        annotation = Union[annotation, field.annotation]  # noqa: UP007  (types known at run time)
    return annotation


def below(annotation: Any, name: str) -> Any | None:
    """Annotation of key `name` in a section or table; None when there is none."""
    found = child(models(annotation), name)
    if found is not None:
        return found
    for member in members(annotation):
        if "table" in kinds(member):
            arguments = typing.get_args(member)
            return arguments[1] if arguments else Any
    return None


def item_annotation(annotation: Any) -> Any:
    """What the items of a list may be; Any where nothing is said."""
    arguments = [
        argument
        for member in members(annotation)
        if "list" in kinds(member)
        for argument in typing.get_args(member)
        if argument is not Ellipsis
    ]
    if not arguments:
        return Any
    annotation = arguments[0]
    for argument in arguments[1:]:
        annotation = Union[annotation, argument]  # noqa: UP007  (types known at run time)
    return annotation


def lookup(root: type[BaseModel], key: Key) -> Any | None:
    """Annotation of `key` below `root`; None where there is no such key."""
    annotation: Any = root
    for name in key:
        annotation = below(annotation, name)
        if annotation is None:
            return None
    return annotation


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key that is not a section. `owner` is the model that has it."""

    key: Key
    field: FieldInfo
    owner: type[BaseModel]


def leaves(root: type[BaseModel], prefix: Key = ()) -> Iterator[Leaf]:
    """All keys below `root` that hold values, in order of definition."""
    for name, field in root.model_fields.items():
        sections = models(field.annotation)
        if not sections:
            yield Leaf((*prefix, name), field, root)
        for section in sections:
            yield from leaves(section, (*prefix, name))


def all_keys(root: type[BaseModel]) -> list[Key]:
    """Every key below `root`, sections included, parents first."""
    found: dict[Key, None] = {}
    for leaf in leaves(root):
        for length in range(1, len(leaf.key) + 1):
            found.setdefault(leaf.key[:length])
    return list(found)
