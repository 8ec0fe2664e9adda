"""W&B as a listener that cannot hold up a run.

    log() -> bounded queue -> one thread: import, init, log -> files (offline) or the service

| what | what follows |
|---|---|
| the queue is full | the point is dropped and counted |
| wandb is missing, `init` fails or takes longer than `init_timeout_s` | one warning, nothing more |
| `close(timeout_s)` is over before W&B is done | one warning; the thread dies with the process |

Series have their own x axis, `step`: points may come late or out of order.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protocol.config import WandbConfig

logger = logging.getLogger(__name__)

_STEP = "step"
_QUEUE_SIZE = 1024
_INIT_TIMEOUT_S = 60.0

# (config, run_id, directory, init_timeout_s) -> a run with `log`, `define_metric` and `finish`.
MakeRun = Callable[[WandbConfig, str, Path, float], Any]


class WandbSink:
    """Sends numbers to W&B from a thread of its own. Safe to call in any state."""

    def __init__(
        self,
        config: WandbConfig,
        run_id: str,
        output_dir: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        make_run: MakeRun | None = None,
        init_timeout_s: float = _INIT_TIMEOUT_S,
        queue_size: int = _QUEUE_SIZE,
    ) -> None:
        """Returns at once. `settings` (the run's config) is shown beside the numbers."""
        self._config = config
        self._run_id = run_id
        self._dir = Path(config.dir) if config.dir else output_dir
        self._settings = dict(settings or {})
        self._make_run = make_run or _make_run
        self._init_timeout_s = init_timeout_s
        self._points: queue.Queue[dict[str, float] | None] = queue.Queue(queue_size)
        self._closing = threading.Event()
        self._dead = threading.Event()
        self.num_dropped = 0
        self._thread: threading.Thread | None = None
        if config.mode != "disabled":
            self._thread = threading.Thread(target=self._main, name="wandb", daemon=True)
            self._thread.start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Take one point of every series in `values`. Never waits."""
        if self._thread is None or self._closing.is_set() or self._dead.is_set():
            return
        try:
            self._points.put_nowait({**values, _STEP: step})
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float) -> None:
        """Hand over what is queued and finish the run, within `timeout_s`. Idempotent."""
        if self._thread is None or self._closing.is_set():
            return
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        try:
            self._points.put(None, timeout=timeout_s)
        except queue.Full:
            logger.warning("W&B is stuck: %d points are lost", self._points.qsize())
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "W&B did not finish within %.0f s; its files may be incomplete", timeout_s
            )
        elif self.num_dropped:
            logger.warning("W&B was too slow: %d points were dropped", self.num_dropped)

    def _main(self) -> None:
        """The thread. Whatever W&B throws ends here: a monitor never ends a run."""
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            run = self._make_run(self._config, self._run_id, self._dir, self._init_timeout_s)
            run.config.update(self._settings)
            run.define_metric(_STEP, hidden=True)
            run.define_metric("*", step_metric=_STEP)
            while (point := self._points.get()) is not None:
                run.log(point)
            run.finish()
        except Exception as error:  # noqa: BLE001  (task boundary; wandb raises many kinds)
            self._dead.set()
            logger.warning("W&B is off for the rest of this run: %s", _first_line(error))
            # Let a close() that waits for room in the queue go on.
            while self._points.qsize():
                self._points.get_nowait()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _make_run(config: WandbConfig, run_id: str, directory: Path, init_timeout_s: float) -> Any:
    """Start a run with the real wandb."""
    import wandb

    return wandb.init(
        mode=config.mode,
        project=config.project,
        entity=config.entity,
        name=config.name or run_id,
        id=run_id,
        group=config.group,
        tags=config.tags or None,
        dir=os.fspath(directory),
        settings=wandb.Settings(
            init_timeout=init_timeout_s,
            silent=True,
            console="off",
            x_disable_stats=True,
            disable_git=True,
            disable_code=True,
        ),
    )
