"""`sglang-topp serve` and `sidecar` as a user runs them: real processes, real signals, a fake engine.

The fake is a `sglang` package of its own, put before the real one on the path of the processes.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest
import torch

from sglang_topp.errors import InvalidInputError
from sglang_topp_client import RolloutClient
from sglang_topp_server.process import launch
from sglang_topp_server.settings import Settings
from tests.server.conftest import is_alive, post

FAKE_ENGINE = Path(__file__).parents[1] / "fake_engine"


def command_lines():
    """Return the command line of every process, by its id."""
    shown = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            shown[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return shown


class Serve:
    """A running `sglang-topp serve`."""

    def __init__(self, process, errors, pids_file):
        self.process, self._errors, self._pids_file = process, errors, pids_file

    def wait_until_ready(self):
        """Return the addresses in the ready line: the sidecar's and the engine's."""
        line = self.process.stdout.readline()
        found = re.fullmatch(r"sglang-topp is ready: sidecar (\S+) engine (\S+)\n", line)
        assert found, (line, self.errors())
        return found.groups()

    def pids(self):
        return [int(pid) for pid in self._pids_file.read_text().split()]

    def engine_stands(self):
        return self._pids_file.exists()

    def end(self):
        """Wait for the process to exit, and return its status."""
        return self.process.wait(timeout=120)

    def errors(self):
        return self._errors.read_text()


@pytest.fixture
def serve(tmp_path):
    started = []

    def serve(*engine_args, options=(), **environment):
        errors, pids = tmp_path / "stderr", tmp_path / "pids"
        path = os.pathsep.join(filter(None, [str(FAKE_ENGINE), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve", "--model-path", "m"]
        command += ["--port", "0", "--engine-port", "0", "--grace-s", "60"]
        command += [*options, "--", "--fake-pids", str(pids), *engine_args]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "SGLANG_PLATFORM": "sglang_topp_cpu", **environment},
            )
        started.append(process)
        return Serve(process, errors, pids)

    yield serve
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


SOON = ["--ready-timeout-s", "10"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_then_a_signal_ends_both(serve, number):
    running = serve()
    sidecar, engine = running.wait_until_ready()

    assert httpx.get(f"{sidecar}/readyz", timeout=60).status_code == 200
    assert httpx.get(f"{engine}/health", timeout=60).status_code == 200
    with RolloutClient(sidecar) as client:
        assert client.generate("a", top_logprobs_p=0.9)[0].candidates is not None
    pids = running.pids()
    assert all(map(is_alive, pids))

    running.process.send_signal(number)

    assert running.end() == 0
    assert not any(map(is_alive, pids))
    assert running.process.stdout.read() == ""
    # The whole output: the engine's line, and no traceback at the end.
    assert running.errors() == "the engine's own words\n"


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        (["--fake-starting"], SOON, ["not ready after 10 s", "/health answers 503"]),
        (["--fake-silent"], SOON, ["not ready after 10 s"]),
        (["--fake-unpatched"], [], ["runs without the sglang-topp plugin"]),
    ],
)
def test_an_engine_that_does_not_get_ready_is_ended(serve, fault, options, words):
    running = serve(*fault, options=options)

    assert running.end() == 1
    for word in words:
        assert word in running.errors()
    assert not any(map(is_alive, running.pids()))
    assert running.process.stdout.read() == ""


def test_the_engine_ends_before_it_is_ready(serve):
    running = serve("--fake-exit", "7")

    assert running.end() == 1
    assert "the engine ended with exit status 7 before it was ready" in running.errors()
    assert "the engine's own words" in running.errors()
    assert running.process.stdout.read() == ""


def test_the_engine_dies_while_it_serves(serve):
    running = serve()
    running.wait_until_ready()
    first, *_ = pids = running.pids()

    os.kill(first, signal.SIGKILL)

    assert running.end() == 1
    assert "the engine ended with exit status 137" in running.errors()
    assert not any(map(is_alive, pids))


def test_the_engine_dies_in_the_middle_of_a_request(serve):
    running = serve()
    sidecar, _ = running.wait_until_ready()

    fields = {"prompts": "a", "sampling_params": {"fault": "exit"}}
    answer = httpx.post(f"{sidecar}/rollouts", json=fields, timeout=60)

    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "TransportError"
    assert running.end() == 1


def test_a_signal_before_it_is_ready_is_a_clean_end(serve, eventually):
    running = serve("--fake-starting")
    eventually(running.engine_stands, timeout_s=90)
    pids = running.pids()

    running.process.send_signal(signal.SIGTERM)

    assert running.end() == 0
    assert not any(map(is_alive, pids))


def test_a_second_signal_skips_the_grace(serve, eventually):
    running = serve("--fake-stubborn", options=["--grace-s", "600"])
    sidecar, _ = running.wait_until_ready()
    pids = running.pids()

    running.process.send_signal(signal.SIGINT)
    # Once it has accepted the first request, it no longer answers.
    eventually(lambda: _refuses(sidecar))
    running.process.send_signal(signal.SIGINT)

    assert running.end() == 0
    assert not any(map(is_alive, pids))


def test_killed_outright_it_leaves_nothing_behind(serve, eventually):
    running = serve()
    running.wait_until_ready()
    pids = running.pids()

    running.process.kill()

    eventually(lambda: not any(map(is_alive, pids)), timeout_s=90)


def test_requests_in_flight_are_ended_and_answered(serve, eventually):
    running = serve(options=["--grace-s", "1"])
    sidecar, _ = running.wait_until_ready()
    host, port = sidecar.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(post(b'{"prompts": "a", "sampling_params": {"fault": "hang"}}'))
        eventually(lambda: "sglang_topp_in_flight 1.0" in httpx.get(f"{sidecar}/metrics", timeout=60).text)

        running.process.send_signal(signal.SIGTERM)

        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 503
        assert b"the sidecar is stopping" in answer.read()
    assert running.end() == 0


def test_keys_come_from_the_environment(serve):
    keys = {"SGLANG_TOPP_API_KEY": "ours", "SGLANG_TOPP_ENGINE_API_KEY": "theirs"}
    running = serve(**keys)
    sidecar, engine = running.wait_until_ready()

    assert httpx.get(f"{sidecar}/info", timeout=60).status_code == 401
    assert httpx.get(f"{engine}/server_info", timeout=60).status_code == 401
    with RolloutClient(sidecar, api_key="ours") as client:
        assert len(client.generate("a", top_logprobs_p=0.9)) == 1


def test_no_key_stands_in_the_list_of_processes_or_in_the_log(serve):
    keys = {"SGLANG_TOPP_API_KEY": secrets.token_hex(), "SGLANG_TOPP_ENGINE_API_KEY": secrets.token_hex()}
    running = serve("--fake-log-arguments", **keys)
    running.wait_until_ready()

    shown = command_lines()
    for pid in (running.process.pid, *running.pids()):
        assert shown[pid]
    for key in keys.values():
        assert [line for line in shown.values() if key in line] == []
        assert key not in running.errors()
    assert "'--api-key', '***'" in running.errors()


def test_the_engine_takes_no_key_that_the_sidecar_does_not_have(serve):
    running = serve("--fake-log-arguments")
    running.wait_until_ready()

    assert "the engine's arguments" in running.errors()
    assert "--api-key" not in running.errors()


def test_a_taken_port_is_refused_before_anything_starts(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option in ("--port", "--engine-port"):
            running = serve(options=[option, port])
            assert running.end() == 1
            assert f"cannot listen on 127.0.0.1 port {port}" in running.errors()
            assert not running.engine_stands()


def test_the_sidecar_alone_ends_on_a_signal(engine):
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar"]
    command += ["--engine-url", engine.url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = re.match(r"sglang-topp sidecar at (\S+) ", process.stdout.readline()).group(1)
        with RolloutClient(url) as client:
            assert len(client.generate("a", top_logprobs_p=0.9)) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def _refuses(url):
    try:
        httpx.get(url, timeout=60)
    except httpx.TransportError:
        return True
    return False


# -- the parts -------------------------------------------------------------------------------------


def test_the_command_passes_sglangs_own_arguments_on():
    command = launch.engine_command("org/model", "0.0.0.0", 1234, ["--tp-size", "2"])
    assert command[1:3] == ["-m", "sglang_topp_server.process.sglang_with_env_key"]
    assert command[3:] == [
        *("--model-path", "org/model", "--host", "0.0.0.0", "--port", "1234", "--tp-size", "2")
    ]


def test_the_engines_environment():
    """SGLang's crash diagnostics make every caller wait, so they are opt-in."""
    pyspy, coredump = "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"
    sanitize = "SGLANG_SANITIZE_NAN_LOGITS"
    expected = {"A": "1", sanitize: "1", pyspy: "0", coredump: "0"}
    assert launch.engine_environment({"A": "1"}, None) == expected
    assert launch.engine_environment({sanitize: "0"}, None)[sanitize] == "0"
    assert launch.engine_environment({pyspy: "1"}, None)[pyspy] == "1"

    key = "SGLANG_TOPP_ENGINE_API_KEY"
    assert launch.engine_environment({}, "k")[key] == "k"
    assert key not in launch.engine_environment({key: "k"}, None)


def test_sglang_reads_what_is_set_there():
    from sglang.srt.environ import envs

    for name in launch.engine_environment({}, None):
        assert getattr(envs, name).name == name


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("node-7", "http://node-7:80"),
    ],
)
def test_url_of_a_listening_address(host, url):
    assert launch.url_of(host, 80) == url


def test_a_free_port_is_found_and_a_taken_one_refused():
    port = launch.check_free("127.0.0.1", 0)
    assert 1024 < port < port + 10_000 < 32_768  # the kernel gives ports from here on to outgoing connections
    assert launch.check_free("127.0.0.1", port) == port
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(InvalidInputError, match="cannot listen"),
    ):
        launch.check_free("127.0.0.1", taken.getsockname()[1])


def test_keys_do_not_show_in_the_settings():
    settings = Settings("http://e", api_key="hush", engine_api_key="hush")
    assert "hush" not in repr(settings)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_an_accelerator_is_told_what_to_set(serve):
    running = serve(SGLANG_PLATFORM="")
    assert running.end() == 1
    assert "SGLang finds no accelerator on this machine" in running.errors()
    assert "set SGLANG_PLATFORM=sglang_topp_cpu" in running.errors()
    assert not running.engine_stands()
