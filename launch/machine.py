"""What this machine has that a config may ask for. Looks, and imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass

GPU_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that decide whether a config can run here."""

    has_cuda: bool


def this_machine() -> Machine:
    """CUDA counts when there is a device and the installed torch was built for it."""
    try:
        is_cpu_build = "+cpu" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        is_cpu_build = True
    has_device = any(GPU_DEVICE.fullmatch(name) for name in os.listdir("/dev"))
    return Machine(has_cuda=has_device and not is_cpu_build)
