"""Requests that SGLang does not survive are refused, so no request ends the engine for other callers.

Each request goes to a sidecar. A request for sets also goes directly to the engine. After each one, the
engine still answers, and its processes are the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine, free_port
from tests.skip_missing_features import needs_grammars

CONTEXT_LENGTH = 4096
SAMPLING = {"max_new_tokens": 4, "top_p": 0.9}


@pytest.fixture(scope="module")
def sidecar(engine: Engine) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar", "--engine-url", engine.url]
    process = subprocess.Popen([*command, "--port", str(port)])
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
        deadline = time.monotonic() + 120
        while True:
            try:
                if http.get("/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.2)
        yield http
    process.terminate()
    process.wait(60)


@pytest.fixture
def unharmed(engine: Engine) -> Iterator[None]:
    """Check that the engine has the same processes afterwards, and answers a request."""
    before = processes(engine)
    yield
    assert processes(engine) == before
    answer = engine.generate(text="hello", sampling_params=SAMPLING, return_logprob=True, top_logprobs_p=0.9)
    assert answer["meta_info"]["output_top_p_logprobs"]


def processes(engine: Engine) -> set[int]:
    """Return the ids of the engine's processes."""
    table = subprocess.run(["ps", "-eo", "pid,sess,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines()[1:]]
    return {int(pid) for pid, sess, state in rows if int(sess) == engine.process.pid and state[0] != "Z"}


def test_the_models_sizes_are_reported(engine: Engine, sidecar: httpx.Client) -> None:
    model = engine.http.get("/server_info").json()["sglang_topp"]["model"]
    assert model["vocab_size"] == VOCAB_SIZE
    assert model["context_length"] == CONTEXT_LENGTH
    assert model["max_token_chars"] == len("<|endoftext|>")
    assert sidecar.get("/info").json()["engine"]["model"].items() >= model.items()


# -- sampling parameters: through the sidecar, and directly ----------------------------------

DEEP: list[Any] = json.loads("[" * 80 + "]" * 80)
EVERY_TOKEN = [str(i) for i in range(VOCAB_SIZE)]
FATAL_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    # The value becomes an index of a tensor.
    "stop ids beyond": ({"stop_token_ids": [1000000, -5], "min_new_tokens": 2}, "stop_token_ids: got token"),
    "a negative stop id": ({"stop_token_ids": [-5], "min_new_tokens": 2}, "stop_token_ids: got token id -5"),
    # The value overflows its integer type.
    "top_k of 32 bits": ({"top_k": 2**31}, "top_k: got 2147483648"),
    "top_k of 63 bits": ({"top_k": 2**63 - 1}, "top_k: got"),
    "top_k of 64 bits": ({"top_k": 2**63}, "9223372036854775808"),
    # No finite logit is left, so the probabilities are NaN.
    "a tiny penalty": ({"repetition_penalty": 1e-45}, "repetition_penalty: got 1e-45"),
    "an infinite bias": ({"logit_bias": {"5": 1e300}}, "logit_bias: got 1e+300"),
    "a bias beyond float32": ({"logit_bias": {"5": 1e39}}, "logit_bias: got 1e+39"),
    "a bias that overflows": ({"logit_bias": {"5": 3e38}, "temperature": 0.5}, "logit_bias: got 3e+38"),
    "every token forbidden": ({"logit_bias": dict.fromkeys(EVERY_TOKEN, -1e39)}, "logit_bias: got -1e+39"),
    "every token a stop": (
        {"stop_token_ids": list(range(VOCAB_SIZE)), "min_new_tokens": 2},
        "stop_token_ids: got 512 with min_new_tokens 2",
    ),
    "a grammar that ends early": ({"regex": "a", "min_new_tokens": 3}, "min_new_tokens: got 3 with regex"),
    "a schema that ends early": (
        {"json_schema": '{"type": "boolean"}', "min_new_tokens": 4},
        "min_new_tokens: got 4 with json_schema",
    ),
    # The scheduler searches without end.
    "exponential": ({"stop_regex": "(.*)*(.*)*(.*)*~~Q", "max_new_tokens": 40}, "stop_regex: got"),
    "of the ninth power": (
        {"stop_regex": "(?s)" + ".*" * 8 + "~Q", "max_new_tokens": 400},
        "stop_regex: got",
    ),
    # SGLang alone answers a 500 without a reason.
    "deep custom_params": ({"custom_params": {"a": DEEP}}, "custom_params: got more than 64 levels"),
    "choice": ({"choice": ["a"]}, "choice: SGLang does not accept it"),
    "no choice": ({"choice": None}, "choice: SGLang does not accept it"),
    "a broken stop regex": ({"stop_regex": "("}, "no regular expression: missing )"),
}


@pytest.mark.parametrize("name", FATAL_PARAMS)
def test_fatal_parameters(unharmed: None, engine: Engine, sidecar: httpx.Client, name: str) -> None:
    params, words = FATAL_PARAMS[name]
    for sets in (0.9, None):
        body = {"prompts": "hello", "sampling_params": {**SAMPLING, **params}, "top_logprobs_p": sets}
        for stream in (False, True):
            refused(sidecar.post("/rollouts", json={**body, "stream": stream}), 400, words)
    asked = {"text": "hello", "return_logprob": True, "stream": True}
    refused(
        engine.post(**asked, sampling_params={**SAMPLING, **params}, top_logprobs_p=0.9),
        400,
        words,
    )
    custom = {
        **SAMPLING,
        **params,
        "custom_params": {**params.get("custom_params", {}), "top_logprobs_p": 0.9},
    }
    refused(engine.post(**asked, sampling_params=custom), 400, words)


@pytest.mark.parametrize("custom", ["x", [1], [{"top_logprobs_p": 0.9}], 5])
def test_custom_params_that_are_no_object(
    unharmed: None, engine: Engine, sidecar: httpx.Client, custom: Any
) -> None:
    params = {**SAMPLING, "custom_params": custom}
    refused(
        sidecar.post("/rollouts", json={"prompts": "hello", "sampling_params": params}), 400, "custom_params"
    )
    asked = {"text": "hello", "return_logprob": True, "sampling_params": params}
    refused(engine.post(**asked, top_logprobs_p=0.9), 400, "custom_params")
    # Without the field, the request asks for no sets, and the answer is SGLang's own.
    assert engine.post(**asked).status_code == (400 if "top_logprobs_p" in str(custom) else 200)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("return_hidden_states", []),
        ("lora_id", ["x"]),
        ("extra_key", ["x", "y"]),
        ("session_params", {"a": 1}),
    ],
)
def test_what_a_request_for_one_prompt_does_not_take(
    unharmed: None, engine: Engine, field: str, value: Any
) -> None:
    asked = {"text": "hello", "return_logprob": True, "sampling_params": SAMPLING, "top_logprobs_p": 0.9}
    refused(engine.post(**asked, **{field: value}), 400, field)


