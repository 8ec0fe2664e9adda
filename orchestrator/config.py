"""Config of the orchestrator. Importable without torch and vLLM.

Root of `muster orchestrator @ plan/orchestrator.json`, and the `[orchestrator]` section of a run's
TOML; what a whole run shares (run id, model, weight broadcast, places) is filled in by the
launcher. Timeouts nest: one probe < one admin call < one phase < one update.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from orchestrator.rollouts.config import RolloutsConfig
from protocol.config import (
    Config,
    ModelConfig,
    Port,
    Seconds,
    WandbConfig,
    WeightBroadcastConfig,
)

ADMIN_TOKEN_VARIABLE = "MUSTER_ADMIN_TOKEN"
API_KEY_VARIABLE = "MUSTER_API_KEY"
DEFAULT_ROUTER_URL = "http://127.0.0.1:8000"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def canonical_url(text: str) -> str:
    """`http://host:port`, lower case, port always there, no slash at the end.

    The router compares URLs as raw strings: one engine must have one spelling. Raises ValueError
    for anything that is not the address of a server.
    """
    expected = "expected http://host:port"
    parts = urlsplit(text)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(expected)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{expected}, without a path")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{expected}, without a user")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{expected}, with a port from 1 to 65535") from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{_DEFAULT_PORTS[parts.scheme] if port is None else port}"


def is_loopback(url: str) -> bool:
    """Whether `url` only means something on the machine that it is used on."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


BaseUrl = Annotated[str, AfterValidator(canonical_url)]


class ClientConfig(Config):
    """Where the router and the engines are, and how long one call to them may take."""

    router: Literal["vllm", "vllm_pd", "none"] = Field(
        "vllm",
        description="`vllm`: a vllm-router in regular mode, to which engines are added. `vllm_pd`: "
        "one with prefill and decode roles, started with all engines; their gates decide who gets "
        "requests. `none`: requests go to the engines themselves.",
    )
    base_url: BaseUrl = Field(
        DEFAULT_ROUTER_URL,
        description="Router that generation requests go to. Not used without a router.",
    )
    admin_base_url: list[BaseUrl] = Field(
        default_factory=list,
        description="Admin URL of each engine, in a fixed order. `muster run` fills it in.",
    )
    admin_engine_groups: list[Annotated[int, Field(ge=0)]] | None = Field(
        None,
        description="Group of each entry of `admin_base_url`, e.g. `[0, 0, 1, 1]`. Empty: every "
        "engine is a group of its own. Given to `muster run` without URLs, it is the number and "
        "the grouping of the engines that are started.",
    )
    connect_timeout_s: Seconds = Field(2.0, description="Longest wait for a TCP connection.")
    admin_timeout_s: Seconds = Field(
        10.0, description="Longest wait for the answer to a short admin call (admit, fence, abort)."
    )
    router_timeout_s: Seconds = Field(
        8.0,
        description="Longest wait for the router to add an engine; it asks the engine first.",
    )

    @model_validator(mode="after")
    def _engines_are_distinct_and_grouped(self) -> Self:
        urls = self.admin_base_url
        repeated = sorted({url for url in urls if urls.count(url) > 1})
        if repeated:
            raise ValueError(f"admin_base_url has {', '.join(repeated)} more than once")
        if self.router != "none" and self.base_url in urls:
            raise ValueError(f"base_url = {self.base_url} is also in admin_base_url")
        if self.admin_engine_groups is None and urls:
            self.admin_engine_groups = list(range(len(urls)))
        groups = self.admin_engine_groups
        if groups is None:
            return self
        if urls and len(groups) != len(urls):
            raise ValueError(
                f"admin_engine_groups has {len(groups)} entries, admin_base_url has {len(urls)}: "
                "expected one group an engine"
            )
        present = sorted(set(groups))
        if present != list(range(len(present))):
            raise ValueError(
                f"admin_engine_groups = {groups} must name every group from 0 to the highest"
            )
        return self

    @model_validator(mode="after")
    def _router_can_be_used(self) -> Self:
        if self.router == "none" and self.base_url != DEFAULT_ROUTER_URL:
            raise ValueError(
                f'base_url = {self.base_url} names a router, and router = "none": expected '
                'router = "vllm" or "vllm_pd", or no base_url'
            )
        groups = self.admin_engine_groups
        if self.router == "vllm_pd" and groups is not None and len(set(groups)) < 2:
            raise ValueError(
                f'router = "vllm_pd" with admin_engine_groups = {groups}: expected at least two '
                "groups, one that prefills and one that decodes"
            )
        return self


