"""Tokens that the engine has made since it started, counted where vLLM reports its iterations."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class TokenCounter:
    """A counter that only grows."""

    def __init__(self) -> None:
        self.total = 0

    def stat_logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """vLLM's factory of a stat logger that adds to this counter."""
        return _CountingLogger(self)


class _CountingLogger(StatLoggerBase):
    def __init__(self, counter: TokenCounter) -> None:
        self._counter = counter

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self._counter.total += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
