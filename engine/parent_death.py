"""A process that ends when the process that started it ends, however that happened."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class ParentGone(RuntimeError):
    """The parent ended before we could ask for the signal."""


def die_with_parent() -> None:
    """Have the kernel kill us when our parent is gone. Linux; elsewhere nothing.

    The signal is bound to the parent's thread that started us, which must live as long as the
    parent. Raises ParentGone when the parent ended meanwhile, since then no signal will come.
    """
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None:
        return
    if prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise ParentGone("the parent process has ended")
