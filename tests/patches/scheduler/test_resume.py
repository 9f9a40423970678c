"""The effect of `resumed_tokens` on SGLang's own request object."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from sglang_topp.engine_contract import (
    INTERNAL_PARAMS,
    NON_RESUMABLE_PARAMS,
    RESUMABLE_PARAMS,
    find_resume_problem,
)
from sglang_topp_patches.releases import Feature
from sglang_topp_patches.request import SetsRequest, attach
from sglang_topp_patches.scheduler import resume
from sglang_topp_server.cli.tiny_model import make_tiny_model
from tests.skip_missing_features import skip_without

skip_without(Feature.RESUMED)

END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(Path(path))
    tokenizer.additional_stop_token_ids = None  # as SGLang leaves it
    return tokenizer


def request(tokenizer: Any, prompt: str, output: str, *, count: int | None = None, **params: Any) -> Any:
    """Return SGLang's request with a part of its answer."""
    sampling = SamplingParams(**{"max_new_tokens": 100, **params})
    sampling.normalize(tokenizer)
    made = Req("r", "", array("q", tokenizer.encode(prompt)), sampling, eos_token_ids={END}, vocab_size=512)
    attach(made, SetsRequest(resumed_tokens=count))
    if count is not None:
        made.__class__ = resume.resumable_req()  # as `scheduler.requests.receive` does
    made.tokenizer = tokenizer
    made.output_ids = array("q", tokenizer.encode(output))
    return made


# -- the table -------------------------------------------------------------------------------------


def test_every_sampling_parameter_of_this_release_is_in_one_group() -> None:
    groups = (RESUMABLE_PARAMS, set(NON_RESUMABLE_PARAMS), INTERNAL_PARAMS)
    for i, one in enumerate(groups):
        for other in groups[i + 1 :]:
            assert not set(one) & set(other)
    assert set.union(*map(set, groups)) == set(SamplingParams.__struct_fields__)


def test_the_harmless_values_are_sglangs_own() -> None:
    plain = SamplingParams()
    for name, (harmless, _) in NON_RESUMABLE_PARAMS.items():
        default = getattr(plain, name)
        assert default == harmless or (default is None and find_resume_problem({name: None}) is None)
        assert find_resume_problem({name: harmless}) is None


# -- stop strings and text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "num_tokens", "count", "held_back"),
    [
        ("xaé", 3, 1, True),  # the first byte of the character has arrived
        ("xaé", 2, 1, True),  # SGLang's own
        ("xbé", 3, 1, False),
        ("xaé", 3, 0, True),
        ("xaé", 3, None, False),  # as SGLang does
    ],
)
def test_text_that_may_begin_a_stop_string_is_held_back(
    tokenizer: Any, answer: str, num_tokens: int, count: int | None, held_back: bool
) -> None:
    ids = tokenizer.encode(answer)[:num_tokens]
    made = request(tokenizer, "hello", "", count=count, stop=["aé", "zz"])
    made.output_ids = array("q", ids)
    assert made.check_match_stop_str_prefix() is held_back


def test_stop_strings_are_looked_for_as_if_there_was_no_cut(tokenizer: Any) -> None:
    answer = "an answer with <end> in it"
    for params in (
        {"stop": ["<end>", "no"]},
        {"stop_regex": "<e.d>"},
        {"stop": "<end>", "stop_regex": "x{1,9}"},
    ):
        for cut in range(len(answer)):
            for length in range(cut + 1, len(answer) + 1):
                whole = request(tokenizer, "p", answer[:length], **params)
                part = request(tokenizer, "p" + answer[:cut], answer[cut:length], count=cut, **params)
                assert part.tail_str() == whole.tail_str(), (cut, length)


def test_nothing_before_the_answer_is_looked_at(tokenizer: Any) -> None:
    made = request(tokenizer, "prompt<e", "nd>", count=0, stop=["<end>"])
    assert made.tail_str() == "nd>"
    assert request(tokenizer, "prompt<e", "nd>", stop=["<end>"]).tail_str() == "nd>"
    assert request(tokenizer, "prompt<e", "nd>", count=2, stop=["<end>"]).tail_str() == "<end>"
    assert request(tokenizer, "prompt<e", "nd>", count=2).tail_str() == ""


