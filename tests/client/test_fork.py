"""Processes that fork while they use a client: parent and child both go on."""

import os
import time

import pytest

from tests.client.conftest import run_python

# The parent uses the client after each child has ended, and nothing of a child may show up in its output.
SCRIPT = """
import gc, os, random, signal, sys, threading, time
from sglang_topp_client import RolloutClient

url, moment, end = sys.argv[1:]
signal.alarm(60)
random.seed(int(os.environ["SEED"]))
client = RolloutClient(url, kind="sglang")


def generate():
    assert len(client.generate([[1], [2], [3]], timeout_s=30)) == 3


def leave():
    global client
    if end == "del":
        del client
        gc.collect()
    elif end == "replace":
        client = RolloutClient(url, kind="sglang")
        generate()
    elif end == "close":
        client.close()
    elif end == "use":
        generate()
    sys.exit()


def fork():
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        leave()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    generate()


if moment == "idle":
    for _ in range(2):
        generate()
        fork()
elif moment == "first call":
    for _ in range(6):
        client = RolloutClient(url, kind="sglang")
        other = threading.Thread(target=generate)
        other.start()
        time.sleep(random.uniform(0, 0.004))
        fork()
        other.join()
        client.close()
else:
    stops = threading.Event()

    def keep_generating():
        while not stops.is_set():
            generate()

    other = threading.Thread(target=keep_generating)
    other.start()
    for _ in range(6):
        time.sleep(random.uniform(0, 0.05))
        fork()
    stops.set()
    other.join()
client.close()
print("done")
"""


@pytest.mark.parametrize("end", ["exit", "del", "replace", "close", "use"])
@pytest.mark.parametrize("moment", ["idle", "first call", "in flight"])
def test_a_fork_at_any_time_breaks_nothing(engine, moment, end):
    seed = str(time.time_ns() % 1000)
    done = run_python(SCRIPT, engine.url, moment, end, env={**os.environ, "SEED": seed})
    assert (done.stdout, done.stderr) == ("done\n", "")
    assert engine.aborted == []
