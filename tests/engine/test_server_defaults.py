"""A request with sets samples as the same request without, under every default that the server merges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from sglang_topp import formats
from sglang_topp.errors import BadRequestError
from sglang_topp_client import RolloutClient
from sglang_topp_patches.releases import Feature
from tests.engine.start_servers import Engine, run_engine
from tests.skip_missing_features import needs

BANNED = list(range(0, 512, 2))
PREFERRED = {
    "custom_params": {"token_ids": BANNED},
    "frequency_penalty": 0.5,
    "top_k": 40,
}
CONTEXT = 256


@pytest.fixture(scope="module")
def server(model_path: Path, log_folder: Path) -> Iterator[Engine]:
    arguments = ["--enable-custom-logit-processor", "--preferred-sampling-params", json.dumps(PREFERRED)]
    arguments += ["--context-length", str(CONTEXT), "--allow-auto-truncate"]
    with run_engine(model_path, log_folder / "defaults.log", *arguments) as running:
        yield running


def asked(**sampling: Any) -> dict[str, Any]:
    return {
        "text": "hello there",
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, **sampling},
        "custom_logit_processor": DisallowedTokensLogitsProcessor().to_str(),
        "return_logprob": True,
    }


@pytest.mark.parametrize("place", ["top level", "custom_params"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"frequency_penalty": 0},
        {"custom_params": {"token_ids": [1, 3, 5]}},
        {"n": 2, "frequency_penalty": 0},
    ],
    ids=str,
)
def test_sets_change_no_token(server: Engine, sampling: dict[str, Any], place: str) -> None:
    plain = server.generate(**asked(**sampling))
    fields = {"top_logprobs_p": 0.9, "return_logprobs_in_base64": True}
    body = asked(**sampling)
    if place == "top level":
        body |= fields
    else:
        params = body["sampling_params"]
        params["custom_params"] = {**params.get("custom_params", {}), **fields}
    found = server.generate(**body)
    banned = set(sampling.get("custom_params", PREFERRED["custom_params"])["token_ids"])
    for one, other in zip(
        *([each] if isinstance(each, dict) else each for each in (plain, found)), strict=True
    ):
        assert one["output_ids"] == other["output_ids"]
        assert not banned & set(other["output_ids"])
        expected = one["meta_info"]["output_token_logprobs"]
        assert [each[0] for each in other["meta_info"]["output_token_logprobs"]] == pytest.approx(
            [each[0] for each in expected], abs=1e-4
        )
        assert len(formats.decode_top_p(other["meta_info"], other["output_ids"])) == 24


def test_a_caller_cannot_forge_what_crosses_to_the_scheduler(server: Engine) -> None:
    for forged in (-1_000_000, {"threshold": 0.9}, [0.9, None]):
        custom = {"token_ids": [1], "sglang_topp": forged, "sglang_topp_request": forged}
        answer = server.generate(**asked(custom_params=custom))
        assert not any("top_p" in key for key in answer["meta_info"])


@needs(Feature.RESUMED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_default_that_a_resumed_answer_cannot_follow_is_refused(server: Engine, stream: bool) -> None:
    sentence = "sampling_params.frequency_penalty: got 0.5, which cannot be exact where an answer is resumed"
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "resumed_tokens": 1}
    answer = server.post(**body, stream=stream)
    assert answer.status_code == (200 if stream else 400)
    assert sentence in answer.text
    for each in ({"sampling_params": {"frequency_penalty": 0, "custom_params": None}}, {"resumed_tokens": 0}):
        assert server.post(**{**body, **each}).status_code == 200


@needs(Feature.RESUMED)
def test_the_client_says_so(server: Engine) -> None:
    with RolloutClient(server.url) as client:
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        (cut,) = client.generate([[5, 6, 7]], sampling, top_logprobs_p=0.9, on_abort="return")
        cut = replace(cut, finish_reason="abort")
        with pytest.raises(BadRequestError, match=r"frequency_penalty: got 0\.5"):
            client.resume([cut], {"max_new_tokens": 8, "ignore_eos": True}, top_logprobs_p=0.9)


@needs(Feature.RESUMED)
@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT + 44])
def test_resumed_tokens_that_would_be_cut_off_are_refused(server: Engine, length: int) -> None:
    sampling = {"max_new_tokens": 4, "frequency_penalty": 0, "custom_params": None}
    body = {"input_ids": [5] * length, "sampling_params": sampling}
    answer = server.post(**body, resumed_tokens=3)
    assert answer.status_code == 400
    assert "resumed_tokens: got 3 with a prompt of" in answer.text
    assert server.post(**body).status_code == 200  # SGLang cuts any other prompt
