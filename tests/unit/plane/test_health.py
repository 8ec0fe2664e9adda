"""Health of one engine: thresholds, waits, what is news, stalls."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.plane.events import EngineAnswered, EngineSilent, EngineStuck
from orchestrator.plane.health import EngineHealth, ProbeSettings, Sighting
from protocol.ids import Slot

SLOT = Slot(1, 0)


def sighting(
    now: float = 0.0, *, core_age_s: float = 0.0, running: int = 0, tokens: int = 0, **says: Any
) -> Sighting:
    facts: dict[str, Any] = {
        "boot_id": "b1",
        "life": 0,
        "world_size": 1,
        "weight_version": 3,
        "paused": False,
    }
    answer = EngineAnswered(slot=SLOT, asked_at=now, **(facts | says))
    return Sighting(answer, core_age_s, running, tokens)


def health(life: int = 0, **settings: Any) -> EngineHealth:
    return EngineHealth(ProbeSettings(**({"retry_s": 0.2} | settings)), SLOT, life, now=10.0)


def ready(**settings: Any) -> EngineHealth:
    engine = health(**settings)
    assert engine.answered(10.0, sighting(10.0)) is not None
    return engine


def test_is_asked_at_once() -> None:
    assert health().next_probe_at == 10.0


def test_first_answer_is_news_and_the_next_is_not() -> None:
    engine = health()
    first = sighting(10.0)
    assert engine.answered(10.0, first) == first.answer
    assert (engine.health, engine.next_probe_at) == ("ready", 11.0)
    assert engine.answered(11.0, sighting(11.0)) is None
    assert engine.last_sighting == sighting(11.0)


def test_becomes_ready_after_several_answers_in_a_row() -> None:
    engine = health(success_threshold=2)
    assert engine.answered(10.0, sighting()) is None
    assert (engine.health, engine.next_probe_at) == ("unknown", 10.2)
    assert engine.missed(10.2, "refused") is None
    assert engine.answered(10.4, sighting()) is None
    assert engine.answered(10.6, sighting()) is not None
    assert engine.health == "ready"


@pytest.mark.parametrize(
    "change", [{"boot_id": "b2"}, {"life": 1}, {"weight_version": None}, {"paused": True}]
)
def test_a_change_of_what_it_says_is_news(change: dict[str, Any]) -> None:
    engine = ready()
    changed = sighting(11.0, **change)
    assert engine.answered(11.0, changed) == changed.answer
    assert engine.answered(11.5, changed) is None


def test_a_pause_that_lasts_is_told_again_after_longer_and_longer_waits() -> None:
    engine = ready()
    paused = sighting(11.0, paused=True)
    told = [now for now in range(11, 30) if engine.answered(float(now), paused) is not None]
    assert told == [11, 12, 14, 18, 26]
    assert engine.answered(30.0, sighting(30.0)) is not None
    told = [now for now in range(31, 36) if engine.answered(float(now), paused) is not None]
    assert told == [31, 32, 34], "the next pause begins with a short wait again"


def test_a_first_miss_is_asked_again_soon_and_is_no_news() -> None:
    engine = ready()
    assert engine.missed(11.0, "timeout") is None
    assert (engine.health, engine.num_misses) == ("not_ready", 1)
    assert engine.next_probe_at == 11.2
    assert engine.answered(11.2, sighting()) is None
    assert (engine.health, engine.num_misses) == ("ready", 0)


def test_fails_after_misses_in_a_row_and_tells_it_once() -> None:
    engine = health(life=4)
    engine.answered(10.0, sighting())
    assert engine.missed(11.0, "timeout") is None
    assert engine.missed(11.2, "timeout") is None
    assert engine.missed(11.4, "refused") == EngineSilent(SLOT, 4, "refused")
    assert engine.health == "failed"
    assert engine.last_error == "refused"
    assert engine.missed(11.6, "refused") is None


def test_an_answer_between_misses_starts_the_count_anew() -> None:
    engine = ready(failure_threshold=2)
    for now in (11.0, 12.0, 13.0):
        assert engine.missed(now, "timeout") is None
        assert engine.answered(now + 0.2, sighting()) is None
    assert engine.health == "ready"


def test_a_threshold_of_one_fails_at_once() -> None:
    engine = ready(failure_threshold=1)
    assert isinstance(engine.missed(11.0, "refused"), EngineSilent)


def test_a_failed_engine_is_asked_for_ever_with_growing_waits() -> None:
    engine = ready(failure_threshold=1, interval_s=1.0, backoff_max_s=5.0)
    now, waits = 11.0, []
    for _ in range(40):
        engine.missed(now, "refused")
        waits.append(round(engine.next_probe_at - now, 6))
        now = engine.next_probe_at
    assert waits[:5] == [0.2, 2.0, 4.0, 5.0, 5.0]
    assert waits[-1] == 5.0


def test_a_failed_engine_that_answers_is_news_even_when_it_says_the_same() -> None:
    engine = ready(failure_threshold=1)
    engine.missed(11.0, "refused")
    again = sighting(12.0)
    assert engine.answered(12.0, again) == again.answer
    assert engine.health == "ready"


def test_an_engine_that_was_never_ready_does_not_fail() -> None:
    engine = health(failure_threshold=2)
    for now in range(10, 40):
        assert engine.missed(now, "refused") is None
        assert engine.next_probe_at == now + 0.2
    assert engine.health == "unknown"


def test_stalled_when_requests_run_and_no_token_comes() -> None:
    engine = ready(stall_timeout_s=5.0)
    for now in range(11, 16):
        assert engine.answered(now, sighting(now, running=2, tokens=7)) is None
    news = engine.answered(17.5, sighting(17.5, running=2, tokens=7))
    assert news == EngineStuck(SLOT, "b1", "engine_stalled", "2 requests and no token for 6.5 s")
    assert engine.answered(30.0, sighting(30.0, running=2, tokens=7)) is None


@pytest.mark.parametrize(
    "alive", [{"tokens": 8, "running": 2}, {"running": 0}, {"running": 2, "paused": True}]
)
def test_moving_idle_or_paused_is_not_stalled(alive: dict[str, Any]) -> None:
    engine = ready(stall_timeout_s=5.0)
    engine.answered(11.0, sighting(tokens=7, running=2, paused=alive.get("paused", False)))
    news = engine.answered(14.0, sighting(**{"tokens": 7, **alive}))
    assert not isinstance(news, EngineStuck)
    still = engine.answered(18.0, sighting(**({"running": 2, "tokens": 8} | alive)))
    assert not isinstance(still, EngineStuck)


def test_a_new_boot_has_all_its_time() -> None:
    engine = ready(stall_timeout_s=5.0)
    engine.answered(11.0, sighting(running=1))
    engine.answered(15.0, sighting(running=1, boot_id="b2"))
    assert engine.answered(19.0, sighting(running=1, boot_id="b2")) is None
    stuck = engine.answered(20.5, sighting(running=1, boot_id="b2"))
    assert isinstance(stuck, EngineStuck)
    assert stuck.boot_id == "b2"


def test_a_silent_core_is_hung_whatever_the_tokens_say() -> None:
    engine = ready(core_hung_s=4.0)
    assert engine.answered(11.0, sighting(core_age_s=3.9)) is None
    news = engine.answered(12.0, sighting(core_age_s=4.5))
    assert news == EngineStuck(SLOT, "b1", "core_hung", "engine core silent for 4.5 s")
    assert engine.answered(13.0, sighting(core_age_s=5.5)) is None
