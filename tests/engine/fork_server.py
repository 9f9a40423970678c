"""Import SGLang once, and fork an engine per configuration from the process that did.

    python -m tests.engine.fork_server template SOCKET
    python -m tests.engine.fork_server launch ARGUMENTS

An import of SGLang takes about 16 s of a core, and an SGLang server imports SGLang in three processes. The
template process imports SGLang once, with its plugins. Each engine is a fork of the template that runs
`sglang.launch_server`, and the engine's own processes are forks of the engine. A forked engine serves after 2
to 4 s.

A fork skips the code that runs at import. If this code matters, the engine starts afresh (see `can_fork`). An
engine that starts afresh with `launch` imports SGLang in its first process, and forks its other processes.
The template ends with the process that started it, and so does every engine.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.engine.sglang_forks.sitecustomize import fork_instead_of_spawn

__all__ = ["ForkServer", "ForkedProcess"]

# SGLang reads these when a server starts. It may read others at import, as the plugin reads its limits
# when it is registered.
_READ_AT_START = {
    "PYTHONPATH",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX",
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK",
    "UCX_TLS",
}
# uvicorn's HTTP workers import SGLang by the name of its application.
_STARTS_AFRESH = {"--tokenizer-worker-num"}
_MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.qwen2",
)
_MAX_REQUEST_BYTES = 2**17
_PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """A process that this one did not start, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, status: IO[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._status.readline() or -signal.SIGKILL)
            self._status.close()
        return self.returncode


class ForkServer:
    """Forks engines from the template, which starts with the first of them."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._environment = dict(os.environ)
        self._socket, self._template_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._template: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # a test may start two engines at the same time

    def can_fork(self, arguments: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a forked engine behaves as one that starts afresh.

        Args:
            arguments: those of `sglang.launch_server`.
            env: the changes to the environment that the session started with. Changes that libraries make to
                `os.environ` during the session do not count.
        """
        changed = {name for name, value in env.items() if self._environment.get(name) != value}
        return (
            self.can_fork_processes()
            and _STARTS_AFRESH.isdisjoint(arguments)
            and changed <= _READ_AT_START
            and not _has_sitecustomize(env.get("PYTHONPATH", ""))
        )

    def can_fork_processes(self) -> bool:
        """Return whether an engine may fork its processes instead of spawning them."""
        return self._environment.get("SGLANG_PLATFORM") == "sglang_topp_cpu"  # CUDA does not survive a fork

    def start(self, arguments: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> ForkedProcess:
        """Fork `python -m sglang.launch_server ARGUMENTS`, in its own session."""
        with self._lock:
            if self._template is None:
                self._template = self._start_template()
        ours, theirs = os.pipe()
        request = json.dumps({"arguments": [*arguments], "env": {**env}}).encode()
        try:
            socket.send_fds(self._socket, [request], [log.fileno(), theirs])
        finally:
            os.close(theirs)
        status = open(ours)  # noqa: SIM115  # the process closes it
        if not (pid := status.readline()):
            status.close()
            raise RuntimeError(f"importing SGLang failed:\n{self._log.read_text(errors='replace')[-6000:]}")
        return ForkedProcess(int(pid), status)

    def close(self) -> None:
        """End the template."""
        self._socket.close()
        self._template_socket.close()
        if self._template is not None:
            self._template.wait(60)

    def _start_template(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as output, self._template_socket as theirs:
            return subprocess.Popen(
                [sys.executable, "-m", __name__, "template", str(theirs.fileno())],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )


def _has_sitecustomize(search_path: str) -> bool:
    """Return whether a new interpreter with this PYTHONPATH runs code that a fork would not run."""
    folders = filter(None, search_path.split(os.pathsep))
    return any(Path(folder, "sitecustomize.py").exists() for folder in folders)


def run_template(descriptor: int) -> None:
    """Import SGLang, then fork an engine for each request, until the other end of the socket closes.

    `_end_with_parent` would end the template with the thread that started it, which may belong to a pool.
    """
    _import_sglang()
    # Only servers that name the algorithm use it.
    importlib.import_module("tests.speculative.chain_draft_worker").register()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the engines' parents
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 2)
            if not request:
                return
            if not os.fork():
                requests.close()
                _run_and_report(json.loads(request), *descriptors)
            for number in descriptors:
                os.close(number)


def _import_sglang() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("sglang.srt.plugins").load_plugins()
        for name in _MODULES:
            importlib.import_module(name)


def _run_and_report(request: Any, log: int, status: int) -> None:
    """Fork the engine, wait for it, and report its exit status. The template continues meanwhile."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (engine := os.fork()):
        _run_engine(request, log, status)
    os.close(log)
    _, ended = os.waitpid(engine, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _run_engine(request: Any, log: int, status: int) -> NoReturn:
    _end_with_parent()
    os.setsid()
    os.write(status, b"%d\n" % os.getpid())
    os.close(status)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request["env"])
    sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    _launch(request["arguments"])


def _launch(arguments: Sequence[str]) -> NoReturn:
    """Run `sglang.launch_server` in this process, and end the process."""
    sys.argv = ["sglang.launch_server", *arguments]
    fork_instead_of_spawn()
    code = 1
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has already ended
        os._exit(1)


def main(role: str, *arguments: str) -> None:
    if role == "template":
        run_template(int(arguments[0]))
    else:
        _import_sglang()
        _launch(arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