# -- prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "status", "words"),
    [
        ([99999], 400, "prompts: got token id 99999 at position 0, expected 0 to 511"),
        ([[3, 512]], 400, "prompts[0]: got token id 512 at position 1"),
        ([[3], [-1]], 400, "prompts[1]: got ids from -1"),
        ([[3], [2**63]], 400, "prompts[1]: got"),
        ([[]], 400, "prompts[0]: got"),
        ("", 400, "prompts: got an empty text"),
        ("a" * (CONTEXT_LENGTH * 13 + 1), 413, "expected at most 53248 for a context of 4096 tokens"),
        ("a" * 8_000_000, 413, "prompts: got a text of 8000000 characters"),
    ],
)
def test_fatal_prompts_through_the_sidecar(
    unharmed: None, sidecar: httpx.Client, prompts: Any, status: int, words: str
) -> None:
    for sets in (0.9, None):
        body = {"prompts": prompts, "sampling_params": SAMPLING, "top_logprobs_p": sets}
        refused(sidecar.post("/rollouts", json=body), status, words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [99999]}, "input_ids: got token id 99999 at position 0, expected 0 to 511"),
        ({"input_ids": [[3, 512]]}, "input_ids[0]: got token id 512 at position 1"),
        ({"input_ids": [-1]}, "input_ids: got token id -1"),
        ({"input_ids": [[3], [-(2**63)]]}, "input_ids[1]: got token id"),
        ({"input_ids": [99999], "text": "a"}, "input_ids: got token id 99999"),
        ({"input_ids": [[]]}, "input_ids[0]: got no token id"),
        ({"text": ""}, "text: got an empty text"),
        ({"text": ["a", ""]}, "text[1]: got an empty text"),
        ({"text": "a" * 8_000_000}, "text: got a text of 8000000 characters"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len: got -2"),
        ({"text": "a", "logprob_start_len": [0]}, "logprob_start_len: got a list of 1"),
        ({"text": "a", "top_logprobs_num": 513}, "top_logprobs_num: got 513, expected at most 512"),
        ({"text": "a", "top_logprobs_num": 2**63}, "top_logprobs_num: got"),
        ({"text": "a", "top_logprobs_num": [1, 2]}, "top_logprobs_num: got a list of 2"),
        ({"text": "a", "positional_embed_overrides": 5}, "positional_embed_overrides: got JSON"),
        ({"text": "a", "rid": ["x"]}, "rid: got a list of 1"),
        ({"text": "a", "sampling_params": {"n": 2**31}}, "sampling_params.n: got 2147483648"),
        ({"text": "a", "sampling_params": {"n": None}}, "sampling_params.n: got None"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params: got a list of 1"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num: got a list of 1"),
    ],
)
def test_fatal_requests_straight_to_the_engine(
    unharmed: None, engine: Engine, fields: dict[str, Any], words: str
) -> None:
    for stream in (False, True):
        asked = {"sampling_params": SAMPLING, "return_logprob": True, "top_logprobs_p": 0.9, "stream": stream}
        refused(engine.post(**{**asked, **fields}), 400, words)


