"""Ends the processes of a launch whose launcher was killed. One small process a launch.

`python -m launch.guardian <mark> <directory>`: standard input is a pipe that only the launcher
holds open. When it closes, whatever the reason, every process with the mark is ended and the
directory (short-lived files of the run) is removed. At an orderly end there is nothing left to do.

Why: the parent-death signal ends direct children at once but is not inherited; what they had
started (engine cores, torchrun's workers in sessions of their own) would live on and keep memory.
Rules: standard library only, no logging, never dies of a signal meant for the terminal.
"""

from __future__ import annotations

import shutil
import signal
import sys

from launch.sweep import end_marked

_GRACE_S = 2.0


def main(mark: str, directory: str) -> None:
    """Wait for the launcher's end, then clean up after it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(mark, grace_s=_GRACE_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
