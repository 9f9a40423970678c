"""`sglang-topp serve`: the patched SGLang, the sidecar, the client, and the death of each process."""

from __future__ import annotations

import ast
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
from typing import Literal

import httpx
import numpy as np
import pytest

from sglang_topp.errors import RequestError, RolloutError
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient, load_rollouts
from sglang_topp_patches.releases import Feature, refused
from sglang_topp_server.view.token_text import TokenTexts
from tests.documentation_blocks import block_with
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.start_servers import START_LIMIT_S, free_port, run_sidecar, with_forks
from tests.skip_missing_features import needs_grammars

SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
LONG = {**SAMPLING, "max_new_tokens": 3000}
# Ten requests of this length fit into the engine's 16,384 tokens at once.
MANY_AT_ONCE = {**SAMPLING, "max_new_tokens": 1000}
# Long enough to be in flight while others are aborted.
KEPT = {**SAMPLING, "max_new_tokens": 400}


class Served:
    """A running `sglang-topp serve`."""

    def __init__(self, process: subprocess.Popen[str], sidecar: str, engine: str) -> None:
        self.process = process
        self.sidecar = sidecar
        self.engine = engine

    def running_requests(self) -> int:
        """Return the number of requests that SGLang reports as running."""
        text = httpx.get(f"{self.engine}/metrics", timeout=60).text
        return int(
            sum(float(value) for value in re.findall(r"^sglang:num_running_reqs\{.*\} (\S+)$", text, re.M))
        )


