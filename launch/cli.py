"""The `muster` command. Knows names only: what a command needs is imported when it runs.

    muster COMMAND @ FILE ... --section.key VALUE ...

| exit code | |
|---|---|
| 0 | done |
| 1 | failed, with the reason on the console or in the log |
| 2 | the configuration or the command line is wrong; nothing was started |
| 128 + n | ended by signal n; 130 is Ctrl-C |
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel

USAGE_ERROR = 2
INTERRUPTED = 130
_DRY_RUN = "--dry-run"
_JSON = "--json"
_HELP = ("-h", "--help")


@dataclass(frozen=True, slots=True)
class Command:
    """A command that takes a config: where its model and its entry function are."""

    about: str
    config: str
    entry: str
    switches: dict[str, str] = field(default_factory=dict)


COMMANDS = {
    "run": Command(
        "start router, engines, trainer and orchestrator on this machine",
        "launch.config:RunConfig",
        "launch.local:run",
        {_DRY_RUN: "print and write the plan to <output_dir>/plan, start nothing"},
    ),
    "engine": Command(
        "serve one engine: vLLM with the admission gate and weight updates",
        "engine.config:EngineConfig",
        "engine.main:run",
    ),
    "trainer": Command(
        "train, one rank (or start it under torchrun for several)",
        "trainer.config:TrainerConfig",
        "trainer.main:run",
    ),
    "orchestrator": Command(
        "drive rollouts, updates and groups of a run",
        "orchestrator.config:OrchestratorConfig",
        "orchestrator.main:run",
    ),
    "tiny-model": Command(
        "build the small model of the quickstart",
        "launch.tiny_model_config:TinyModelConfig",
        "launch.tiny_model:run",
    ),
}
# Commands that take no config: what they are about, how they are called, their entry function.
TOOLS = {
    "replay": (
        "decide again what a journal says was decided; tell why each group was out",
        "muster replay JOURNAL|OUTPUT_DIR [--json] [--group N]",
        "orchestrator.replay:run",
    ),
}
_CONFIG_COMMANDS = {
    "schema": "print the JSON Schema of the configuration of `muster run`",
    "show": "print the resolved configuration as TOML (--json: as JSON, with empty keys)",
    "docs": "print docs/configuration.md",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`| head`). Nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        print(_overview(), end="")
        return 0 if arguments else USAGE_ERROR
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(_version())
        return 0
    if name == "config":
        return _config(rest)
    if name in TOOLS:
        return _tool(name, rest)
    if name not in COMMANDS:
        return _unknown("muster", name, [*COMMANDS, *TOOLS, "config"])
    command = COMMANDS[name]
    if any(argument in _HELP for argument in rest):
        print(_command_help(name, command), end="")
        return 0
    return _run(name, command, rest)


def _tool(name: str, arguments: list[str]) -> int:
    about, usage, entry = TOOLS[name]
    if any(argument in _HELP for argument in arguments):
        print(f"usage: {usage}\n\n{about[0].upper()}{about[1:]}.")
        return 0
    run: Callable[[list[str]], int] = _named(entry)
    return run(arguments)


def _run(name: str, command: Command, arguments: list[str]) -> int:
    loaded = _load(name, command, arguments)
    if isinstance(loaded, int):
        return loaded
    config, switches = loaded
    entry: Callable[..., int] = _named(command.entry)
    if _DRY_RUN in command.switches:
        return entry(config, dry_run=_DRY_RUN in switches)
    return entry(config)


def _load(name: str, command: Command, arguments: list[str]) -> tuple[Any, set[str]] | int:
    """Config and switches of a command, or the exit code after all mistakes were printed."""
    from launch.settings.errors import ConfigError
    from launch.settings.load import load

    root: type[BaseModel] = _named(command.config)
    config: BaseModel
    try:
        if root.__name__ == "RunConfig":
            from launch.config import load_run_config

            config, line = load_run_config(arguments, frozenset(command.switches))
        else:
            from launch.process_checks import check_process

            config, line = load(
                root, arguments, switches=frozenset(command.switches), check=check_process
            )
    except ConfigError as error:
        print(error.render(f"muster {name}"), file=sys.stderr)
        return USAGE_ERROR
    return config, line.switches


def _config(arguments: list[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        print("usage: muster config COMMAND\n")
        print(_listed(_CONFIG_COMMANDS), end="")
        return 0 if arguments else USAGE_ERROR
    name, rest = arguments[0], arguments[1:]
    if name not in _CONFIG_COMMANDS:
        return _unknown("muster config", name, list(_CONFIG_COMMANDS))
    from launch.settings import render

    if name == "show":
        return _show(rest)
    if rest:
        return _unknown(f"muster config {name}", rest[0], [])
    if name == "schema":
        print(render.to_schema(_named(COMMANDS["run"].config)), end="")
    else:
        from launch.config_docs import configuration_page

        print(configuration_page(), end="")
    return 0


def _show(arguments: list[str]) -> int:
    from launch.settings import render

    command = Command("", COMMANDS["run"].config, "", {_JSON: "as JSON"})
    loaded = _load("config show", command, arguments)
    if isinstance(loaded, int):
        return loaded
    config, switches = loaded
    print(render.to_json(config) if _JSON in switches else render.to_toml(config), end="")
    return 0


def _named(path: str) -> Any:
    """The object at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _unknown(prefix: str, name: str, known: list[str]) -> int:
    import difflib

    best = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean `{best[0]}`?" if best else ""
    listed = f" (there are {', '.join(known)})" if known and not best else ""
    what = "no such command" if known else "unexpected argument"
    print(f"{prefix}: {what}: {name}{hint}{listed}", file=sys.stderr)
    return USAGE_ERROR


def _overview() -> str:
    rows = {name: command.about for name, command in COMMANDS.items()}
    rows |= {name: about for name, (about, _, _) in TOOLS.items()}
    rows["config"] = "schema, show, docs: the configuration, without running anything"
    return (
        "usage: muster COMMAND [@ FILE ...] [--section.key VALUE ...]\n\n"
        f"{_listed(rows)}\n"
        "Values: defaults < files, left to right < environment (MUSTER_SECTION__KEY) < flags.\n"
        "muster COMMAND --help lists every key. muster --version prints the version.\n"
    )


def _listed(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "".join(f"  {name:<{width}}  {about}\n" for name, about in rows.items())


def _command_help(name: str, command: Command) -> str:
    from launch.settings.render import help_text

    switches = "".join(f" [{switch}]" for switch in command.switches)
    usage = f"usage: muster {name} [@ FILE ...] [--section.key VALUE ...]{switches}"
    about = f"{command.about[0].upper()}{command.about[1:]}."
    for switch, what in command.switches.items():
        about += f" {switch}: {what}."
    return help_text(_named(command.config), usage, about)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"muster {version('muster-rl')}"
    except PackageNotFoundError:
        return "muster (not installed)"


if __name__ == "__main__":
    sys.exit(main())
