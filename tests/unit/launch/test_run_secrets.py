"""Secrets of a run: fresh each time, readable by the owner only."""

from __future__ import annotations

from pathlib import Path

from launch.run_secrets import new_admin_token, new_run_id, write_secret


def test_tokens_and_ids_differ_between_runs() -> None:
    assert new_admin_token() != new_admin_token()
    assert len(new_admin_token()) == 48
    assert new_run_id("quick") != new_run_id("quick")
    assert new_run_id("quick").startswith("quick-")


def test_a_secret_is_for_the_owner_only_even_over_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "admin_token"
    path.write_text("old")
    path.chmod(0o644)
    write_secret(path, "abc")
    assert path.read_text() == "abc\n"
    assert path.stat().st_mode & 0o777 == 0o600
