"""Sources in their order, to one checked config.

    defaults < files, left to right < environment < command line

A section whose `type` is changed by a stronger source starts anew: keys of the old type do not
leak into the new one. Reads files and nothing else; whatever is wrong comes out at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from launch.settings.argv import CommandLine, parse
from launch.settings.errors import ConfigError, Problem
from launch.settings.fields import Key
from launch.settings.sources import Layer, Tree, read_environment, read_file
from launch.settings.validate import validate

ConfigT = TypeVar("ConfigT", bound=BaseModel)
# Fills a merged tree before validation (shared values into sections); reports disagreements.
Prepare = Callable[[Layer], list[Problem]]
# Looks at a valid config as a whole.
Check = Callable[[Any, Mapping[Key, str]], list[Problem]]


class _Source(PydanticBaseSettingsSource):
    """One layer, as pydantic-settings wants it."""

    def __init__(self, settings_cls: type[BaseSettings], tree: Tree) -> None:
        super().__init__(settings_cls)
        self._tree = tree

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Not used: a source gives its whole tree at once."""
        return self._tree.get(field_name), field_name, False

    def __call__(self) -> Tree:
        return self._tree


def merge(layers: Sequence[Layer]) -> Layer:
    """One layer of all, the last one strongest."""
    layers = _without_replaced(layers)

    class Merged(BaseSettings):
        """Takes any key: what keys mean is checked later, with names of who wrote them."""

        model_config = SettingsConfigDict(extra="allow", protected_namespaces=())

        @classmethod
        def settings_customise_sources(  # type: ignore[override]
            cls, settings_cls: type[BaseSettings], **_: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_Source(settings_cls, layer.tree) for layer in reversed(layers))

    merged = Layer(Merged().model_extra or {})
    for layer in layers:
        for key, where in layer.origins.items():
            # A value that replaces a section takes the place of all that was written into it.
            for other in [k for k in merged.origins if k[: len(key)] == key]:
                del merged.origins[other]
            merged.origins[key] = where
    return merged


def _without_replaced(layers: Sequence[Layer]) -> list[Layer]:
    """The layers without what a later change of a section's `type` makes void."""
    kept: list[Layer] = []
    for layer in layers:
        layer = Layer(copy.deepcopy(layer.tree), dict(layer.origins))
        for key in [key for key in layer.origins if key[-1] == "type"]:
            value = _get(layer.tree, key)
            for earlier in kept:
                if _get(earlier.tree, key) not in (None, value):
                    _drop(earlier, key[:-1])
        kept.append(layer)
    return kept


def _get(tree: Tree, key: Key) -> Any:
    place: Any = tree
    for name in key:
        if not isinstance(place, dict) or name not in place:
            return None
        place = place[name]
    return place


def _drop(layer: Layer, section: Key) -> None:
    parent = _get(layer.tree, section[:-1])
    parent.pop(section[-1], None)
    for key in [key for key in layer.origins if key[: len(section)] == section]:
        del layer.origins[key]


def load(
    root: type[ConfigT],
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path = Path(),
    switches: frozenset[str] = frozenset(),
    prepare: Prepare = lambda _: [],
    check: Check = lambda _config, _origins: [],
) -> tuple[ConfigT, CommandLine]:
    """Config of one command. `environ` None: the environment is not a source of it.

    Raises ConfigError with every mistake that can be seen.
    """
    line = parse(argv, root, switches)
    problems = list(line.problems)
    layers: list[Layer] = []
    for name in line.files:
        found = read_file(name, directory)
        if isinstance(found, Problem):
            problems.append(found)
        else:
            layers.append(found)
    if environ is not None:
        layers.append(read_environment(environ, root))
    merged = merge([*layers, line.layer])
    problems += prepare(merged)
    config = validate(root, merged.tree, merged.origins)
    if isinstance(config, list):
        raise ConfigError([*problems, *config])
    problems += check(config, merged.origins)
    if problems:
        raise ConfigError(problems)
    return config, line
