"""Errors that end a run."""

from __future__ import annotations


class RunFailed(Exception):
    """The run cannot go on; the text is for the user."""
