"""Built-in environment: write a short word backwards.

Small enough to be learnt on a CPU in minutes, and graded densely: every letter in its right place
counts, so that a model that half knows the task is told which half.
"""

from __future__ import annotations

import random
import string

from orchestrator.rollouts.env import Prompt

INSTRUCTION = "Reverse the text: "


class ReverseText:
    """Random lower-case words of `min_letters` to `max_letters` letters."""

    def __init__(self, seed: int, min_letters: int = 4, max_letters: int = 8) -> None:
        self._seed = seed
        self._min_letters = min_letters
        self._max_letters = max_letters

    def prompt(self, index: int) -> Prompt:
        """Word number `index` of this seed."""
        source = random.Random(f"reverse-text/{self._seed}/{index}")
        length = source.randint(self._min_letters, self._max_letters)
        word = "".join(source.choice(string.ascii_lowercase) for _ in range(length))
        return Prompt(user=INSTRUCTION + word, answer=word[::-1])

    def reward(self, prompt: Prompt, completion: str) -> float:
        """Letters in their right place, over the longer of answer and completion: 0 to 1."""
        given = completion.strip()
        matches = sum(a == b for a, b in zip(given, prompt.answer, strict=False))
        return matches / max(len(given), len(prompt.answer))
