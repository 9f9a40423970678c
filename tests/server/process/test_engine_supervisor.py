"""The supervisor stops a tree of real processes, however it or `serve` ends."""

import os
import signal
import subprocess
import sys

import pytest

from tests.server.conftest import is_alive

# A child in the group and one in a session of its own; both would sleep on.
TREE = """
import os, signal, subprocess, sys, time
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
nap = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(nap), subprocess.Popen(nap, start_new_session=True)]
{before}
print(os.getpid(), *(child.pid for child in children), file=sys.stderr, flush=True)
{then}
"""


SUPERVISOR = [sys.executable, "-m", "sglang_topp_server.process.engine_supervisor"]


@pytest.fixture
def keep():
    keepers = []

    def keep(then="time.sleep(600)", *, before="", stubborn=False, grace_s=60):
        """Start a supervisor with a tree of processes. Return it and the process ids."""
        tree = TREE.format(stubborn=stubborn, before=before, then=then)
        supervisor = subprocess.Popen(
            [*SUPERVISOR, str(grace_s), sys.executable, "-c", tree],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        keepers.append(supervisor)
        return supervisor, [int(pid) for pid in supervisor.stderr.readline().split()]

    yield keep
    for supervisor in keepers:
        supervisor.stdin.close()
        supervisor.stderr.close()
        supervisor.wait(timeout=60)


def stop(supervisor):
    """Stop it as `serve` does."""
    supervisor.stdin.write(b".")
    supervisor.stdin.close()


def test_the_supervisor_starts_the_process_tree(keep):
    supervisor, pids = keep()
    assert len(pids) == 3
    assert all(map(is_alive, pids))
    assert supervisor.poll() is None


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_byte_ends_everything_and_so_does_the_end_of_file(keep, is_killed):
    supervisor, pids = keep()
    supervisor.stdin.close() if is_killed else stop(supervisor)

    assert supervisor.wait(timeout=60) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))


def test_the_grace_ends_a_stubborn_tree(keep):
    supervisor, pids = keep(stubborn=True, grace_s=0.2)
    stop(supervisor)

    assert supervisor.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids))


def test_the_first_process_may_clean_up_in_its_grace(keep):
    supervisor, pids = keep(before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))")
    stop(supervisor)

    assert supervisor.wait(timeout=60) == 5
    assert not any(map(is_alive, pids))


def test_there_is_little_grace_where_serve_was_killed(keep):
    """A direct caller of the engine soon gets an error."""
    supervisor, pids = keep(stubborn=True, grace_s=600)
    supervisor.stdin.close()

    assert supervisor.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("while_stopping", [False, True])
def test_a_signal_skips_the_grace(keep, while_stopping):
    supervisor, pids = keep(stubborn=True, grace_s=600)
    if while_stopping:
        stop(supervisor)
    supervisor.terminate()

    assert supervisor.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("status", [0, 3])
def test_when_the_first_process_ends_the_rest_does_and_its_status_is_told(keep, status):
    supervisor, pids = keep(f"os._exit({status})")

    assert supervisor.wait(timeout=60) == status
    assert not any(map(is_alive, pids))


def test_a_killed_parent_takes_the_tree_with_it(eventually):
    """SIGKILL ends the process that holds the pipe, and the kernel closes the pipe."""
    code = (
        "import subprocess, sys, time\n"
        "supervisor = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)"
    )
    tree = TREE.format(stubborn=False, before="", then="time.sleep(600)")
    command = [*SUPERVISOR, "60", sys.executable, "-c", tree]
    parent = subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.PIPE)
    pids = [int(pid) for pid in parent.stderr.readline().split()]
    assert all(map(is_alive, pids))

    parent.kill()
    parent.wait()
    parent.stderr.close()

    eventually(lambda: not any(map(is_alive, pids)))


def test_a_killed_supervisor_takes_the_first_process_with_it(keep, eventually):
    supervisor, (first, *others) = keep()
    supervisor.kill()
    supervisor.wait()

    eventually(lambda: not is_alive(first))
    # The others belong to this tree. SGLang's processes ask the kernel for this themselves.
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def test_a_command_that_does_not_exist():
    done = subprocess.run(
        [*SUPERVISOR, "1", "/nowhere/engine"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 127
    assert "cannot start /nowhere/engine" in done.stderr
