from __future__ import annotations

import pytest

from engine.admission import Gate

BOOT = "boot-a"


def opened(version: int = 3, *, now: float = 10.0, lease_s: float = 5.0) -> Gate:
    admitted = Gate(BOOT).hold(version).admit(now, boot_id=BOOT, version=version, lease_s=lease_s)
    assert admitted.result == "ok"
    return admitted.gate


def test_boots_closed_and_holds_nothing() -> None:
    gate = Gate(BOOT)
    assert (gate.admission, gate.reason, gate.weight_version) == ("closed", "booted", None)
    assert not gate.is_open


def test_opens_for_its_boot_at_its_version() -> None:
    gate = opened()
    assert gate.is_open
    assert (gate.reason, gate.lease_until) == ("admitted", 15.0)


@pytest.mark.parametrize(
    ("held", "boot_id", "version", "result"),
    [
        (3, "boot-b", 3, "foreign_boot"),
        (3, BOOT, 2, "wrong_version"),
        (3, BOOT, 4, "wrong_version"),
        (None, BOOT, 0, "wrong_version"),
        (None, "boot-b", 0, "foreign_boot"),
    ],
)
def test_refusal_changes_nothing(held: int | None, boot_id: str, version: int, result: str) -> None:
    gate = Gate(BOOT).hold(held)
    assert gate.admit(1.0, boot_id=boot_id, version=version, lease_s=5.0) == (gate, result)


def test_refusal_does_not_close_or_renew_an_open_gate() -> None:
    gate = opened()
    assert gate.admit(12.0, boot_id=BOOT, version=9, lease_s=99.0) == (gate, "wrong_version")


def test_version_zero_is_a_version() -> None:
    assert opened(0).is_open


def test_admitting_again_renews_the_lease() -> None:
    renewed = opened().admit(14.0, boot_id=BOOT, version=3, lease_s=5.0).gate
    assert renewed.expire(18.9).is_open
    assert not renewed.expire(19.0).is_open


def test_lease_runs_out() -> None:
    gate = opened()
    assert gate.expire(14.999) is gate
    closed = gate.expire(15.0)
    assert (closed.admission, closed.reason) == ("closed", "lease_expired")
    assert closed.lease_until is None
    assert closed.weight_version == 3


def test_expired_gate_opens_again() -> None:
    gate, result = opened().admit(100.0, boot_id=BOOT, version=3, lease_s=1.0)
    assert (result, gate.lease_until) == ("ok", 101.0)


def test_refused_admit_of_an_expired_gate_reports_it_closed() -> None:
    gate, result = opened().admit(100.0, boot_id="boot-b", version=3, lease_s=1.0)
    assert (result, gate.reason) == ("foreign_boot", "lease_expired")


def test_fence_keeps_its_first_reason() -> None:
    fenced = opened().fence("evicted")
    assert fenced.reason == "evicted"
    assert fenced.fence("again") is fenced
    assert fenced.expire(1000.0) is fenced


def test_new_version_keeps_the_gate_open() -> None:
    gate = opened(3).hold(4)
    assert gate.is_open
    assert gate.admit(11.0, boot_id=BOOT, version=3, lease_s=5.0).result == "wrong_version"
    assert gate.admit(11.0, boot_id=BOOT, version=4, lease_s=5.0).result == "ok"


def test_lost_weights_close_the_gate() -> None:
    gate = opened().hold(None)
    assert (gate.admission, gate.reason, gate.weight_version) == ("closed", "weights_lost", None)


def test_lost_weights_keep_the_reason_of_a_closed_gate() -> None:
    assert opened().fence("evicted").hold(None).reason == "evicted"