class PolicyConfig(ModelConfig):
    """The policy, and where it is served."""

    client: ClientConfig = Field(
        default_factory=ClientConfig, description="Addresses of router and engines."
    )


class ProbeConfig(Config):
    """How engines are asked whether they are well."""

    interval_s: Seconds = Field(1.0, description="Time between two probes of one engine.")
    timeout_s: Seconds = Field(0.8, description="Longest wait for the answer to a probe.")
    retry_s: Seconds = Field(0.1, description="Wait before the next probe after the first miss.")
    backoff_max_s: Seconds = Field(10.0, description="Longest wait between probes of a failed one.")
    success_threshold: int = Field(
        1, ge=1, description="Answers in a row after which an engine is ready."
    )
    failure_threshold: int = Field(
        3, ge=1, description="Misses in a row after which an engine has failed."
    )

    @model_validator(mode="after")
    def _probes_do_not_overlap(self) -> Self:
        if self.timeout_s > self.interval_s:
            raise ValueError(
                f"timeout_s = {self.timeout_s:g} must not be above interval_s = {self.interval_s:g}"
            )
        if self.retry_s > self.interval_s or self.interval_s > self.backoff_max_s:
            raise ValueError(
                f"expected retry_s = {self.retry_s:g} <= interval_s = {self.interval_s:g} <= "
                f"backoff_max_s = {self.backoff_max_s:g}"
            )
        return self


class GroupsConfig(Config):
    """When engine groups leave, return, or are left out."""

    lease_s: Seconds = Field(
        10.0,
        description="An admitted engine that hears nothing from us for so long closes its gate.",
    )
    startup_timeout_s: Seconds = Field(
        600.0, description="Longest time from the launch of a group to the answer of all members."
    )
    startup_wait_s: Seconds = Field(
        60.0,
        description="Once a group is up, the first update waits this long for the others.",
    )
    stall_timeout_s: Seconds = Field(
        60.0,
        description="An engine that has requests and makes no token for so long is stalled.",
    )
    core_hung_s: Seconds = Field(
        60.0, description="An engine whose core has not answered for so long is hung."
    )
    max_evictions: int = Field(
        5, ge=1, description="So many evictions within `eviction_window_s` quarantine a group."
    )
    eviction_window_s: Seconds = Field(600.0, description="Window of `max_evictions`.")
    quarantine_s: Seconds = Field(
        120.0, description="First stay in quarantine; doubles each time, up to 8 times this."
    )
    min_serving_groups: int = Field(
        1, ge=1, description="With fewer admitted groups dispatch stops and the trainer waits."
    )
    no_capacity_timeout_s: Seconds = Field(
        600.0, description="Longest time without enough groups; then the run fails."
    )


class RetryConfig(Config):
    """When an update that failed is tried again."""

    wait_s: Seconds = Field(1.0, description="First wait; doubles after each failure in a row.")
    wait_max_s: Seconds = Field(10.0, description="Longest wait.")

    @model_validator(mode="after")
    def _wait_grows(self) -> Self:
        if self.wait_s > self.wait_max_s:
            raise ValueError(
                f"wait_s = {self.wait_s:g} must not be above wait_max_s = {self.wait_max_s:g}"
            )
        return self


