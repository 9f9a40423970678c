"""The keeper with a tree of real processes under it."""

import os
import signal
import subprocess
import sys

import pytest

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


@pytest.fixture
def keep():
    keepers = []

    def keep(then="time.sleep(600)", *, before="", stubborn=False, grace_s=60):
        """A keeper over a tree, once the tree stands; returns it and the process ids."""
        keeper = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sglang_topp_server.keeper",
                str(grace_s),
                sys.executable,
                "-c",
                TREE.format(stubborn=stubborn, before=before, then=then),
            ],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        keepers.append(keeper)
        return keeper, [int(pid) for pid in keeper.stderr.readline().split()]

    yield keep
    for keeper in keepers:
        keeper.stdin.close()
        keeper.stderr.close()
        keeper.wait(timeout=60)


def stop(keeper):
    """What `serve` does in order."""
    keeper.stdin.write(b".")
    keeper.stdin.close()


def alive(pid):
    """Whether the process runs; a zombie, which waits for somebody to read its status, does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_tree_stands(keep):
    keeper, pids = keep()
    assert len(pids) == 3
    assert all(map(alive, pids))
    assert keeper.poll() is None


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_byte_ends_everything_and_so_does_the_end_of_file(keep, is_killed):
    keeper, pids = keep()
    keeper.stdin.close() if is_killed else stop(keeper)

    assert keeper.wait(timeout=60) == 128 + signal.SIGTERM
    assert not any(map(alive, pids))


def test_the_grace_ends_a_stubborn_tree(keep):
    keeper, pids = keep(stubborn=True, grace_s=0.2)
    stop(keeper)

    assert keeper.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


def test_the_first_process_may_clean_up_in_its_grace(keep):
    keeper, pids = keep(before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))")
    stop(keeper)

    assert keeper.wait(timeout=60) == 5
    assert not any(map(alive, pids))


def test_there_is_little_grace_where_serve_was_killed(keep):
    """Who asked the engine itself learns soon that there is no answer."""
    keeper, pids = keep(stubborn=True, grace_s=600)
    keeper.stdin.close()

    assert keeper.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


@pytest.mark.parametrize("while_stopping", [False, True])
def test_a_signal_skips_the_grace(keep, while_stopping):
    keeper, pids = keep(stubborn=True, grace_s=600)
    if while_stopping:
        stop(keeper)
    keeper.terminate()

    assert keeper.wait(timeout=60) == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


@pytest.mark.parametrize("status", [0, 3])
def test_when_the_first_process_ends_the_rest_does_and_its_status_is_told(keep, status):
    keeper, pids = keep(f"os._exit({status})")

    assert keeper.wait(timeout=60) == status
    assert not any(map(alive, pids))


def test_a_killed_parent_takes_the_tree_with_it(eventually):
    """SIGKILL to what holds the pipe: nothing runs there any more, the kernel closes it."""
    code = (
        "import subprocess, sys, time\n"
        "keeper = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-m", "sglang_topp_server.keeper", "60", sys.executable, "-c"]
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            code,
            *command,
            TREE.format(stubborn=False, before="", then="time.sleep(600)"),
        ],
        stderr=subprocess.PIPE,
    )
    pids = [int(pid) for pid in parent.stderr.readline().split()]
    assert all(map(alive, pids))

    parent.kill()
    parent.wait()
    parent.stderr.close()

    eventually(lambda: not any(map(alive, pids)))


def test_a_killed_keeper_takes_the_first_process_with_it(keep, eventually):
    keeper, (first, *others) = keep()
    keeper.kill()
    keeper.wait()

    eventually(lambda: not alive(first))
    # The others are this tree's; SGLang's own ask the kernel for the same.
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def test_a_command_that_does_not_exist():
    done = subprocess.run(
        [sys.executable, "-m", "sglang_topp_server.keeper", "1", "/nowhere/engine"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 127
    assert "cannot start /nowhere/engine" in done.stderr
