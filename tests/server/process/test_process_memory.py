"""The memory of the sidecar's process, while large answers pass through it and afterwards."""

import re
import socket
import subprocess
import sys
import time

import httpx
import pytest

from sglang_topp_client import Rollout
from sglang_topp_client.wire.records import MEDIA_TYPES

MIB = 1 << 20


class Process:
    """A running `sglang-topp sidecar`."""

    def __init__(self, engine_url, *options):
        command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar"]
        command += ["--engine-url", engine_url, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = re.match(r"sglang-topp sidecar at (\S+) ", self.process.stdout.readline())[1]
        self.http = httpx.Client(base_url=self.url, timeout=300, trust_env=False)

    def is_ready(self):
        return self.http.get("/readyz").status_code == 200

    def memory(self, name):
        """Return bytes by their name in /proc/…/status: VmRSS is the current memory, VmHWM the peak."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(rf"{name}:\s+(\d+) kB", status.read())[1]) << 10

    def forget_peak(self):
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
            file.write("5")

    def num_bytes(self, accept="*/*", **fields):
        """Read an answer without storing it, and return its length."""
        body = {"prompts": "a", "top_logprobs_p": 0.9, **fields}
        with self.http.stream("POST", "/rollouts", json=body, headers={"Accept": accept}) as answer:
            assert answer.status_code == 200
            return sum(map(len, answer.iter_raw(MIB)))


@pytest.fixture
def start_process(engine, eventually):
    started = []

    def start(*options):
        process = Process(engine.url, *options)
        started.append(process)
        eventually(process.is_ready)
        process.num_bytes()
        process.forget_peak()
        return process

    yield start
    for one in started:
        one.http.close()
        one.process.terminate()
        one.process.communicate()


def test_one_large_sample_passes_through(start_process):
    sidecar = start_process()
    before = sidecar.memory("VmRSS")

    length = sidecar.num_bytes(sampling_params={"set_size": 100_000, "repeat": 20})

    assert length > 60 * MIB
    # The line, its text while it is parsed, and the text of its arrays.
    assert sidecar.memory("VmHWM") - before < 4 * length


@pytest.mark.parametrize(
    ("stream", "accept"),
    [(False, "*/*"), (True, "*/*"), (True, MEDIA_TYPES[Rollout])],
    ids=["whole", "lines", "frames"],
)
def test_many_samples_pass_through_and_their_memory_goes_back(start_process, stream, accept, eventually):
    sidecar = start_process()
    before = sidecar.memory("VmRSS")

    length = sidecar.num_bytes(
        sampling_params={"set_size": 50_000, "repeat": 2, "n": 32}, stream=stream, accept=accept
    )

    if accept != MEDIA_TYPES[Rollout]:  # the fake engine's log-probs follow a pattern, so frames are small
        assert length > 96 * MIB
    # In one answer, the samples wait as arrays (three quarters of their text), and one is being encoded. A
    # stream holds few samples at a time.
    assert sidecar.memory("VmHWM") - before < (40 * MIB if stream else 1.5 * 96 * MIB)
    eventually(lambda: sidecar.memory("VmRSS") - before < 40 * MIB)


def test_bodies_are_not_kept_while_the_engine_generates(start_process, engine, eventually):
    sidecar = start_process()
    before = sidecar.memory("VmRSS")
    body = b'{"prompts":"a","top_logprobs_p":0.9,"sampling_params":{"fault":"hang-second","n":2}}'
    head = b"POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (8 * MIB)
    port = int(sidecar.url.rpartition(":")[2])
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    for connection in connections:
        connection.sendall(head + body.ljust(8 * MIB))

    eventually(lambda: engine.running >= 12)
    eventually(lambda: sidecar.memory("VmRSS") - before < 40 * MIB)
    for connection in connections:
        connection.close()


def test_incomplete_bodies_do_not_fill_the_memory(start_process):
    sidecar = start_process("--max-body-bytes", str(8 * MIB))
    before = sidecar.memory("VmRSS")
    head = b"POST /rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (8 * MIB)
    body = b" " * (8 * MIB - 1)
    connections = []
    for _ in range(32):
        connection = socket.create_connection(("127.0.0.1", int(sidecar.url.rpartition(":")[2])), timeout=0.2)
        connections.append(connection)
        try:
            connection.sendall(head + body)
        except TimeoutError:
            continue
    time.sleep(1)

    assert sidecar.memory("VmHWM") - before < 80 * MIB
    assert sidecar.num_bytes() > 0
    for connection in connections:
        connection.close()
