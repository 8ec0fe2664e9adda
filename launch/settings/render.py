"""A config model as text: help, reference page, schema, and a config as TOML or JSON. Pure.

TOML has no null, so a key that is empty is left out of it; JSON keeps it and reads back exactly.
"""

from __future__ import annotations

import json
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launch.settings.errors import dotted
from launch.settings.fields import Key, Kind, Leaf, kinds, leaves, lookup, members, models

_KIND_WORDS: dict[Kind, str] = {
    "bool": "true or false",
    "int": "integer",
    "float": "number",
    "text": "text",
    "table": "table",
    "section": "section",
}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "multiple of"))
_HELP_WIDTH = 100
_INDENT = "      "


def to_json(config: BaseModel) -> str:
    """The resolved config, nulls included; `@ file.json` reads it back."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def to_toml(config: BaseModel) -> str:
    """The resolved config without its empty keys."""
    return tomli_w.dumps(_without_nulls(config.model_dump(mode="json")))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    return value


def to_schema(root: type[BaseModel]) -> str:
    """JSON Schema of the config."""
    return json.dumps(root.model_json_schema(), indent=2) + "\n"


def type_text(field: FieldInfo) -> str:
    """What a key takes, in words: `integer, >= 1`, `"a" or "b"`, `list of integer`."""
    annotation = field.annotation
    words: list[str] = []
    for member in members(annotation):
        words += [word for word in _member_words(member) if word not in words]
    text = " or ".join(words)
    bounds = [*_bounds(field.metadata), *_bounds(_inner_metadata(annotation))]
    text = ", ".join([text, *dict.fromkeys(bounds)])
    return f"{text}, or empty" if "none" in kinds(annotation) else text


def _member_words(member: Any) -> Iterator[str]:
    origin = typing.get_origin(member)
    if member is type(None):
        return
    if origin is Literal:
        yield from (json.dumps(value) for value in typing.get_args(member) if value is not None)
    elif "list" in kinds(member):
        items = [arg for arg in typing.get_args(member) if arg is not Ellipsis]
        words = [word for item in items for part in members(item) for word in _member_words(part)]
        yield "list of " + " or ".join(dict.fromkeys(words)) if words else "list"
    else:
        yield from (_KIND_WORDS[kind] for kind in kinds(member) if kind in _KIND_WORDS)


def _bounds(metadata: Sequence[Any]) -> list[str]:
    found: list[str] = []
    for item in metadata:
        for name, sign in _BOUNDS:
            bound = getattr(item, name, None)
            if bound is not None:
                found.append(f"{sign} {bound:g}")
    return found


def _inner_metadata(annotation: Any) -> list[Any]:
    """Bounds inside a union, as in `Annotated[int, Field(ge=1)] | None`."""
    found: list[Any] = []
    for member in typing.get_args(annotation) or ():
        if typing.get_origin(member) is typing.Annotated:
            for item in member.__metadata__:
                found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def default_text(field: FieldInfo) -> str:
    """Default of a key as JSON, or what stands for it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    return "empty" if value is None else json.dumps(value, default=str)


def help_text(root: type[BaseModel], usage: str, about: str) -> str:
    """All keys of a command as flags, grouped by section."""
    lines = [usage, "", *textwrap.wrap(about, _HELP_WIDTH)]
    for section, found in _by_section(root):
        title = dotted(section) or "top level"
        lines += ["", f"{title}: {_summary(root, section)}"]
        for leaf in found:
            flag = "--" + dotted(leaf.key).replace("_", "-")
            lines.append(f"  {flag}  ({type_text(leaf.field)}; {default_text(leaf.field)})")
            lines += textwrap.wrap(
                leaf.field.description or "",
                _HELP_WIDTH,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT,
            )
    return "\n".join(lines) + "\n"


def reference_page(root: type[BaseModel], head: str, skip: Callable[[Key], bool]) -> str:
    """Markdown tables of all keys of `root` that are not skipped, one a section."""
    lines = [head.rstrip()]
    for section, all_found in _by_section(root):
        found = [leaf for leaf in all_found if not skip(leaf.key)]
        if not found:
            continue
        title = f"`[{dotted(section)}]`" if section else "Top level"
        lines += ["", f"## {title}", "", _summary(root, section), ""]
        lines += ["| key | takes | default | |", "|---|---|---|---|"]
        lines += [
            "| "
            + " | ".join(
                _cell(text)
                for text in (
                    f"`{leaf.key[-1]}`",
                    type_text(leaf.field),
                    f"`{default_text(leaf.field)}`",
                    leaf.field.description or "",
                )
            )
            + " |"
            for leaf in found
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _summary(root: type[BaseModel], section: Key) -> str:
    """First sentence of what a section's model says about itself."""
    owners = models(lookup(root, section)) if section else [root]
    lines = (owners[0].__doc__ or "").strip().split("\n\n")[0].split("\n")
    return " ".join(line.strip() for line in lines)


def _by_section(root: type[BaseModel]) -> list[tuple[Key, list[Leaf]]]:
    """Keys by the section that they are in, sections in order of their first key."""
    found: dict[Key, dict[Key, Leaf]] = {}
    for leaf in leaves(root):
        found.setdefault(leaf.key[:-1], {}).setdefault(leaf.key, leaf)
    by_root = {section[:1]: position for position, section in reversed(list(enumerate(found)))}
    ordered = sorted(found, key=lambda section: (len(section) > 0, by_root[section[:1]]))
    return [(section, list(found[section].values())) for section in ordered]
