"""`sglang-topp serve` whole: the patched SGLang, the sidecar, the client, and what happens when one dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from sglang_topp.errors import RequestError
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient
from sglang_topp_patches.releases import Feature, refused
from tests.engine.checks import check_rollout
from tests.engine.running import START_LIMIT_S, free_port
from tests.features import needs_grammars

SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
LONG = {**SAMPLING, "max_new_tokens": 3000}


class Served:
    """A running `sglang-topp serve`."""

    def __init__(self, process: subprocess.Popen[str], sidecar: str, engine: str) -> None:
        self.process = process
        self.sidecar = sidecar
        self.engine = engine

    def running_requests(self) -> int:
        """What SGLang itself says it is running."""
        text = httpx.get(f"{self.engine}/metrics").text
        return int(
            sum(float(value) for value in re.findall(r"^sglang:num_running_reqs\{.*\} (\S+)$", text, re.M))
        )


@pytest.fixture(scope="module")
def served(model_path: Path, log_folder: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "sglang_topp_server.cli", "serve", "--model-path", str(model_path)]
    command += ["--port", "0", "--engine-port", "0", "--ready-timeout-s", str(START_LIMIT_S)]
    # A sidecar in one process is in the other files.
    command += ["--workers", "2", "--"]
    command += ["--dtype", "float32", "--max-total-tokens", "16384", "--mem-fraction-static", "0.2"]
    command += ["--enable-metrics"]
    log = (log_folder / "serve.log").open("w")
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        words = line.split()
        if "ready:" not in words:
            process.wait(60)
            pytest.fail(f"serve did not start: {line}\n{Path(log.name).read_text()[-4000:]}")
        yield Served(process, words[words.index("sidecar") + 1], words[words.index("engine") + 1])
        process.terminate()
        process.wait(120)


def wait_until(condition: object, limit_s: float = 30) -> None:
    assert callable(condition)
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.parametrize("where", ["sidecar", "engine"])
def test_rollouts(served: Served, where: str) -> None:
    with RolloutClient(getattr(served, where)) as client:
        rollouts = client.generate(
            ["one", "two", "three"], {**SAMPLING, "n": 2}, top_logprobs_p=[0.5, 0.9, 1.0]
        )
        assert [(r.prompt_index, r.sample_index) for r in rollouts] == [
            (i, j) for i in range(3) for j in (0, 1)
        ]
        for rollout in rollouts:
            check_rollout(rollout, [0.5, 0.9, 1.0][rollout.prompt_index])
            assert rollout.finish_reason == "length"
            assert rollout.weight_version == "default"
            assert bytes(rollout.prompt_ids.astype(np.uint8).tolist())  # byte-level ids
        (from_ids,) = client.generate([70, 71, 72], SAMPLING, top_logprobs_p=0.9)
        assert from_ids.prompt_ids.tolist() == [70, 71, 72]
        (plain,) = client.generate("hello", SAMPLING)
        assert plain.candidates is None


@pytest.mark.parametrize("where", ["sidecar", "engine"])
async def test_many_rollouts_as_they_finish(served: Served, where: str) -> None:
    async with AsyncRolloutClient(getattr(served, where)) as client:
        lengths = [1 + (i * 7) % 40 for i in range(48)]
        params = [{**SAMPLING, "max_new_tokens": length} for length in lengths]
        seen = set()
        async for rollout in client.stream(["x" * (1 + i) for i in range(48)], params, top_logprobs_p=0.9):
            check_rollout(rollout, 0.9)
            assert len(rollout.output_ids) == lengths[rollout.prompt_index]
            seen.add(rollout.prompt_index)
        assert seen == set(range(48))


def test_the_readmes_rollout_loop_and_what_goes_on_from_it(served: Served) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for part in ("client.generate(", "client.resume(", "teacher.score("):
        if part == "client.resume(" and refused(Feature.RESUMED):
            continue
        program = next(program for program in programs if part in program)
        if refused(Feature.SAMPLER_SOURCE):  # as the README says below it
            program = program.replace('top_logprobs_source="sampler"', "top_logprobs_p=0.9")
        assert "http://127.0.0.1:30010" in program
        exec(program.replace("http://127.0.0.1:30010", served.sidecar), names)
    rollouts = names["rollouts"]
    assert isinstance(rollouts, list)
    assert len(rollouts) == (8 if refused(Feature.RESUMED) else 2)


def test_info_and_readiness(served: Served) -> None:
    assert httpx.get(f"{served.sidecar}/healthz").status_code == 200
    assert httpx.get(f"{served.sidecar}/readyz").status_code == 200
    assert httpx.get(f"{served.sidecar}/info").json()["service"] == "sglang-topp"
    assert "sglang_topp" in httpx.get(f"{served.sidecar}/metrics").text


def test_bad_input_arrives_with_the_engines_words(served: Served) -> None:
    for body in (
        {"prompts": ["a"], "top_logprobs_p": 1.5},
        {"prompts": ["a"], "sampling_params": {"temperature": -1}, "top_logprobs_p": 0.9},
        {"prompts": ["a"], "sampling_params": {"no_such_parameter": 1}, "top_logprobs_p": 0.9},
    ):
        answer = httpx.post(f"{served.sidecar}/rollouts", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


@needs_grammars()
@pytest.mark.parametrize(
    "grammar",
    [
        {"ebnf": "root ::= root"},
        {"ebnf": 'root ::= "a" b\nb ::= b'},
        {"json_schema": '{"$ref": "#"}'},
    ],
)
def test_a_grammar_without_a_way_on_ends_its_answer_and_not_the_engine(
    served: Served, grammar: dict[str, str]
) -> None:
    for sets in (0.9, None):
        body = {"prompts": "a", "sampling_params": {**SAMPLING, **grammar}, "top_logprobs_p": sets}
        answer = httpx.post(f"{served.sidecar}/rollouts", json=body, timeout=120)
        assert answer.status_code == 502, answer.text
        # SGLang's words; it says less up to 0.5.20 or so.
        message = answer.json()["error"]["message"]
        assert re.search(
            "Grammar accept_token failed|the engine gave up on a sample: abort, Aborted$", message
        )
        with RolloutClient(served.sidecar) as client:
            check_rollout(client.generate("hello", SAMPLING, top_logprobs_p=0.9)[0], 0.9)


@needs_grammars()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forbids_is_in_no_set(served: Served, temperature: float) -> None:
    """Also at p = 1, where every token of non-zero probability is a candidate."""
    params = {"temperature": temperature, "regex": "[a-f]{6}", "max_new_tokens": 6}
    with RolloutClient(served.sidecar) as client:
        (rollout,) = client.generate("hello", params, top_logprobs_p=1.0)
    assert rollout.candidates is not None
    assert rollout.candidates.sizes.tolist() == [6] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_in_the_engine(served: Served, stream: bool) -> None:
    wait_until(lambda: served.running_requests() == 0)
    body = {
        "prompts": ["a", "b"],
        "sampling_params": {**LONG, "n": 2},
        "top_logprobs_p": 0.9,
        "stream": stream,
    }

    async def hang_up() -> None:
        async with httpx.AsyncClient() as http:
            sending = asyncio.create_task(http.post(f"{served.sidecar}/rollouts", json=body, timeout=60))
            for _ in range(300):
                await asyncio.sleep(0.1)
                if await asyncio.to_thread(served.running_requests) >= 4:
                    break
            else:
                pytest.fail("the engine never ran the four samples")
            sending.cancel()

    asyncio.run(hang_up())
    wait_until(lambda: served.running_requests() == 0)


def test_a_restarted_sidecar_is_found_again(served: Served) -> None:
    port = free_port()
    command = [sys.executable, "-m", "sglang_topp_server.cli", "sidecar", "--engine-url", served.engine]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([*command, "--port", str(port)], text=True)

    first = start()
    with RolloutClient(f"http://127.0.0.1:{port}", kind="sidecar", max_retries=8) as client:
        check_rollout(client.generate("hello", SAMPLING, top_logprobs_p=0.9)[0], 0.9)
        results: list[list[Rollout]] = []
        sending = threading.Thread(
            target=lambda: results.append(
                client.generate("hello", {**SAMPLING, "max_new_tokens": 300}, top_logprobs_p=0.9)
            )
        )
        sending.start()
        time.sleep(0.5)
        first.kill()
        first.wait()
        second = start()
        sending.join(120)
        assert results
        check_rollout(results[0][0], 0.9)
    second.terminate()
    assert second.wait(60) == 0


def test_the_engine_dies_in_mid_request(served: Served) -> None:
    """Last in this module: the client gets an error, `serve` ends with one, and nothing is left over."""
    children = subprocess.run(
        ["ps", "-wweo", "pid,sess,args"], capture_output=True, text=True, check=True
    ).stdout
    port = served.engine.rpartition(":")[2]
    (engine_line,) = [
        line for line in children.splitlines() if f"--port {port}" in line and "keeper" not in line
    ]
    pid, session = engine_line.split()[:2]
    with RolloutClient(served.sidecar, max_retries=0) as client:
        failures: list[BaseException] = []

        def send() -> None:
            try:
                client.generate("hello", LONG, top_logprobs_p=0.9)
            except RequestError as error:
                failures.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        wait_until(lambda: served.running_requests() >= 1)
        os.kill(int(pid), signal.SIGKILL)
        sending.join(120)
        assert failures
        assert "sglang" in str(failures[0]).lower() or "engine" in str(failures[0]).lower()
    assert served.process.wait(120) == 1

    def processes_left() -> list[str]:
        table = subprocess.run(
            ["ps", "-wweo", "sess,stat,args"], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(None, 2) for line in table.splitlines()]
        return [args for sess, state, args in rows if sess == session and not state.startswith("Z")]

    wait_until(lambda: not processes_left())
