"""Topology: slots, names of ports, URLs."""

from __future__ import annotations

import pytest

from protocol.ids import Slot
from slurm.topology import SERVICES, base_url, build_topology, port_names, slots


def _ports(engine_groups: list[int]) -> dict[str, int]:
    return {name: 7000 + number for number, name in enumerate(port_names(engine_groups))}


def test_slots_count_inside_their_group_whatever_the_order() -> None:
    assert slots([0, 0, 1, 1]) == [Slot(0, 0), Slot(0, 1), Slot(1, 0), Slot(1, 1)]
    assert slots([0, 1, 0]) == [Slot(0, 0), Slot(1, 0), Slot(0, 1)]
    assert slots([]) == []


def test_services_come_first_then_engines() -> None:
    assert port_names([0, 1]) == [*SERVICES, "g0e0", "g1e0"]


def test_a_map_of_two_groups() -> None:
    topology = build_topology([0, 0, 1], _ports([0, 0, 1]))
    assert topology.admin_base_urls == [
        "http://127.0.0.1:7005",
        "http://127.0.0.1:7006",
        "http://127.0.0.1:7007",
    ]
    assert topology.admin_engine_groups == [0, 0, 1]
    assert topology.groups == [0, 1]
    assert topology.router_url == "http://127.0.0.1:7000"
    assert topology.router_metrics_port == 7001
    assert topology.orchestrator_url == "http://127.0.0.1:7002"
    assert topology.trainer_url == "http://127.0.0.1:7003"
    assert topology.rendezvous_port == 7004
    assert [place.slot for place in topology.members(0)] == [Slot(0, 0), Slot(0, 1)]
    assert {place.role for place in topology.engines} == {"regular"}


def test_members_of_an_unknown_group_is_an_error() -> None:
    topology = build_topology([0], _ports([0]))
    with pytest.raises(ValueError, match=r"no group 3 in this topology: groups are \[0\]"):
        topology.members(3)


def test_missing_and_equal_ports_are_errors() -> None:
    ports = _ports([0])
    with pytest.raises(ValueError, match="no port for trainer, g0e0"):
        build_topology([0], {k: v for k, v in ports.items() if k not in ("trainer", "g0e0")})
    with pytest.raises(ValueError, match="port 7000 is given to router and to g0e0"):
        build_topology([0], {**ports, "g0e0": 7000})


def test_ipv6_addresses_get_brackets() -> None:
    assert base_url("::1", 80) == "http://[::1]:80"
    assert base_url("node-1", 80) == "http://node-1:80"
