"""The memory of a sidecar's own process, while large things pass through it and after."""

import re
import socket
import subprocess
import sys
import time

import httpx
import pytest

from sglang_topp_client.packed_record import MEDIA_TYPE

MIB = 1 << 20


class Process:
    """`sglang-topp sidecar`."""

    def __init__(self, engine_url, *options):
        command = [sys.executable, "-m", "sglang_topp_server.cli", "sidecar"]
        command += ["--engine-url", engine_url, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = re.match(r"sglang-topp sidecar at (\S+) ", self.process.stdout.readline())[1]
        self.http = httpx.Client(base_url=self.url, timeout=300, trust_env=False)

    def is_ready(self):
        return self.http.get("/readyz").status_code == 200

    def memory(self, name):
        """Bytes, by their name in /proc/…/status: VmRSS is what it has, VmHWM the most that it had."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(rf"{name}:\s+(\d+) kB", status.read())[1]) << 10

    def forget_peak(self):
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as file:
            file.write("5")

    def num_bytes(self, accept="*/*", **fields):
        """The length of an answer that is read, and thrown away, as it comes."""
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
    # The line, its text while it is taken apart, and the text of its arrays.
    assert sidecar.memory("VmHWM") - before < 4 * length


@pytest.mark.parametrize(
    ("stream", "accept"),
    [(False, "*/*"), (True, "*/*"), (True, MEDIA_TYPE)],
    ids=["whole", "lines", "frames"],
)
def test_many_samples_pass_through_and_their_memory_goes_back(start_process, stream, accept, eventually):
    sidecar = start_process()
    before = sidecar.memory("VmRSS")

    length = sidecar.num_bytes(
        sampling_params={"set_size": 100_000, "repeat": 2, "n": 16}, stream=stream, accept=accept
    )

    assert length > (54 if accept == MEDIA_TYPE else 96) * MIB
    # In one answer they wait as arrays, three quarters of their text, and one is being taken apart.
    assert sidecar.memory("VmHWM") - before < (0.9 if stream else 1.5) * length
    eventually(lambda: sidecar.memory("VmRSS") - before < 40 * MIB)


def test_bodies_that_are_never_whole_are_not_all_held(start_process):
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
