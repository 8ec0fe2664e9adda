"""`python -m tests.sim`: see `--help`."""

import sys

from tests.sim.command import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
