"""Start, watch and stop one operating-system process, with everything it starts in turn.

Rules
- Each process is the leader of its own session: a Ctrl-C in the terminal reaches the launcher
  only, and the launcher decides who stops when. It dies with the launcher (parent-death signal).
- Its exit is reported by the kernel (pidfd), not polled for; what it leaves running is ended at
  once, by its mark (`launch.sweep`). Orphans come to the launcher (subreaper) and are reaped.
- Stop is SIGTERM to the process, a grace, SIGKILL to its group. A process that has children ends
  them itself, in its own order; one whose children die beside it takes that for a crash. A stopped
  (SIGSTOP) process does not see SIGTERM; SIGKILL ends it all the same.
- Output goes to one log file a life, which starts with what was run and when.

Must be used from the main thread's event loop: the parent-death signal is bound to the thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Literal

from launch.sweep import MARK_VARIABLE, end_marked

ProcessRole = Literal["router", "engine", "trainer", "orchestrator"]
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_LEFTOVER_GRACE_S = 2.0
# After SIGKILL only the kernel is left to do something; longer means that the machine hangs.
_KILL_TIMEOUT_S = 10.0
_TAIL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start. `env` is laid over the launcher's own; None removes a variable.

    `log` is the path of the log file without life and suffix: life 2 writes `<log>.2.log`.
    With `takes_life`, `--life <n>` is added to the command.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    role: ProcessRole
    env: Mapping[str, str | None] = field(default_factory=dict)
    group: int | None = None
    index: int | None = None
    has_console: bool = False
    takes_life: bool = False

    def command(self, life: int) -> tuple[str, ...]:
        """What is run as life `life`."""
        return (*self.argv, "--life", str(life)) if self.takes_life else self.argv


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. Exactly one of code and signal is set."""

    code: int | None
    signal: int | None

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself with code 0."""
        return self.code == 0

    def __str__(self) -> str:
        """`exit code 1` or `signal 9 (SIGKILL)`."""
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"signal {self.signal}"


class ManagedProcess:
    """One running process. Made by `ProcessTable.start`."""

    def __init__(self, spec: ProcessSpec, life: int, mark: str, log_path: Path) -> None:
        self.spec = spec
        self.life = life
        self.log_path = log_path
        self.started_at = time.time()
        self.exit: Exit | None = None
        self._mark = mark
        self._popen: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._settled = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id, also of its session and group."""
        assert self._popen is not None
        return self._popen.pid

    async def wait_exit(self) -> Exit:
        """Wait for its end; returns within milliseconds of it."""
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    async def wait(self) -> Exit:
        """Wait for its end and for the end of everything that it left running."""
        await self._settled.wait()
        return await self.wait_exit()

    async def stop(self, grace_s: float) -> Exit:
        """SIGTERM, up to `grace_s`, SIGKILL. Fine to call on what has ended already."""
        if self.exit is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
        async with asyncio.timeout(_KILL_TIMEOUT_S):
            return await self.wait()

    def kill(self) -> None:
        """SIGKILL to it and its process group; nothing once the process has been reaped."""
        if self.exit is None:
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int) -> list[str]:
        """Last lines of its log."""
        return tail(self.log_path, num_lines)


class ProcessTable:
    """All processes of one launch: starts them, observes exits, reaps orphans."""

    def __init__(self, launch_id: str, base_env: Mapping[str, str]) -> None:
        """`base_env` is the environment that every process starts from."""
        self.launch_id = launch_id
        self._base_env = dict(base_env)
        self._running: dict[int, ManagedProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Adopt orphans of our processes from now on. Call from the event loop."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def close(self) -> None:
        """Stop observing. All processes have ended by now."""
        self._reap()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    @property
    def running(self) -> list[ManagedProcess]:
        """Processes that have not ended, oldest first."""
        return list(self._running.values())

    def start(
        self,
        spec: ProcessSpec,
        life: int,
        *,
        on_output: Callable[[bytes], None] | None = None,
    ) -> ManagedProcess:
        """Start a process. Raises OSError when its program cannot be run.

        Where the spec has a console, its standard output also goes to `on_output`, as it comes.
        """
        mark = f"{self.launch_id}/{spec.name}.{life}/"
        log_path = spec.log.with_name(f"{spec.log.name}.{life}.log")
        process = ManagedProcess(spec, life, mark, log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        has_pipe = spec.has_console and on_output is not None
        log = log_path.open("ab", buffering=0)
        try:
            log.write(_header(spec, life).encode())
            popen = subprocess.Popen(
                spec.command(life),
                env=self._environment(spec, mark),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if has_pipe else log,
                stderr=log,
                start_new_session=True,
                # The child makes three system calls and takes no lock that a thread could hold.
                preexec_fn=_die_with(os.getpid()),
            )
        except BaseException:
            log.close()
            raise
        process._popen = popen
        self._running[popen.pid] = process
        self._watch(process)
        if has_pipe and on_output is not None and popen.stdout is not None:
            self._spawn(_copy_output(popen.stdout, log, on_output))
        else:
            log.close()
        return process

    def _environment(self, spec: ProcessSpec, mark: str) -> dict[str, str]:
        merged: dict[str, str | None] = {
            **self._base_env,
            **spec.env,
            MARK_VARIABLE: mark,
            # A process that renames itself would overwrite the mark in /proc without this.
            "SPT_NOENV": "1",
        }
        return {key: value for key, value in merged.items() if value is not None}

    def _watch(self, process: ManagedProcess) -> None:
        loop = asyncio.get_running_loop()
        fd = os.pidfd_open(process.pid)

        def ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self._note_exit(process)

        loop.add_reader(fd, ended)

    def _note_exit(self, process: ManagedProcess) -> None:
        if process.exit is not None or process._popen is None:
            return
        code = process._popen.poll()
        if code is None:
            return
        process.exit = Exit(None, -code) if code < 0 else Exit(code, None)
        del self._running[process.pid]
        process._ended.set()
        self._spawn(self._settle(process))

    async def _settle(self, process: ManagedProcess) -> None:
        """End what the process left running, then tell those who wait."""
        try:
            await asyncio.to_thread(end_marked, process._mark, grace_s=_LEFTOVER_GRACE_S)
        finally:
            process._settled.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self, timeout_s: float) -> None:
        """Wait until output has been copied and leftovers have ended, within `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in self._tasks:
            task.cancel()

    def _reap(self) -> None:
        """Collect children that have ended: adopted orphans, and our own if nobody has yet."""
        while True:
            try:
                # Look first: the status of our own children belongs to their Popen.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            if info.si_pid in self._running:
                self._note_exit(self._running[info.si_pid])
            else:
                os.waitpid(info.si_pid, os.WNOHANG)


async def _copy_output(source: IO[bytes], log: FileIO, on_output: Callable[[bytes], None]) -> None:
    """Copy a pipe to a log and to the console until its last writer closes it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), source
    )
    try:
        while data := await reader.read(65536):
            log.write(data)
            on_output(data)
    finally:
        transport.close()
        log.close()


def tail(path: Path, num_lines: int) -> list[str]:
    """Last `num_lines` lines of a text file; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return list(deque(text.splitlines(), maxlen=num_lines))


def _header(spec: ProcessSpec, life: int) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return f"== {stamp} {spec.name} life {life}: {shlex.join(spec.command(life))}\n"


def _die_with(parent: int) -> Callable[[], None]:
    """What the child does before it runs its program: ask to be killed with its parent."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
