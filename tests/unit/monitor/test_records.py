"""Numbers that leave a step record."""

from __future__ import annotations

from tests.unit.monitor.monitor_fixtures import make_record


def test_values_are_flat_finite_floats() -> None:
    record = make_record(trainer={"loss": 0.5, "grad_norm": float("nan")})
    values = record.values()
    assert values["trainer/loss"] == 0.5
    assert "trainer/grad_norm" not in values
    assert values["reward/mean"] == 0.412
    assert values["policy_version"] == 12.0
    assert all(type(value) is float for value in values.values())
