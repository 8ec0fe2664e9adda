"""docs/configuration.md, from the config models: `muster config docs > docs/configuration.md`."""

from __future__ import annotations

from engine.config import EngineConfig
from launch.config import RunConfig, is_repeated
from launch.settings.render import reference_page

_HEAD = """\
# Configuration

Made by `muster config docs` from the config models; do not edit.

Values come from, weakest first: defaults, TOML files from left to right, environment, command line.

```
muster run @ configs/local/quickstart.toml @ mine.toml --orchestrator.max-steps 20
MUSTER_ORCHESTRATOR__MAX_STEPS=20 muster run @ configs/local/quickstart.toml
```

- On the command line `max_steps` and `max-steps` are the same, `--key value` and `--key=value` too.
  A list is written as several values (`--deployment.engine-groups 0 0 1 1`), true and false as
  `--key` and `--no-key` (`--section.no-key` works too), nothing as `none`.
- An environment variable is `MUSTER_`, then the key in capitals with `__` for each dot; a list is
  written with commas or spaces. `MUSTER_ADMIN_TOKEN` and `MUSTER_API_KEY` are secrets and no
  configuration. Only `muster run` and `muster config show` read settings from the environment: what
  they start gets a resolved file.
- Unknown keys, wrong types and values that do not fit together are errors, all of them at once,
  with exit code 2 and before anything starts. `muster run --dry-run` prints and writes the plan;
  `muster config show` prints the resolved configuration.
- What all processes share (`model`, `weight_broadcast`, `wandb`, `output_dir`, `run_id`, `seed`) is
  written at the top level. A process may repeat it; contradicting it is an error.
  `orchestrator.max_steps` is also `trainer.max_steps`, `orchestrator.rollouts.temperature` is also
  `trainer.loss.temperature`, `orchestrator.model.client.admin_engine_groups` is also
  `deployment.engine_groups`: one of the two is enough.
- Addresses and ports of the processes of a run are chosen by the launcher and refused when set.
- `@ file.json` reads a resolved configuration as `muster config show --json` prints it.

This page lists `muster run` first, then `muster engine`. `muster trainer` and `muster orchestrator`
take the keys of `[trainer]` and `[orchestrator]`, and what is shared, at their top level.

# muster run
"""

_ENGINE_HEAD = """
# muster engine

One engine alone. `muster run` makes such a file for its engines, `plan/engine.json`.
"""


def configuration_page() -> str:
    """The whole page."""
    engine_only = reference_page(EngineConfig, _ENGINE_HEAD, skip=lambda key: len(key) > 1)
    return reference_page(RunConfig, _HEAD, skip=is_repeated) + engine_only
