"""Names of things that several processes talk about.

An engine's place is its slot (group, index). URLs and boot ids may change under it: a relaunch
brings a new boot id, a spare node a new URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENGINE_ID = re.compile(r"g(\d+)e(\d+)")

HEADER_ENGINE_ID = "X-Engine-Id"
HEADER_BOOT_ID = "X-Boot-Id"
HEADER_WEIGHT_VERSION = "X-Weight-Version"


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Place of an engine: its group and its index inside the group (both 0-based)."""

    group: int
    index: int

    @property
    def engine_id(self) -> str:
        """The slot as one word, `g<group>e<index>`."""
        return f"g{self.group}e{self.index}"

    @classmethod
    def parse(cls, engine_id: str) -> Slot:
        """Inverse of `engine_id`. Raises ValueError for anything else."""
        match = _ENGINE_ID.fullmatch(engine_id)
        if match is None:
            raise ValueError(f"engine id {engine_id!r} is not of the form g<group>e<index>")
        return cls(int(match[1]), int(match[2]))
