"""Topology of a run, pure; Slurm rendering and supervision build on it."""
