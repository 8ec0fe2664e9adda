from __future__ import annotations

import os
import select
import subprocess
import sys

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
"""
_CHILD = """
import time
from engine.parent_death import die_with_parent
die_with_parent()
print("armed", flush=True)
time.sleep(60)
"""


def test_child_ends_with_its_parent() -> None:
    """The parent ends once the child is armed; the pipe that the child holds closes with it."""
    reading, writing = os.pipe()
    try:
        subprocess.run(
            [
                sys.executable,
                "-c",
                _PARENT.replace("PIPE)", f"PIPE, pass_fds=[{writing}])"),
                _CHILD,
            ],
            pass_fds=[writing],
            timeout=30,
            check=True,
        )
        os.close(writing)
        writing = -1
        ready, _, _ = select.select([reading], [], [], 10)
        assert ready
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