@pytest.mark.parametrize("key", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_grammars_for_an_engine_that_one_may_end(sidecar: httpx.Client, key: str) -> None:
    """`sglang-topp serve` did not start this engine. `test_serve` tests an engine that it started."""
    answer = sidecar.post("/rollouts", json={"prompts": "a", "sampling_params": {key: "{}"}})
    refused(answer, 400, f"sampling_params.{key}: got one", "SGLANG_SANITIZE_NAN_LOGITS=1")


def test_long_stop_strings(unharmed: None, engine: Engine, sidecar: httpx.Client) -> None:
    for stop in ("x" * 20_000_000, ["x" * 1025]):
        params = {**SAMPLING, "stop": stop}
        answer = sidecar.post("/rollouts", json={"prompts": "a", "sampling_params": params})
        refused(answer, 413, "sampling_params.stop: got ", "expected at most 1024")
        answer = engine.post(text="a", sampling_params=params, return_logprob=True, top_logprobs_p=0.9)
        refused(answer, 400, "sampling_params.stop: got ", "expected at most 1024")


# -- odd but harmless: served, or refused by SGLang itself ------------------------------------------

NESTED = '{"type":"object","properties":{"a":' * 500 + '{"type":"string"}' + "}}" * 500


@needs_grammars()
@pytest.mark.parametrize(
    "grammar",
    [
        {"json_schema": NESTED},
        {"json_schema": "{"},
        {"regex": "("},
        {"regex": "((a{1,1000}){1,1000}){1,1000}"},
        {"ebnf": "root ::="},
        {"structural_tag": "{}"},
    ],
    ids=lambda grammar: json.dumps(grammar)[:40],
)
def test_hostile_and_harmless_grammars(unharmed: None, engine: Engine, grammar: dict[str, Any]) -> None:
    answer = engine.post(
        text="a", sampling_params={**SAMPLING, **grammar}, return_logprob=True, top_logprobs_p=0.9
    )
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {"512": 1}},
        {"logit_bias": {"99999999999999999999": 1}},
        {"logit_bias": {"5": 1e30}, "temperature": 1e-6},
        {"temperature": 1e-30},
        {"temperature": 1e300},
        {"n": 5000, "max_new_tokens": 100000},
        {"top_k": 0},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-300, "min_p": 1.0},
        {"min_new_tokens": 9, "max_new_tokens": 3},
        {"min_new_tokens": 2**63 - 1, "max_new_tokens": 3},
        {"max_new_tokens": 2**63 - 1},
        {"max_new_tokens": -1},
        {"stop_token_ids": list(range(VOCAB_SIZE))},
        {"stop": ["x"] * 33},
        {"stop": ""},
        {"stop": 5},
        {"stop_regex": "a{4294967294}"},
        {"sampling_seed": 10**30},
        {"frequency_penalty": "5"},
        {"custom_params": [[[]]]},
    ],
    ids=lambda params: json.dumps(params)[:40],
)
def test_hostile_and_harmless(unharmed: None, sidecar: httpx.Client, params: dict[str, Any]) -> None:
    body = {"prompts": "hello", "sampling_params": {**SAMPLING, **params}, "top_logprobs_p": 0.9}
    answer = sidecar.post("/rollouts", json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    for word in words:
        assert word in (error["message"] if isinstance(error, dict) else error)
