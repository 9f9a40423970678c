"""`push_weights` to two real engines: new weights everywhere, requests in flight, and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_topp.errors import (
    InvalidInputError,
    RequestTimeoutError,
    ServerError,
    TransportError,
    WeightPushError,
)
from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient
from sglang_topp_client.weight_push import tensors_to_push
from sglang_topp_client.weight_push.engine_control import EngineControl
from sglang_topp_patches.releases import Feature
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.pushed_weights import check_sets
from tests.engine.start_servers import free_port, run_engine, run_sidecar
from tests.skip_missing_features import can_flush_while_paused, skip_without

skip_without(Feature.WEIGHT_VERSIONS)

# An engine whose model does not fit its checkpoint, so that a push fails there alone.
LARGER = ("--load-format", "dummy", "--json-model-override-args", '{"vocab_size": 640}')

Tensors: TypeAlias = dict[str, torch.Tensor]

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
    model_path: Path,
    log_folder: Path,
) -> None:
    model = load(weight_folders["other-1"])
    with (
        run_engine(model_path, log_folder / "push-tensors-larger.log", *LARGER) as odd,
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


def under_other_names(tensors: Tensors) -> Tensors:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}  # as DDP names them


def of_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {"model.norm.weight": torch.ones(3)}


def a_part(tensors: Tensors) -> Tensors:
    return dict(list(tensors.items())[:5])


def with_one_more(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(3)}


@pytest.mark.parametrize("via", ["disk", "tensor", "distributed"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (under_other_names, r"'module\.([^']+)', but .* loads none of this name; .* such as '\1'"),
        (of_another_shape, r"'model.norm.weight' of shape \[3\], expected \[64\]"),
        (a_part, r"got 5 tensors without \d+ of the \d+ .* partial=True"),
        (with_one_more, r"'model.layers.9.mlp.up_proj.weight', but .* loads none of this name"),
    ],
)
def test_weights_that_the_engine_would_not_load_whole_are_refused_before_any_pause(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    tmp_path: Path,
    via: Any,
    change: Callable[[Tensors], Tensors],
    message: str,
) -> None:
    weights: Any = change(load_file(weight_folders["other-1"] / "model.safetensors"))
    if via == "disk":
        save_file(weights, tmp_path / "model.safetensors")
        weights = tmp_path
    with RolloutClient(urls) as client:
        with pytest.raises(InvalidInputError, match=message):
            client.push_weights(weights, version="other-1", via=via)
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


@pytest.mark.parametrize("via", ["tensor", "distributed"])
def test_a_generator_that_ends_too_early_is_a_failed_push(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    via: Any,
) -> None:
    monkeypatch.setattr(tensors_to_push, "MAX_BUCKET_BYTES", 1)
    saved = load_file(weight_folders["other-1"] / "model.safetensors")
    with RolloutClient(urls) as client:
        with pytest.raises(WeightPushError, match=r"got 5 tensors without") as failed:
            client.push_weights(iter(a_part(saved).items()), version="other-1", via=via)
        assert set(failed.value.weight_versions.values()) == {None}
        with pytest.raises(RequestTimeoutError):
            client.generate(PROMPTS, SAMPLING, timeout_s=2)
        client.push_weights(weight_folders["default"], version="default")
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


@pytest.mark.parametrize("via", ["disk", "tensor", "distributed"])
def test_two_partial_pushes_make_a_whole_one(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    tmp_path: Path,
    via: Any,
) -> None:
    saved = load_file(weight_folders["other-1"] / "model.safetensors")
    first = a_part(saved)
    with RolloutClient(urls) as client:
        for part in (first, {name: tensor for name, tensor in saved.items() if name not in first}):
            weights: Any = part
            if via == "disk":
                save_file(part, tmp_path / "model.safetensors")
                weights = tmp_path
            client.push_weights(weights, version="other-1", via=via, partial=True)
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "other-1", reference_models)
        with pytest.raises(InvalidInputError, match="loads none of this name"):
            client.push_weights(under_other_names(first), version="8", via="tensor", partial=True)
        client.push_weights(weight_folders["default"], version="default")


def test_a_folder_that_cannot_be_read_leaves_the_old_weights(
    urls: list[str], weight_folders: dict[str, Path], reference_models: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    whole = (weight_folders["other-1"] / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:-1])
    with RolloutClient(urls) as client:
        for folder in ("missing", "empty", "cut"):
            with pytest.raises(InvalidInputError, match=f"weights: {urls[0]}: .*got '{tmp_path / folder}'"):
                client.push_weights(tmp_path / folder, version="other-1")
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


def test_a_pause_lasts_until_it_is_ended(urls: list[str], reference_models: dict[str, Any]) -> None:
    with RolloutClient(urls) as client:
        client.pause("abort")
        with pytest.raises(RequestTimeoutError):
            client.generate(PROMPTS, SAMPLING, timeout_s=2)
        client.continue_generation()
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_push_that_sends_nothing_leaves_the_engines_as_they_were(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    was_paused: bool,
) -> None:
    flush = EngineControl.flush_cache

    async def fail(self: EngineControl, mode: Any) -> None:
        if self.base_url == urls[1]:
            raise ServerError("no flush", status=503)
        await flush(self, mode)

    monkeypatch.setattr(EngineControl, "flush_cache", fail)
    with RolloutClient(urls) as client:
        if was_paused:
            client.pause()
        with pytest.raises(ServerError, match="no flush") as failed:
            client.push_weights(weight_folders["other-1"], version="other-1")
        assert ("stay paused" in failed.value.__notes__[0]) is was_paused
        if was_paused:
            with pytest.raises(RequestTimeoutError):
                client.generate(PROMPTS, SAMPLING, timeout_s=2)
            client.continue_generation()
        check_versions(client.generate(PROMPTS, SAMPLING, top_logprobs_p=P), "default", reference_models)


@pytest.mark.skipif(not can_flush_while_paused(), reason="this SGLang flushes no cache in such a pause")
async def test_requests_in_flight_continue_with_the_new_weights(
    urls: list[str], weight_folders: dict[str, Path], reference_models: dict[str, Any]
) -> None:
    # A busy machine has generated hundreds of tokens before the engines pause.
    long = {**SAMPLING, "max_new_tokens": 1500, "n": 1}
    async with AsyncRolloutClient(urls) as client:
        sending = asyncio.create_task(client.generate(PROMPTS, long, top_logprobs_p=P))
        for url in urls:
            await until_running(url)
        await client.push_weights(weight_folders["other-1"], version="other-1")
        rollouts = await sending
        await client.push_weights(weight_folders["default"], version="default")
    check_named_versions(rollouts, reference_models)
    assert all(rollout.weight_version == "other-1" for rollout in rollouts)
    assert any(rollout.weight_versions and rollout.weight_versions[0] == "default" for rollout in rollouts)


def test_after_a_partly_failed_push_nothing_continues(
    urls: list[str],
    weight_folders: dict[str, Path],
    reference_models: dict[str, Any],
    model_path: Path,
    log_folder: Path,
) -> None:
    with run_engine(model_path, log_folder / "push-larger.log", *LARGER) as odd:
        with RolloutClient([urls[0], odd.url]) as client, pytest.raises(WeightPushError) as failed:
            client.push_weights(weight_folders["other-1"], version="3", timeout_s=60)
        assert failed.value.weight_versions == {urls[0]: "3", odd.url: None}
        assert f"{urls[0]}: weights '3'" in str(failed.value)
        assert f"{odd.url}: old weights" in str(failed.value)
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
