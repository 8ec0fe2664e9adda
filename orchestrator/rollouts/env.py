"""What an environment is: numbered prompts, and a reward for an answer.

Rules
- Prompt `i` is a pure function of (seed, i): a restarted run asks the same questions.
- An environment sees text only. Which tokens were sampled is settled before it is asked, and its
  answer never changes them.
- Authors raise plain Python errors; the service names the boundary (`prompt` or `reward`).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

BUILT_IN = {"reverse-text": "orchestrator.rollouts.reverse_text:ReverseText"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question: what the user says, and what the environment needs to grade the answer."""

    user: str
    answer: str
    system: str | None = None


class Environment(Protocol):
    """What a class named in `env = "module:Class"` offers. It is made as `Class(seed=...)`."""

    def prompt(self, index: int) -> Prompt:
        """Prompt number `index` (0-based, any number); the same for the same seed."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Grade of `completion` (decoded, without special tokens); finite, larger is better."""
        ...


class EnvironmentLoadError(ValueError):
    """The configured environment cannot be found or made."""


def load_environment(name: str, seed: int) -> Environment:
    """Environment by built-in name or `module:Class`. Raises EnvironmentLoadError."""
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        known = ", ".join(sorted(BUILT_IN))
        raise EnvironmentLoadError(
            f"environment {name!r} is neither one of {known} nor of the form module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvironmentLoadError(
            f"environment {name!r}: cannot import {module_name}: {error}"
        ) from error
    factory = getattr(module, class_name, None)
    if factory is None:
        raise EnvironmentLoadError(f"environment {name!r}: {module_name} has no {class_name}")
    environment = factory(seed=seed)
    for method in ("prompt", "reward"):
        if not callable(getattr(environment, method, None)):
            raise EnvironmentLoadError(f"environment {name!r}: {class_name} has no {method}()")
    return cast(Environment, environment)