@pytest.fixture(scope="module")
def served(model_path: Path, log_folder: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve", "--model-path", str(model_path)]
    command += ["--port", "0", "--engine-port", "0", "--ready-timeout-s", str(START_LIMIT_S)]
    command.append("--")
    command += ["--dtype", "float32", "--max-total-tokens", "16384", "--mem-fraction-static", "0.2"]
    command += ["--enable-metrics", "--sleep-on-idle"]
    log = (log_folder / "serve.log").open("w")
    environment = with_forks(os.environ)
    with (
        log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
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


@pytest.mark.parametrize("where", ["sidecar", "engine"])
def test_the_command_generate(served: Served, where: str, model_path: Path, tmp_path: Path) -> None:
    """Greedy samples, so that the table and the file show the same tokens."""
    url = getattr(served, where)
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "generate", "--url", url]
    command += ["--prompt", "one", "--prompt", "two", "--n", "2", "--top-logprobs-p", "0.9"]
    command += ["--max-new-tokens", "5", "--temperature", "0", "--sampling-params", '{"ignore_eos": true}']

    subprocess.run([*command, "--out", str(tmp_path / "run")], check=True)
    saved = sorted(load_rollouts(tmp_path / "run"), key=lambda one: (one.prompt_index, one.sample_index))
    assert len(saved) == 4
    for rollout in saved:
        check_rollout(rollout, 0.9)

    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    # The command found the served model's tokenizer by itself.
    assert shown.stderr == ""
    texts = TokenTexts(model_path)
    for table, rollout in zip(shown.stdout.split("\n\n"), saved, strict=True):
        heading, text, _, *rows = table.splitlines()
        assert "5 tokens, finish reason length, weights 'default'" in heading
        assert ast.literal_eval(text) == rollout.text
        for row, token_id in zip(rows, rollout.output_ids.tolist(), strict=True):
            token = texts.text_of(token_id)
            literal = str(token_id) if token is None else repr(bytes(token) if type(token) is list else token)
            assert row.split(maxsplit=1)[1].startswith(f"{literal}  ")


def test_the_documented_rollout_loop_with_resume_and_scores(served: Served) -> None:
    names: dict[str, object] = {}
    for page, part in (
        ("how-to/roll-out.md", "rollout.masked_logprobs"),
        ("how-to/resume-and-tools.md", "on_abort="),
        ("how-to/score-and-distill.md", "teacher.score("),
    ):
        if part == "on_abort=" and refused(Feature.RESUMED):
            continue
        program = block_with(page, part)
        if refused(Feature.SAMPLER_SOURCE):  # as the page says below it
            program = program.replace('top_logprobs_source="sampler"', "top_logprobs_p=0.9")
        assert "http://127.0.0.1:30010" in program
        exec(program.replace("http://127.0.0.1:30010", served.sidecar), names)
    rollouts = names["rollouts"]
    assert isinstance(rollouts, list)
    assert len(rollouts) == (8 if refused(Feature.RESUMED) else 2)


def test_info_and_readiness(served: Served) -> None:
    assert httpx.get(f"{served.sidecar}/healthz", timeout=60).status_code == 200
    assert httpx.get(f"{served.sidecar}/readyz", timeout=60).status_code == 200
    assert httpx.get(f"{served.sidecar}/info", timeout=60).json()["service"] == "sglang-topp"
    assert "sglang_topp" in httpx.get(f"{served.sidecar}/metrics", timeout=60).text


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
        assert re.search(r"Grammar accept_token failed|weight update ended a sample: Aborted;", message)
        with RolloutClient(served.sidecar) as client:
            check_rollout(client.generate("hello", SAMPLING, top_logprobs_p=0.9)[0], 0.9)


@needs_grammars()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forbids_is_in_no_set(served: Served, temperature: float) -> None:
    """At p = 1, every token of non-zero probability is a candidate."""
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
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar", "--engine-url", served.engine]

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


# -- two sidecars before one engine --------------------------------------------------------------------


@pytest.fixture(scope="module")
def sidecars(served: Served) -> Iterator[list[str]]:
    with run_sidecar(served.engine) as second:
        wait_until(lambda: httpx.get(f"{second}/readyz", timeout=60).status_code == 200)
        yield [served.sidecar, second]


def metric(sidecar: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", httpx.get(f"{sidecar}/metrics", timeout=60).text, re.M)
    return float(found.group(1)) if found else 0.0


def test_two_sidecars_share_the_samples_and_every_answer_has_its_sets(sidecars: list[str]) -> None:
    before = [metric(url, "sglang_topp_samples_total") for url in sidecars]
    with RolloutClient(sidecars) as client:
        rollouts = client.generate(["x" * (1 + i) for i in range(48)], SAMPLING, top_logprobs_p=0.9)
        assert [rollout.prompt_index for rollout in rollouts] == list(range(48))
        for rollout in rollouts:
            check_rollout(rollout, 0.9)
    after = [metric(url, "sglang_topp_samples_total") for url in sidecars]
    made = [new - old for new, old in zip(after, before, strict=True)]
    assert sum(made) == 48
    assert min(made) > 0


@pytest.mark.parametrize("on_abort", ["raise", "return"])
async def test_two_sidecars_abort_a_request_by_its_name_and_no_other(
    served: Served, sidecars: list[str], on_abort: Literal["raise", "return"]
) -> None:
    async with AsyncRolloutClient(sidecars) as client:
        prompts = ["a" * (1 + i) for i in range(8)]
        aborted = asyncio.create_task(
            client.generate(prompts, MANY_AT_ONCE, top_logprobs_p=0.9, on_abort=on_abort, request_id="step-7")
        )
        kept = asyncio.create_task(
            client.generate(["b", "bb"], KEPT, top_logprobs_p=0.9, request_id="step-70")
        )
        await asyncio.to_thread(wait_until, lambda: served.running_requests() == 10)
        assert all(metric(url, "sglang_topp_in_flight") for url in sidecars)
        await client.abort("step-7")
        if on_abort == "raise":
            with pytest.raises(RolloutError, match="abort"):
                await aborted
        else:
            for rollout in await aborted:
                assert rollout.finish_reason == "abort"
                assert 0 < len(rollout.output_ids) < 1000
                check_rollout(rollout, 0.9)
        for rollout in await kept:
            assert len(rollout.output_ids) == 400
            check_rollout(rollout, 0.9)
    await asyncio.to_thread(wait_until, lambda: served.running_requests() == 0)


async def test_a_client_aborts_by_name_what_others_asked_two_sidecars_for(
    served: Served, sidecars: list[str]
) -> None:
    """The caller gave this name to the sidecars.

    A client's own calls have unique names, so that two trainers that both use "step-7" do not abort each
    other.
    """
    names = ["step-7", "step-7", "step-70"]
    async with httpx.AsyncClient(timeout=60) as http, AsyncRolloutClient(sidecars) as client:
        calls = [
            asyncio.create_task(
                http.post(
                    f"{sidecar}/rollouts",
                    json={
                        "prompts": [name],
                        "sampling_params": KEPT if name == "step-70" else MANY_AT_ONCE,
                        "top_logprobs_p": 0.9,
                        "on_abort": "return",
                        "request_id": name,
                    },
                )
            )
            for sidecar, name in zip([*sidecars, sidecars[0]], names, strict=True)
        ]
        own = asyncio.create_task(client.generate("a", KEPT, top_logprobs_p=0.9, request_id="step-7"))
        await asyncio.to_thread(wait_until, lambda: served.running_requests() == 4)
        async with AsyncRolloutClient(sidecars) as other:
            await other.abort("step-7")
        answers = [(await call).json()["rollouts"][0] for call in calls]
        assert [answer["finish_reason"] for answer in answers] == ["abort", "abort", "length"]
        assert (await own)[0].finish_reason == "length"
    await asyncio.to_thread(wait_until, lambda: served.running_requests() == 0)


async def test_two_sidecars_abort_everything(served: Served, sidecars: list[str]) -> None:
    async with AsyncRolloutClient(sidecars) as client, AsyncRolloutClient(sidecars) as other:
        generating = asyncio.create_task(
            client.generate(
                ["a" * (1 + i) for i in range(8)], MANY_AT_ONCE, top_logprobs_p=0.9, on_abort="return"
            )
        )
        await asyncio.to_thread(wait_until, lambda: served.running_requests() == 8)
        await other.abort_all()
        for rollout in await generating:
            assert rollout.finish_reason == "abort"
            check_rollout(rollout, 0.9)
    await asyncio.to_thread(wait_until, lambda: served.running_requests() == 0)


async def test_one_of_two_sidecars_is_killed_in_mid_batch(served: Served) -> None:
    """The engine aborts the killed sidecar's samples, and the client requests them from the other one."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar", "--engine-url", served.engine]
    second = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, "--port", str(port)]) as process:
        try:
            await asyncio.to_thread(wait_until, lambda: is_ready(second))
            async with AsyncRolloutClient([served.sidecar, second]) as client:
                options = {**SAMPLING, "max_new_tokens": 150}
                generating = asyncio.create_task(
                    client.generate(["y" * (1 + i) for i in range(24)], options, top_logprobs_p=0.9)
                )
                await asyncio.to_thread(
                    wait_until, lambda: metric(second, "sglang_topp_in_flight") or generating.done()
                )
                process.kill()
                rollouts = await generating
        finally:
            process.kill()
    assert [rollout.prompt_index for rollout in rollouts] == list(range(24))
    for rollout in rollouts:
        assert len(rollout.output_ids) == 150
        check_rollout(rollout, 0.9)


def is_ready(sidecar: str) -> bool:
    try:
        return httpx.get(f"{sidecar}/readyz", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_the_engine_dies_in_mid_request(served: Served) -> None:
    """Last in this module: the client gets an error, `serve` fails, and no process is left."""
    children = subprocess.run(
        ["ps", "-wweo", "pid,sess,args"], capture_output=True, text=True, check=True
    ).stdout
    port = served.engine.rpartition(":")[2]
    (engine_line,) = [
        line for line in children.splitlines() if f"--port {port}" in line and "engine_supervisor" not in line
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
