"""`--workers`: one sidecar in several processes. Real ones, with real signals, before an engine that injects
faults."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from sglang_topp_client import AsyncRolloutClient
from sglang_topp_server.cli import main
from sglang_topp_server.limits import Limits
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.serving import Settings


def hang(**fields):
    """A request that does not end by itself; of ids, which are known without the engine's word."""
    return {"prompts": [1, 2], "sampling_params": {"fault": "hang"}, **fields}


def post(running, order):
    """An order, on a connection of its own."""
    return httpx.post(f"{running.url}/abort", json=order, timeout=60)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def num_callers(pid, port):
    """How many connections at that port a process has."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    at_port = {row[9] for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == "01"}
    held = 0
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(FileNotFoundError):
            held += os.readlink(link).removeprefix("socket:[").removesuffix("]") in at_port
    return held


class Running:
    """A running `sglang-topp sidecar --workers`."""

    def __init__(self, process, errors):
        self.process, self._errors = process, errors
        found = re.match(r"sglang-topp sidecar at (\S+) ", process.stdout.readline())
        assert found, self.errors()
        self.url = found.group(1)

    def workers(self):
        return children(self.process.pid)

    def errors(self):
        return self._errors.read_text()

    def metric(self, name):
        found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0


@pytest.fixture
def run(engine, tmp_path):
    started = []

    def run(*options, workers=2):
        errors = tmp_path / "stderr"
        command = [sys.executable, "-m", "sglang_topp_server.cli", "sidecar", "--engine-url", engine.url]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--port", "0", "--workers", str(workers), *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        started.append(process)
        return Running(process, errors)

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def running(run, eventually):
    running = run()
    eventually(lambda: running.metric("sglang_topp_engine_ready") == 1)
    return running


async def until(condition):
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def test_connections_go_to_the_worker_that_has_the_fewest(running):
    port = int(running.url.rpartition(":")[2])
    workers = running.workers()

    def held():
        return [num_callers(pid, port) for pid in workers]

    await until(lambda: held() == [0, 0])
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        hanging = []
        for num in range(1, 7):
            hanging.append(asyncio.create_task(http.post("/rollouts", json=hang())))
            await until(lambda num=num: sum(held()) == num)
            assert max(held()) == (num + 1) // 2
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
    await until(lambda: running.metric("sglang_topp_in_flight") == 0)


async def test_everything_is_counted_once_whoever_is_asked(running):
    async with AsyncRolloutClient(running.url) as client:
        await asyncio.gather(*(client.generate(["a", "b"], top_logprobs_p=0.9) for _ in range(6)))
    assert [running.metric("sglang_topp_samples_total") for _ in range(4)] == [12.0] * 4
    assert running.metric("sglang_topp_candidates_per_token_count") == 36
    assert [running.metric("sglang_topp_engine_ready") for _ in range(4)] == [1.0] * 4


async def test_a_request_is_aborted_by_its_name_through_any_worker(running, engine):
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        for _ in range(4):
            work = asyncio.create_task(http.post("/rollouts", json=hang(request_id="step-7")))
            await until(lambda: running.metric("sglang_topp_in_flight") == 1)
            # A connection of its own, which comes to the worker that has none.
            answer = await asyncio.to_thread(post, running, {"request_id": "step-7"})
            assert answer.status_code == 200, answer.text
            answer = await work
            assert answer.status_code == 502
            assert "step-7 was aborted" in answer.json()["error"]["message"]
    # Nobody asked the engine for what it may call so.
    assert "step-7" not in engine.aborted
    assert post(running, {"request_id": "its own name"}).status_code == 200
    assert engine.aborted.count("its own name") == 1


async def test_all_that_is_in_flight_is_aborted_through_any_worker(running, engine):
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        work = [asyncio.create_task(http.post("/rollouts", json=hang(on_abort="return"))) for _ in range(4)]
        await until(lambda: running.metric("sglang_topp_in_flight") == 4)
        answer = await asyncio.to_thread(post, running, {"all": True})
        assert answer.status_code == 200, answer.text
        assert "all" in engine.aborted
        for answer in await asyncio.gather(*work):
            (record,) = answer.json()["rollouts"]
            assert record["finish_reason"] == "abort"


async def test_a_worker_that_is_killed_is_replaced_and_its_callers_ask_again(running, engine):
    before = running.workers()
    async with AsyncRolloutClient(running.url, max_connections=4) as client:
        # A call each, so that both workers have some.
        work = [asyncio.create_task(client.generate([[i]], {"fault": "hang"})) for i in range(4)]
        await until(lambda: running.metric("sglang_topp_in_flight") == 4)
        port = int(running.url.rpartition(":")[2])
        await until(lambda: sum(num_callers(pid, port) for pid in before) == 4)
        lost = num_callers(before[0], port)
        assert lost > 0
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(engine.hung_up) == lost)
        engine.is_released = True
        assert [len(rollouts) for rollouts in await asyncio.gather(*work)] == [1] * 4
    await until(lambda: len(running.workers()) == 2)
    assert len({*before, *running.workers()}) == 3
    assert f"(process {before[0]}) ended with exit status -9; it is started again" in running.errors()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all(running, number):
    workers = running.workers()
    assert len(workers) == 2
    running.process.send_signal(number)
    assert running.process.wait(timeout=60) == 0
    assert not any(map(alive, workers))
    assert running.errors() == ""


def test_a_second_signal_ends_a_worker_that_hangs(running, eventually):
    stuck, _ = workers = running.workers()
    os.kill(stuck, signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    eventually(lambda: running.workers() == [stuck])
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0
    assert not any(map(alive, workers))


def test_killed_outright_it_leaves_nothing_behind(running, eventually):
    workers = running.workers()
    running.process.kill()
    eventually(lambda: not any(map(alive, workers)))


def test_a_worker_that_cannot_start_is_said(engine, tmp_path):
    command = [sys.executable, "-m", "sglang_topp_server.cli", "sidecar", "--engine-url", engine.url]
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.argv[:1] == ['-m'] and '--workers' not in sys.orig_argv: sys.exit(5)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, "--port", "0", "--workers", "2"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "before all workers served; its own words are above" in done.stderr
    assert done.stdout == ""


def test_limits_of_all_are_shared_out(run, eventually):
    running = run("--max-in-flight", "3")
    eventually(lambda: running.metric("sglang_topp_engine_ready") == 1)
    seen = {httpx.get(f"{running.url}/info").json()["limits"]["max_in_flight"] for _ in range(8)}
    assert seen == {1, 2}


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_shares_add_up(workers):
    settings = Settings(
        "h", 1, "http://e", limits=Limits(max_in_flight=20, max_held_bytes=9), workers=workers
    )
    shares = [settings.of_worker(place).limits for place in range(workers)]
    assert sum(share.max_in_flight for share in shares) == 20
    assert sum(share.max_held_bytes for share in shares) == 9
    assert {share.max_samples for share in shares} == {settings.limits.max_samples}


def test_fewer_places_than_workers_are_refused(capsys):
    options = ["sidecar", "--engine-url", "http://127.0.0.1:9", "--workers", "3", "--max-in-flight", "2"]
    assert main(options) == 1
    assert "--max-in-flight: got 2 for 3 workers, expected at least one each" in capsys.readouterr().err


def test_what_one_process_counts_is_shown_the_same_beside_others_that_count_nothing():
    metrics = Metrics()
    metrics.samples.inc(3)
    metrics.requests.labels("ok").inc()
    metrics.candidates.observe(np.array([1, 5, 70000]))
    metrics.engine_ready.set(1)
    other = Metrics()
    other.engine_ready.set(1)
    alone = {line for line in metrics.text().decode().splitlines() if "_created" not in line}
    added = {
        line for line in metrics.text([other.families()]).decode().splitlines() if "_created" not in line
    }
    assert added == alone
    other.engine_ready.set(0)
    other.samples.inc(4)
    other.requests.labels("failed").inc()
    both = metrics.text([other.families()]).decode().splitlines()
    for line in (
        "sglang_topp_samples_total 7.0",
        'sglang_topp_requests_total{outcome="ok"} 1.0',
        'sglang_topp_requests_total{outcome="failed"} 1.0',
        "sglang_topp_engine_ready 0.0",
    ):
        assert both.count(line) == 1
