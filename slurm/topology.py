"""Who sits where: groups, slots, ports and URLs of a run. Pure.

config -> `port_names` (what needs a port, in a fixed order) -> ports, chosen elsewhere ->
`build_topology` (the whole map). Everything that another process has to be told about addresses is
read from the result, so that no two places compute a URL.

Rules: the order of engines is the order of `engine_groups`; an engine's index counts its group's
earlier entries; URLs are canonical (`http://host:port`, no trailing slash) because the router
compares them as raw strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.ids import Slot
from protocol.launcher_api import Role

SERVICES = ("router", "router-metrics", "orchestrator", "trainer", "rendezvous")


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine's slot, address and role. One admin URL an engine."""

    slot: Slot
    host: str
    port: int
    role: Role = "regular"

    @property
    def url(self) -> str:
        """Canonical base URL; data and admin routes share the port."""
        return base_url(self.host, self.port)


@dataclass(frozen=True, slots=True)
class Topology:
    """The map of a run. `engines` in the order of `admin_engine_groups`."""

    engines: tuple[EnginePlace, ...]
    host: str
    router_port: int
    router_metrics_port: int
    orchestrator_port: int
    trainer_port: int
    rendezvous_port: int

    @property
    def router_url(self) -> str:
        """Where clients send requests."""
        return base_url(self.host, self.router_port)

    @property
    def orchestrator_url(self) -> str:
        """Status and launcher API of the orchestrator."""
        return base_url(self.host, self.orchestrator_port)

    @property
    def trainer_url(self) -> str:
        """Control server of trainer rank 0."""
        return base_url(self.host, self.trainer_port)

    @property
    def admin_base_urls(self) -> list[str]:
        """Admin URL of each engine."""
        return [engine.url for engine in self.engines]

    @property
    def admin_engine_groups(self) -> list[int]:
        """Group of each engine, parallel to `admin_base_urls`."""
        return [engine.slot.group for engine in self.engines]

    @property
    def groups(self) -> list[int]:
        """Group numbers, ascending."""
        return sorted({engine.slot.group for engine in self.engines})

    def members(self, group: int) -> tuple[EnginePlace, ...]:
        """Engines of `group`, by index. Raises ValueError for an unknown group."""
        found = tuple(engine for engine in self.engines if engine.slot.group == group)
        if not found:
            raise ValueError(f"no group {group} in this topology: groups are {self.groups}")
        return found


def base_url(host: str, port: int) -> str:
    """Canonical URL of a server; IPv6 addresses get their brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def slots(engine_groups: Sequence[int]) -> list[Slot]:
    """Slot of each engine. `[0, 1, 0]` -> g0e0, g1e0, g0e1."""
    seen: dict[int, int] = {}
    found = []
    for group in engine_groups:
        index = seen.get(group, 0)
        seen[group] = index + 1
        found.append(Slot(group, index))
    return found


def port_names(engine_groups: Sequence[int]) -> list[str]:
    """Everything that needs a port of its own: services first, then engines by id."""
    return [*SERVICES, *(slot.engine_id for slot in slots(engine_groups))]


def build_topology(
    engine_groups: Sequence[int], ports: Mapping[str, int], *, host: str = "127.0.0.1"
) -> Topology:
    """Map of a run whose processes all live on `host`.

    `ports` has one entry for each of `port_names(engine_groups)`; raises ValueError when one is
    missing or two are equal.
    """
    names = port_names(engine_groups)
    missing = [name for name in names if name not in ports]
    if missing:
        raise ValueError(f"no port for {', '.join(missing)}")
    taken: dict[int, str] = {}
    for name in names:
        if ports[name] in taken:
            raise ValueError(f"port {ports[name]} is given to {taken[ports[name]]} and to {name}")
        taken[ports[name]] = name
    return Topology(
        engines=tuple(
            EnginePlace(slot, host, ports[slot.engine_id]) for slot in slots(engine_groups)
        ),
        host=host,
        router_port=ports["router"],
        router_metrics_port=ports["router-metrics"],
        orchestrator_port=ports["orchestrator"],
        trainer_port=ports["trainer"],
        rendezvous_port=ports["rendezvous"],
    )