def test_the_text_begins_where_the_answer_does(tokenizer: Any) -> None:
    answer = "Zürich, 東京"
    num_tokens = len(tokenizer.encode(answer))
    for cut in range(num_tokens):
        ids = tokenizer.encode(answer)
        made = request(tokenizer, "a prompt", "", count=cut)
        made.origin_input_ids_unpadded = made.origin_input_ids = array(
            "q", [*tokenizer.encode("a prompt"), *ids[:cut]]
        )
        made.output_ids = array("q", ids[cut:-1])
        decode_ids, offset = made.init_incremental_detokenize()
        if cut < num_tokens - 1:
            assert tokenizer.decode(decode_ids[offset:]) == tokenizer.decode(ids[:-1])
        assert tokenizer.decode(decode_ids[:offset]) == "a prompt"[-5:]
        # Later text is appended to it.
        made.output_ids.append(ids[-1])
        decode_ids, _ = made.init_incremental_detokenize()
        assert tokenizer.decode(decode_ids[offset:]) == answer


# -- aborts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "params", "kind"),
    [
        ("ab", {}, "abort"),
        ("ab", {"stop": ["b"]}, "stop"),
        ("ab", {"stop_regex": "a."}, "stop"),
        ("ab", {"max_new_tokens": 2}, "length"),
        ("a<|endoftext|>", {}, "stop"),
        ("a<|endoftext|>", {"ignore_eos": True}, "abort"),
        ("ab", {"stop_token_ids": [66]}, None),
    ],
)
def test_a_token_that_ends_the_answer_ends_it(
    tokenizer: Any, output: str, params: dict[str, Any], kind: str | None
) -> None:
    last = tokenizer.encode(output)[-1]
    if kind is None:
        params, kind = {"stop_token_ids": [last]}, "stop"
    for count, expected in ((0, kind), (None, "abort")):
        made = request(tokenizer, "p", output, count=count, **params)
        made.to_finish = FINISH_ABORT()
        made.update_finish_state(1)
        assert made.finished_reason.to_json()["type"] == expected
        assert made.to_finish is None


def test_a_refusal_stays_one(tokenizer: Any) -> None:
    made = request(tokenizer, "p", "ab", count=0, stop=["b"])
    made.to_finish = FINISH_ABORT("too late", 503)
    made.update_finish_state(1)
    assert made.finished_reason.to_json()["status_code"] == 503


def test_without_an_abort_nothing_changes(tokenizer: Any) -> None:
    for output, kind in (("ab", None), ("a<|endoftext|>", "stop")):
        made = request(tokenizer, "p", output, count=0)
        made.update_finish_state(1)
        assert (made.finished_reason and made.finished_reason.to_json()["type"]) == kind


def test_what_waits_is_sent_with_all_of_its_tokens(tokenizer: Any) -> None:
    sent: list[Any] = []
    scheduler = SimpleNamespace(
        output_streamer=SimpleNamespace(stream_output=lambda reqs, logprob: sent.append((reqs, logprob)))
    )
    plain: list[Any] = []

    def original(self: Any, order: Any, req: Any) -> None:
        plain.append(req)

    order, refusal = SimpleNamespace(finished_reason=None), SimpleNamespace(finished_reason={"type": "abort"})
    made = request(tokenizer, "p", "ab", count=0)
    resume.send_all_tokens(original, scheduler, order, made)
    assert sent == [([made], made.return_logprob)]
    assert made.finished_reason.to_json()["type"] == "abort"
    # There is no token, the request does not ask for this, or it was refused.
    others = [
        (order, request(tokenizer, "p", "", count=0)),
        (order, request(tokenizer, "p", "ab")),
        (refusal, request(tokenizer, "p", "ab", count=0)),
    ]
    for given, one in others:
        resume.send_all_tokens(original, scheduler, given, one)
    assert plain == [one for _, one in others]
    assert len(sent) == 1