class OrchestratorConfig(Config):
    """One orchestrator: the admin plane, the rollouts and the batches of a run."""

    run_id: str = Field("local", min_length=1, description="Id of the run.")
    output_dir: Path = Field(
        Path("outputs/run"), description="Directory of the run; journal and events go there."
    )
    host: str = Field("127.0.0.1", description="Address that the status API binds.")
    port: Port = Field(8100, description="Port of the status API.")
    trainer_url: BaseUrl = Field(
        "http://127.0.0.1:29400", description="Control server of the trainer."
    )
    max_steps: int = Field(60, ge=0, description="Optimizer steps; the run ends after them.")
    step_timeout_s: Seconds = Field(
        3600.0,
        description="Longest time from handing over a batch to its policy version in service.",
    )
    stop_timeout_s: Seconds = Field(
        20.0, description="Longest time to end what is in flight when the run is over."
    )
    model: PolicyConfig = Field(
        default_factory=PolicyConfig, description="The policy and where it is served."
    )
    commit: Literal["all"] = Field(
        "all", description="`all`: every group is paused at once while weights are swapped."
    )
    has_launcher: bool = Field(
        False, description="A launcher is attached: it reports its groups and relaunches them."
    )
    probe: ProbeConfig = Field(default_factory=ProbeConfig, description="Probes of engines.")
    groups: GroupsConfig = Field(default_factory=GroupsConfig, description="Life of the groups.")
    update_retry: RetryConfig = Field(
        default_factory=RetryConfig, description="Waits between tries of an update."
    )
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig, description="Episodes.")
    weight_broadcast: WeightBroadcastConfig = Field(
        default_factory=WeightBroadcastConfig, description="How weights travel to the engines."
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Where numbers go.")

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        longest = self.rollouts.max_prompt_tokens + self.rollouts.max_completion_tokens
        if longest > self.model.max_model_len:
            raise ValueError(
                f"rollouts.max_prompt_tokens = {self.rollouts.max_prompt_tokens} plus "
                f"rollouts.max_completion_tokens = {self.rollouts.max_completion_tokens} "
                f"must not be above model.max_model_len = {self.model.max_model_len}"
            )
        return self

    @model_validator(mode="after")
    def _lease_outlives_probes(self) -> Self:
        if self.groups.lease_s <= self.probe.interval_s + self.probe.timeout_s:
            raise ValueError(
                f"groups.lease_s = {self.groups.lease_s:g} must be above probe.interval_s + "
                f"probe.timeout_s = {self.probe.interval_s + self.probe.timeout_s:g}: "
                "probes renew the lease"
            )
        return self

    @model_validator(mode="after")
    def _groups_suffice(self) -> Self:
        engine_groups = self.model.client.admin_engine_groups
        if engine_groups is None:  # not known yet: `muster run` looks again
            return self
        num_groups = len(set(engine_groups))
        if self.groups.min_serving_groups > num_groups:
            raise ValueError(
                f"groups.min_serving_groups = {self.groups.min_serving_groups} is above the "
                f"number of groups, {num_groups}"
            )
        return self

    @model_validator(mode="after")
    def _trainer_is_reachable(self) -> Self:
        host = self.weight_broadcast.host
        remote = [url for url in self.model.client.admin_base_url if not is_loopback(url)]
        if remote and is_loopback(f"http://{host}"):
            raise ValueError(
                f"weight_broadcast.host = {host} cannot be reached from {remote[0]} "
                "(model.client.admin_base_url); expected an address that is routable from there"
            )
        return self

    @model_validator(mode="after")
    def _ports_do_not_clash(self) -> Self:
        client = self.model.client
        router_url = None if client.router == "none" else client.base_url
        owners = {"base_url": router_url, "trainer_url": self.trainer_url}
        own = canonical_url(f"http://{self.host}:{self.port}")
        engines = client.admin_base_url
        for name, url in owners.items():
            if url == own:
                raise ValueError(f"port = {self.port} clashes with {name} = {url}")
        if own in engines:
            raise ValueError(f"port = {self.port} clashes with model.client.admin_base_url {own}")
        if self.trainer_url in engines or self.trainer_url == router_url:
            raise ValueError(f"trainer_url = {self.trainer_url} is also the URL of another server")
        return self


def admin_token() -> str:
    """Bearer token of all admin routes. Raises ValueError when there is none."""
    token = os.environ.get(ADMIN_TOKEN_VARIABLE, "")
    if not token:
        raise ValueError(f"environment variable {ADMIN_TOKEN_VARIABLE} is not set")
    return token


def api_key() -> str | None:
    """API key of the data routes, where one is configured."""
    return os.environ.get(API_KEY_VARIABLE) or None
