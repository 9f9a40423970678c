"""Two patched engines behind one client, and behind the gateway `smg`, directly and through the sidecar."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sglang_topp_client import AsyncRolloutClient, RolloutClient
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.start_servers import Engine, run_engine, run_gateway, run_sidecar

SAMPLING = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}


@pytest.fixture(scope="module")
def engines(engine: Engine, model_path: Path, log_folder: Path) -> Iterator[tuple[Engine, Engine]]:
    with run_engine(model_path, log_folder / "second.log") as second:
        yield engine, second


@pytest.fixture(scope="module")
def gateway(engines: tuple[Engine, Engine], log_folder: Path) -> Iterator[str]:
    with run_gateway(log_folder / "smg.log", *(engine.url for engine in engines)) as url:
        yield url


@pytest.fixture(scope="module")
def sidecar(gateway: str) -> Iterator[str]:
    with run_sidecar(gateway) as url:
        wait_until(lambda: httpx.get(f"{url}/readyz", timeout=60).status_code == 200)
        yield url


def wait_until(condition: Callable[[], object], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def num_generated(engine: Engine) -> int:
    """Return the number of requests that an engine has answered, from its log."""
    return engine.log.read_text(errors="replace").count('"POST /generate')


def num_running(engine: Engine) -> int:
    loads = engine.http.get("/v1/loads").json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


@pytest.mark.parametrize("where", ["sidecar", "gateway"])
def test_the_gateway_passes_every_field(where: str, request: pytest.FixtureRequest) -> None:
    with RolloutClient(request.getfixturevalue(where)) as client:
        for _ in range(4):  # smg chooses an engine for each request
            client.check_servers()


@pytest.mark.parametrize("where", ["sidecar", "gateway"])
def test_every_answer_has_its_sets(
    where: str, engines: tuple[Engine, Engine], request: pytest.FixtureRequest
) -> None:
    before = [num_generated(engine) for engine in engines]
    with RolloutClient(request.getfixturevalue(where)) as client:
        prompts = ["x" * (1 + i) for i in range(12)]
        thresholds = [(0.5, 0.9, 1.0)[i % 3] for i in range(12)]
        rollouts = client.generate(prompts, {**SAMPLING, "n": 2}, top_logprobs_p=thresholds)
        assert [(r.prompt_index, r.sample_index) for r in rollouts] == [
            (i, j) for i in range(12) for j in range(2)
        ]
        for rollout in rollouts:
            check_rollout(rollout, thresholds[rollout.prompt_index])
        assert client.generate("hello", SAMPLING)[0].candidates is None
    # Both engines generated some samples.
    assert all(num_generated(engine) > count for engine, count in zip(engines, before, strict=True))


def test_the_sidecar_says_what_stands_behind_the_gateway(sidecar: str, model_path: Path) -> None:
    info = httpx.get(f"{sidecar}/info", timeout=60).json()
    assert (info["ready"], info["patch"]["active"], info["patch"]["problems"]) == (True, True, [])
    assert info["engine"]["model_path"] == str(model_path)


@pytest.mark.parametrize("where", ["sidecar", "gateway"])
def test_a_client_that_hangs_up_aborts_in_the_engines(
    where: str, engines: tuple[Engine, Engine], request: pytest.FixtureRequest
) -> None:
    async def hang_up() -> None:
        async with AsyncRolloutClient(request.getfixturevalue(where)) as client:
            long = {**SAMPLING, "max_new_tokens": 3000, "n": 2}
            sending = asyncio.create_task(client.generate(["a", "b"], long, top_logprobs_p=0.9))
            await asyncio.to_thread(wait_until, lambda: sum(map(num_running, engines)) >= 4)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    asyncio.run(hang_up())
    wait_until(lambda: sum(map(num_running, engines)) == 0)


# -- one client for both ----------------------------------------------------------------------------


def test_both_are_asked_and_every_answer_has_its_sets(engines: tuple[Engine, Engine]) -> None:
    before = [num_generated(engine) for engine in engines]
    with RolloutClient([engine.url for engine in engines]) as client:
        rollouts = client.generate(
            ["x" * (1 + i) for i in range(16)], {**SAMPLING, "n": 2}, top_logprobs_p=0.9
        )
        for rollout in rollouts:
            check_rollout(rollout, 0.9)
    assert len(rollouts) == 32
    made = [num_generated(engine) - count for engine, count in zip(engines, before, strict=True)]
    assert sum(made) == 16
    assert min(made) > 0


def test_an_engine_that_is_killed_in_mid_batch_loses_no_sample(engines: tuple[Engine, Engine]) -> None:
    """The last test of this module, because it ends the second engine."""

    async def kill_meanwhile() -> None:
        prompts = ["y" * (1 + i) for i in range(24)]
        options = {**SAMPLING, "max_new_tokens": 150, "n": 2}
        async with AsyncRolloutClient([engine.url for engine in engines]) as client:
            batch = asyncio.create_task(client.generate(prompts, options, top_logprobs_p=0.9, timeout_s=300))
            await asyncio.to_thread(wait_until, lambda: num_running(engines[1]) >= 4)
            os.killpg(engines[1].process.pid, signal.SIGKILL)
            rollouts = await batch
            assert [(r.prompt_index, r.sample_index) for r in rollouts] == [
                (i, j) for i in range(len(prompts)) for j in range(2)
            ]
            for rollout in rollouts:
                assert len(rollout.output_ids) == 150
                check_rollout(rollout, 0.9)
            # The client continues without it.
            (rollout,) = await client.generate("hello", SAMPLING, top_logprobs_p=0.9)
            check_rollout(rollout, 0.9)

    asyncio.run(kill_meanwhile())
