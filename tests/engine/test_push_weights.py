"""`push_weights` to two real engines: new weights everywhere, requests in flight, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang_topp.errors import InvalidInputError, RequestTimeoutError, TransportError, WeightPushError
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient
from sglang_topp_client.weight_push import tensors_to_push
from sglang_topp_patches.compat.releases import Feature
from sglang_topp_server.cli.tiny_model import make_tiny_model
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.pushed_weights import check_sets
from tests.engine.start_servers import free_port, run_engine, run_sidecar
from tests.skip_missing_features import can_flush_while_paused, skip_without

skip_without(Feature.WEIGHT_VERSIONS)

P = 0.9
PROMPTS = [f"{i} little prompts" for i in range(4)]
SAMPLING = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True, "n": 2}


@pytest.fixture(scope="module")
def urls(model_path: Path, log_folder: Path) -> Iterator[list[str]]:
    """Two engines for this module alone."""
    with (
        run_engine(model_path, log_folder / "push-1.log") as first,
        run_engine(model_path, log_folder / "push-2.log") as second,
    ):
        yield [first.url, second.url]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_versions(rollouts: Sequence[Rollout], version: str, references: dict[str, Any]) -> None:
    """Check that every token is of `version`, by its name and by its sets."""
    assert rollouts
    for rollout in rollouts:
        assert rollout.weight_versions == (version,) * len(rollout.output_ids)
    check_named_versions(rollouts, references)


def check_named_versions(rollouts: Sequence[Rollout], references: dict[str, Any]) -> None:
    """Check that each token's set is of the version that the rollout names for it."""
    for rollout in rollouts:
        assert rollout.candidates is not None
        assert rollout.weight_versions is not None
        check_rollout(rollout, P)
        check_sets(
            rollout.candidates,
            P,
            rollout.weight_versions,
            rollout.prompt_ids.tolist(),
            rollout.output_ids.tolist(),
            references,
        )


async def until_running(url: str) -> None:
    """Wait until an engine has generated some tokens of the samples in flight."""
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, timeout=60) as http:
        while (await http.get("/v1/loads")).json()["loads"][0]["num_used_tokens"] < 150:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("pause", ["retract", "abort", "in_place"])
def test_a_model_and_a_folder_reach_every_engine(
    urls: list[str], weight_folders: dict[str, Path], reference_models: dict[str, Any], pause: Any
) -> None:
    with RolloutClient(urls) as client:
        for prompt, version, weights in (
            ("a", "other-1", load(weight_folders["other-1"])),
            ("b", "other-2", weight_folders["other-2"]),
            ("c", "default", str(weight_folders["default"])),
        ):
            client.push_weights(weights, version=version, pause=pause)
            for url in urls:
                with RolloutClient(url) as one:
                    # An `in_place` push keeps the cache, so every prompt begins differently.
                    rollouts = one.generate(prompt, SAMPLING, top_logprobs_p=P)
                    check_versions(rollouts, version, reference_models)


@pytest.mark.parametrize("via", ["tensor", "distributed"])
def test_tensors_reach_every_engine(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    via: Any,
) -> None:
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 100_000)  # several buckets
    saved = load_file(weight_folders["other-2"] / "model.safetensors")
    with RolloutClient(urls) as client:
        for version, weights in (
            ("other-1", load(weight_folders["other-1"])),
            ("other-2", ((name, tensor) for name, tensor in saved.items())),
            ("default", load(weight_folders["default"])),
        ):
            client.push_weights(weights, version=version, via=via)
            for url in urls:
                with RolloutClient(url) as one:
                    rollouts = one.generate(PROMPTS, SAMPLING, top_logprobs_p=P)
                    check_versions(rollouts, version, reference_models)


def test_after_tensors_that_one_engine_refuses_nothing_continues(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    tmp_path: Path,
    log_folder: Path,
) -> None:
    larger = make_tiny_model(tmp_path / "larger", vocab_size=640)
    model = load(weight_folders["other-1"])
    with (
        run_engine(larger, log_folder / "push-tensors-larger.log") as odd,
        RolloutClient([urls[0], odd.url]) as client,
        pytest.raises(WeightPushError) as failed,
    ):
        client.push_weights(model, version="3", via="tensor", timeout_s=60)
    assert failed.value.weight_versions == {urls[0]: "3", odd.url: None}
    with RolloutClient(urls[0]) as client:
        with pytest.raises(RequestTimeoutError):
            client.generate(PROMPTS, SAMPLING, timeout_s=2)
        client.push_weights(load(weight_folders["default"]), version="default", via="tensor")
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


@pytest.mark.skipif(not can_flush_while_paused(), reason="this SGLang flushes no cache in such a pause")
async def test_requests_in_flight_continue_with_the_new_weights(
    urls: list[str], weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    # A busy machine has generated hundreds of tokens before the model is saved and the engines pause.
    long = {**SAMPLING, "max_new_tokens": 1500, "n": 1}
    model = load(weight_folders["other-1"])
    async with AsyncRolloutClient(urls) as client:
        sending = asyncio.create_task(client.generate(PROMPTS, long, top_logprobs_p=P))
        for url in urls:
            await until_running(url)
        await client.push_weights(model, version="other-1")
        rollouts = await sending
        await client.push_weights(weight_folders["default"], version="default")
    check_named_versions(rollouts, reference_models)
    assert all(rollout.weight_version == "other-1" for rollout in rollouts)
    assert any(rollout.weight_versions and rollout.weight_versions[0] == "default" for rollout in rollouts)


def test_after_a_partly_failed_push_nothing_continues(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    tmp_path: Path,
    log_folder: Path,
) -> None:
    larger = make_tiny_model(tmp_path / "larger", vocab_size=640)
    with run_engine(larger, log_folder / "push-larger.log") as odd:
        with RolloutClient([urls[0], odd.url]) as client, pytest.raises(WeightPushError) as failed:
            client.push_weights(weight_folders["other-1"], version="3", timeout_s=60)
        assert failed.value.weight_versions == {urls[0]: "3", odd.url: None}
        assert f"{urls[0]}: weights '3'" in str(failed.value)
        assert f"{odd.url}: weights unknown" in str(failed.value)
        assert "1 of 2 engines" in str(failed.value)
        with RolloutClient(urls[0]) as client:
            with pytest.raises(RequestTimeoutError):
                client.generate(PROMPTS, SAMPLING, timeout_s=2)
            client.push_weights(weight_folders["default"], version="default")
            check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


async def test_an_engine_that_is_down_stops_the_push_before_any_pause(
    urls: list[str], weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    async with AsyncRolloutClient([*urls, down]) as client:
        with pytest.raises(TransportError, match=down):
            await client.push_weights(weight_folders["other-1"], version="3")
    async with AsyncRolloutClient(urls) as client:
        rollouts = await client.generate(PROMPTS, SAMPLING, top_logprobs_p=P)
    check_versions(rollouts, "default", reference_models)


def test_a_client_of_a_sidecar_names_its_engines(
    urls: list[str], weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    with run_sidecar(urls[0]) as sidecar:
        with RolloutClient(sidecar) as client, pytest.raises(InvalidInputError, match="engine_url"):
            client.push_weights(weight_folders["other-1"], version="other-1")
        with RolloutClient(sidecar, engine_url=urls[0]) as client:
            client.push_weights(weight_folders["other-1"], version="other-1")
            assert client.server_info()["engine"]["weight_version"] == "other-1"
            check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "other-1", reference_models)
            client.push_weights(weight_folders["default"], version="default")
            assert client.server_info()["engine"]["weight_version"] == "default"
