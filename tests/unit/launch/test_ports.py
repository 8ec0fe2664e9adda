"""Ports: order, exclusion of other runs and listeners, what is left behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from launch import locks
from launch import ports as ports_module
from launch.ports import (
    PortsExhausted,
    can_bind,
    candidates,
    ephemeral_range,
    free_ports,
    lease_ports,
    runtime_dir,
)


def _always(host: str, port: int) -> bool:
    return True


def test_names_get_the_first_free_ports_in_order(tmp_path: Path) -> None:
    busy = {7001, 7002}
    with lease_ports(
        ["router", "engine"],
        range(7000, 7010),
        directory=tmp_path,
        is_free=lambda host, port: port not in busy,
    ) as lease:
        assert lease.ports == {"router": 7000, "engine": 7003}
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "port-7000.lock",
            "port-7003.lock",
        ]


def test_two_leases_share_no_port_until_release(tmp_path: Path) -> None:
    first = lease_ports(["a", "b"], range(7000, 7004), directory=tmp_path, is_free=_always)
    second = lease_ports(["a", "b"], range(7000, 7004), directory=tmp_path, is_free=_always)
    assert first.ports == {"a": 7000, "b": 7001}
    assert second.ports == {"a": 7002, "b": 7003}
    first.release()
    third = lease_ports(["a"], range(7000, 7004), directory=tmp_path, is_free=_always)
    assert third.ports == {"a": 7000}
    second.release()
    third.release()
    third.release()
    assert list(tmp_path.iterdir()) == []


def test_a_locked_port_is_not_even_probed(tmp_path: Path) -> None:
    probed: list[int] = []

    def is_free(host: str, port: int) -> bool:
        probed.append(port)
        return True

    with (
        lease_ports(["a"], [7000], directory=tmp_path, is_free=_always),
        lease_ports(["a"], [7000, 7001], directory=tmp_path, is_free=is_free) as lease,
    ):
        assert lease.ports == {"a": 7001}
    assert probed == [7001]


def test_too_few_ports_is_an_error_that_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(PortsExhausted, match="only 2 of 3 ports are free"):
        lease_ports(["a", "b", "c"], [7000, 7001], directory=tmp_path, is_free=_always)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_probe_leaves_no_lock(tmp_path: Path) -> None:
    def is_free(host: str, port: int) -> bool:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        lease_ports(["a"], [7000], directory=tmp_path, is_free=is_free)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_removed_by_its_last_holder_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder releases (and removes the file) between our open and our lock."""
    path = tmp_path / "port-7000.lock"
    real = locks.fcntl.flock
    calls: list[int] = []

    def flock(fd: int, flags: int) -> None:
        if not calls:
            path.unlink()
        calls.append(fd)
        real(fd, flags)

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with lease_ports(["a"], [7000], directory=tmp_path, is_free=_always):
        assert path.exists()
    assert len(calls) == 2


def test_candidates_leave_the_ephemeral_range_out() -> None:
    assert list(candidates(8, 14, (10, 12))) == [8, 9, 13, 14]
    assert list(candidates(8, 10, (20, 30))) == [8, 9, 10]


def test_ephemeral_range_is_read_from_the_system(tmp_path: Path) -> None:
    path = tmp_path / "range"
    path.write_text("40000\t50000\n")
    assert ephemeral_range(path) == (40000, 50000)
    assert ephemeral_range(tmp_path / "missing") == (32768, 60999)
    path.write_text("nonsense")
    assert ephemeral_range(path) == (32768, 60999)


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "0.0.0.0"])
def test_a_port_with_a_listener_cannot_be_bound(bound_to: str) -> None:
    with socket.socket() as server:
        server.bind((bound_to, 0))
        server.listen()
        port = server.getsockname()[1]
        assert not can_bind("127.0.0.1", port)
    assert can_bind("127.0.0.1", port)


def test_runtime_dir_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "_RUNTIME_ROOT", tmp_path)
    path = runtime_dir()
    assert path == tmp_path / f"muster-{os.getuid()}"
    assert path.stat().st_mode & 0o777 == 0o700
    assert runtime_dir() == path
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="is not a directory of user"):
        runtime_dir()


def test_free_ports_are_looked_at_and_not_held() -> None:
    def is_free(host: str, port: int) -> bool:
        return port % 2 == 1

    assert free_ports(["a", "b"], range(10), host="h", is_free=is_free) == {"a": 1, "b": 3}
    with pytest.raises(PortsExhausted, match="only 1 of 2"):
        free_ports(["a", "b"], [1, 2], host="h", is_free=is_free)


def test_all_runs_of_a_user_look_for_locks_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports_module, "_RUNTIME_ROOT", tmp_path)
    with lease_ports(["a"], [7000], is_free=_always):
        monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
        with pytest.raises(PortsExhausted):
            lease_ports(["a"], [7000], is_free=_always)
