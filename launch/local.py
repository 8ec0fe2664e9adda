"""`muster run` on one machine: preflight, plan, run, accounting.

    config -> output directory, ports, model -> plan (files) -> LocalRun -> what is left behind

`--dry-run` stops after the plan and touches nothing but `<output_dir>/plan/`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launch.accounting import ShmLedger, settle
from launch.local_plan import Facts, Plan, PlanError, build_plan
from launch.local_run import LocalRun, echo_on_console, say_on_console
from launch.machine import GPU_DEVICE, this_machine
from launch.ports import (
    PortsExhausted,
    candidates,
    ephemeral_range,
    free_ports,
    lease_ports,
    runtime_dir,
    runtime_dir_path,
)
from launch.processes import ProcessTable
from launch.run_dir import RunDir, RunIsAlive, write_plan_files
from launch.run_model import ModelError, ensure_model, model_dir
from launch.run_secrets import (
    ADMIN_TOKEN_VARIABLE,
    API_KEY_VARIABLE,
    new_admin_token,
    new_run_id,
)
from slurm.topology import port_names

if TYPE_CHECKING:
    from launch.config import RunConfig

_HOST = "127.0.0.1"
_GUARDIAN_TIMEOUT_S = 10.0


def run(config: RunConfig, dry_run: bool = False) -> int:
    """Run `config` on this machine to its end; returns the exit code.

    0: the run is complete. 1: something failed, named on the console. 128 + n: ended by signal n.
    """
    try:
        return _dry_run(config) if dry_run else _run(config)
    except (RunIsAlive, PortsExhausted, PlanError, ModelError) as error:
        say_on_console(str(error))
        return 1


def _dry_run(config: RunConfig) -> int:
    names = port_names(config.deployment.engine_groups or [])
    ports = free_ports(names, _allowed_ports(config), host=_HOST)
    scratch = runtime_dir_path() / "dry-run"
    plan = build_plan(config, _facts(config, f"{config.name}-dry-run", ports, scratch))
    write_plan_files(plan.output_dir, plan.files)
    print(plan.files["plan.json"], end="", flush=True)
    return 0


def _run(config: RunConfig) -> int:
    launch_id = secrets.token_hex(4)
    mark = f"{launch_id}/"
    output_dir = Path(config.output_dir).resolve()
    names = port_names(config.deployment.engine_groups or [])
    ledger = ShmLedger(mark)
    with ExitStack() as stack:
        run_dir = RunDir(output_dir)
        stack.callback(run_dir.release)
        lease = stack.enter_context(lease_ports(names, _allowed_ports(config), host=_HOST))
        scratch = runtime_dir() / launch_id
        scratch.mkdir(mode=0o700)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        stack.enter_context(_guardian(mark, scratch))
        run_id = config.run_id or new_run_id(config.name)
        plan = build_plan(config, _facts(config, run_id, lease.ports, scratch))
        write_plan_files(plan.output_dir, plan.files)
        ensure_model(config, output_dir, mark=mark, say=say_on_console)
        token = new_admin_token()
        run_dir.write_token(token)
        code = asyncio.run(_main(plan, run_dir, ledger, launch_id, token))
        left = settle(mark, lease.ports, ledger, host=_HOST)
    say_on_console(f"stopped; {left}")
    return code


async def _main(plan: Plan, run_dir: RunDir, ledger: ShmLedger, launch_id: str, token: str) -> int:
    table = ProcessTable(launch_id, base_environment(os.environ, token))
    running = LocalRun(
        plan,
        run_dir,
        table,
        token=token,
        ledger=ledger,
        say=say_on_console,
        echo=echo_on_console,
    )
    return await running.main()


def base_environment(inherited: Mapping[str, str], token: str) -> dict[str, str]:
    """What every process starts from: the user's environment without settings of this command.

    `MUSTER_...` variables have been read into the plan; a process that read them again could
    disagree with it.
    """
    kept = {
        key: value
        for key, value in inherited.items()
        if not key.upper().startswith("MUSTER_") or key == API_KEY_VARIABLE
    }
    return {**kept, ADMIN_TOKEN_VARIABLE: token}


@contextmanager
def _guardian(mark: str, scratch: Path) -> Iterator[None]:
    """Have somebody who cleans up if this process is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "launch.guardian", mark, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield
        finally:
            process.communicate(timeout=_GUARDIAN_TIMEOUT_S)


def _facts(config: RunConfig, run_id: str, ports: Mapping[str, int], scratch: Path) -> Facts:
    output_dir = Path(config.output_dir).resolve()
    return Facts(
        run_id=run_id,
        output_dir=output_dir,
        model_dir=model_dir(config, output_dir),
        scratch_dir=scratch,
        python=sys.executable,
        ports=ports,
        num_gpus=_num_gpus(),
        host=_HOST,
    )


def _allowed_ports(config: RunConfig) -> list[int]:
    deployment = config.deployment
    return list(candidates(deployment.first_port, deployment.last_port, ephemeral_range()))


def _num_gpus() -> int:
    """CUDA devices that this machine shows and that the installed torch can use."""
    if not this_machine().has_cuda:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip()])
    return sum(1 for name in os.listdir("/dev") if GPU_DEVICE.fullmatch(name))
