"""The `muster` command, and the launcher that runs a plan on this machine."""
