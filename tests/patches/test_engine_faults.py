"""Faults that the real engine rarely has: each ends its own request with an error, and no other."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import HTTPException

from sglang_topp import formats
from sglang_topp_patches.http import answer as answers
from sglang_topp_patches.http.process_state import Call, CallEndedError, current_call
from sglang_topp_patches.memory import Budget
from sglang_topp_patches.releases import Feature
from sglang_topp_patches.request import SetsRequest, attach
from sglang_topp_patches.scheduler import host_copy_before_0_5_19, prompts
from sglang_topp_patches.scheduler.prompts import PromptExtraction, PromptSets, forget_rows
from sglang_topp_patches.scheduler.requests import SchedulerProcess, Weights, admit, is_refused
from sglang_topp_patches.scheduler.sets import extract
from sglang_topp_patches.scheduler.step import ForwardPass, GeneratedSets, RequestedRows
from sglang_topp_patches.set_buffer import KEY, PackedSet, SetBuffer
from tests.patches.make_http_process import http_process
from tests.skip_missing_features import needs

VOCAB = 32
WEIGHTS = Weights(3, "7")
HTTP = http_process()
PROCESS = SchedulerProcess()


@pytest.fixture
def logprobs() -> torch.Tensor:
    return torch.log_softmax(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 3, -1)


class Req:
    """The part of SGLang's `Req` that the hooks use."""

    def __init__(self, rid: str) -> None:
        self.rid, self.customized_info, self.is_retracted = rid, None, False
        self.stream, self.send_token_offset, self.finished_output = False, 0, False
        self.sampling_params = SimpleNamespace(custom_params=None)
        attach(self, SetsRequest(threshold=0.9, is_base64=True))
        self.input_embeds: Any = None
        self.origin_input_ids, self.logprob_start_len, self.vocab_size = [1, 2, 3], 0, VOCAB
        self.sglang_topp_weights = WEIGHTS
        admit(self, PROCESS)


def commit(index: int, *token_ids: int) -> SimpleNamespace:
    return SimpleNamespace(output_index=index, token_ids=token_ids)


def buffer_of(req: Req) -> SetBuffer:
    return req.customized_info[KEY]


def problem_of(req: Req) -> str:
    """Return why a request ends. It then holds no set."""
    buffer = buffer_of(req)
    assert buffer.problem is not None
    assert buffer.num_held == 0
    return buffer.problem.text


def rows_of(req: Req) -> list[PackedSet | None]:
    """Return the sets of the prompt's rows."""
    assert buffer_of(req).prompt_version == "7"
    return buffer_of(req).prompt.sets()


def generated(logprobs: torch.Tensor, sampled: list[int]) -> GeneratedSets:
    rows = RequestedRows(("a", "b", "c"), (0.9, 0.9, 0.9))
    return ForwardPass(rows).extract(logprobs, torch.tensor(sampled), "default").copy_to_host(torch.clone)


def prompt_extraction(
    thresholds: tuple[float, ...], counts: tuple[int, ...], held: int = 0
) -> PromptExtraction:
    """Begin a pass, while the scheduler holds some candidates."""
    forward_pass = ForwardPass(RequestedRows(tuple("abcd"[: len(counts)]), thresholds))
    metadata = SimpleNamespace(
        extend_logprob_pruned_lens_cpu=counts,
        extend_input_logprob_token_ids_gpu=None,
        input_logprob_indices_cpu=range(sum(counts)),
    )
    process: Any = SimpleNamespace(candidates_in_flight=held)
    return PromptExtraction(process, forward_pass, None, metadata, torch.arange(sum(counts)))


def test_a_row_with_nan_fails_alone(logprobs: torch.Tensor) -> None:
    logprobs[1, 7] = torch.nan
    sets = extract(logprobs, [0.9, 0.9, 0.9], torch.tensor([1, 2, 3]))
    assert list(sets.problems) == [1]
    assert "NaN" in sets.problems[1]
    assert [type(each) for each in sets.on_host()] == [tuple, str, tuple]


@pytest.mark.parametrize("rank", [1, VOCAB - 1], ids=["inside of the set", "outside"])
def test_each_fault_is_told_to_its_own_request(logprobs: torch.Tensor, rank: int) -> None:
    """A token that replaced the drawn one has another log-prob than SGLang reports, even in the set."""
    sampled = logprobs.argmax(1).tolist()
    replaced_by = int(logprobs[1].argsort(descending=True)[rank])
    sets = generated(logprobs, sampled)
    reqs = [Req("a"), Req("b"), Req("x")]
    sets.consume(
        SimpleNamespace(reqs=reqs), [commit(2, sampled[0]), commit(0, replaced_by), commit(0, sampled[2])]
    )
    first, second, third = (problem_of(req) for req in reqs)
    assert first.startswith("no candidate set at position 0: a token became visible without passing through")
    assert f"position 0: token {replaced_by} became visible, and {sampled[1]} was drawn" in second
    assert "was drawn for request c" in third


def test_several_tokens_in_one_step_are_refused(logprobs: torch.Tensor) -> None:
    sampled = logprobs.argmax(1).tolist()
    reqs = [Req("a"), Req("b"), Req("c")]
    generated(logprobs, sampled).consume(
        SimpleNamespace(reqs=reqs), [commit(0, sampled[0], 5), None, commit(0, sampled[2])]
    )
    assert "position 1: a token became visible without being drawn" in problem_of(reqs[0])
    assert reqs[1].customized_info is None
    assert buffer_of(reqs[2]).problem is None


def test_sampling_without_logprobs_is_told() -> None:
    req = Req("a")
    GeneratedSets(RequestedRows(("a",), (0.9,)), "default").consume(
        SimpleNamespace(reqs=[req]), [commit(0, 3)]
    )
    assert "without reporting log-probs" in problem_of(req)


def test_a_prompt_scored_again_after_a_retraction_is_not_doubled(logprobs: torch.Tensor) -> None:
    sets = PromptSets(
        RequestedRows(("a",), (0.9,)), (3,), [extract(logprobs, [0.9] * 3, torch.tensor([1, 2, 3]))], WEIGHTS
    )
    req = Req("a")
    sets.consume(SimpleNamespace(reqs=[req]), [None])
    buffer_of(req).append((b"", b""))
    sets.consume(SimpleNamespace(reqs=[req]), [None])
    assert len(rows_of(req)) == 3


def test_a_prompt_beyond_the_budget_is_refused_and_the_others_are_whole(
    logprobs: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "budget", lambda: Budget(2 * VOCAB, 1000))
    taken = prompt_extraction((1.0, 0.9), (3, 2))
    rows = (logprobs[[0, 1]], logprobs[[2, 0]], logprobs[[1]])
    for part in rows:
        wanted = taken.thresholds[sum(len(chunk.offsets) - 1 for chunk in taken.chunks) :][: len(part)]
        taken.add(extract(part, wanted.tolist(), torch.zeros(len(part), dtype=torch.int64)))
    assert [(row, status) for row, (_, status) in taken.refused.items()] == [(0, 413)]
    assert taken.thresholds.tolist() == [0, 0, 0, 0.9, 0.9]
    sets = PromptSets(RequestedRows(("a", "b"), (1.0, 0.9)), (3, 2), taken.chunks, WEIGHTS, taken.refused)
    first, second = Req("a"), Req("b")
    sets.consume(SimpleNamespace(reqs=[first, second]), [None, None])
    word = buffer_of(first).problem
    assert word is not None
    assert word.status == 413
    assert "of the prompt's positions" in word.text
    # A pass in progress adds nothing, and a retraction does not remove the error.
    sets.consume(SimpleNamespace(reqs=[first, second]), [None, None])
    forget_rows(None, first)
    assert buffer_of(first).problem == word
    problem_of(first)
    assert len(rows_of(second)) == 4
    assert all(len(ids) > 0 for ids, _ in rows_of(second))


@pytest.mark.parametrize("held", [0, 1 << 40])
def test_prompts_that_are_too_much_together_are_told_to_come_back(
    logprobs: torch.Tensor, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """The prompts that are not complete when the room ends, however much is held beside them."""
    monkeypatch.setattr(prompts, "budget", lambda: Budget(1000, 2 * VOCAB))
    taken = prompt_extraction((1.0,) * 4, (2, 2, 2, 2), held)
    for _ in range(4):  # a chunk ends within the second prompt, and the room in the chunk before
        part = taken.thresholds[sum(chunk.num_rows for chunk in taken.chunks) :][:2].tolist()
        taken.add(extract(logprobs[:2], part, torch.zeros(2, dtype=torch.int64)))
    first = 1 if held else 2
    assert {row: int(status) for row, (_, status) in taken.refused.items()} == dict.fromkeys(
        range(first, 4), 429
    )
    assert all("IN_FLIGHT" in reason for reason, _ in taken.refused.values())
    assert taken.thresholds.tolist() == [1.0] * 2 * first + [0.0] * 2 * (4 - first)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True] * 5),
        ({"origin_input_ids": [VOCAB + 7, 3, VOCAB, -1, 2]}, [True, False, False, True, True]),
        ({"origin_input_ids": [9, 3, 5, VOCAB], "logprob_start_len": 1}, [True, False, True, True, True]),
        ({"origin_input_ids": [1] * 5, "input_embeds": [[0.5]] * 5}, [False] * 4 + [True]),
    ],
    ids=["text", "image", "image from a position on", "embeddings"],
)
def test_a_prompt_position_without_a_token_has_no_set(
    logprobs: torch.Tensor, change: dict[str, Any], expected: list[bool]
) -> None:
    """In one chunk and in several. The last row scores the first generated token."""
    sampled = torch.zeros(5, dtype=torch.int64)
    whole = extract(logprobs[[0, 1, 2, 0, 1]], [0.9] * 5, sampled)
    for counts in ((5,), (2, 3)):
        req = Req("a")
        vars(req).update(change)
        start = 0
        for count in counts:
            part = extract(logprobs[[0, 1, 2, 0, 1][start : start + count]], [0.9] * count, sampled[:count])
            sets = PromptSets(RequestedRows(("a",), (0.9,)), (count,), [part], WEIGHTS)
            sets.consume(SimpleNamespace(reqs=[req]), [None])
            start += count
        has_set = [row is not None for row in rows_of(req)]
        assert has_set == expected
        kept = [row for row, each in zip(whole.on_host(), expected, strict=True) if each]
        assert [row for row in rows_of(req) if row is not None] == kept


def test_an_answer_marks_a_prompt_position_without_a_token(logprobs: torch.Tensor) -> None:
    packed = sets_of(logprobs, logprobs.argmax(1).tolist())
    for base64 in (True, False):
        answer = Answer([], prompt_tokens=3)
        attach(answer.state.obj, SetsRequest(threshold=0.9, is_base64=base64))
        answer.state.obj.return_text_in_logprobs = False
        answer.manager.skip_tokenizer_init = True
        answer.manager.detokenize_logprob_tokens = lambda values, ids, _: zip(values, ids, strict=True)
        meta_info = answer.receive([], [None, packed[0]])
        sizes = (
            meta_info["input_top_p_logprobs_lengths"]
            if base64
            else [-1 if row is None else len(row) for row in meta_info["input_top_p_logprobs"]]
        )
        assert sizes == [-1, -1, len(packed[0][0]) // 4]


def test_a_prompt_retracted_while_it_is_scored_begins_anew(logprobs: torch.Tensor) -> None:
    sets = PromptSets(
        RequestedRows(("a",), (0.9,)), (3,), [extract(logprobs, [0.9] * 3, torch.tensor([1, 2, 3]))], WEIGHTS
    )
    req = Req("a")
    sets.consume(SimpleNamespace(reqs=[req]), [None])
    forget_rows(None, req)
    # The pass that was in progress when the request was retracted.
    req.is_retracted = True
    sets.consume(SimpleNamespace(reqs=[req]), [None])
    req.is_retracted = False
    sets.consume(SimpleNamespace(reqs=[req]), [None])
    assert len(rows_of(req)) == 3


def test_a_request_without_sets_is_retracted_from_a_mixed_batch() -> None:
    """SGLang before 0.5.15 gives every request of such a batch the lists that one of them has."""
    asks, other = Req("a"), Req("b")
    asks.customized_info, other.customized_info = {KEY: SetBuffer()}, None
    host_copy_before_0_5_19.commit(None, [asks, other])
    assert other.customized_info is not None
    forget_rows(None, other)
    assert not is_refused(other)


def test_embeddings_that_were_retracted_are_told_to_come_back(logprobs: torch.Tensor) -> None:
    """SGLang's log-probs then mix two answers."""
    sampled = logprobs.argmax(1).tolist()
    for input_embeds, is_ended in ((None, False), ([[0.5]], True)):
        req = Req("a")
        req.input_embeds = input_embeds
        req.customized_info = {KEY: part_of(sets_of(logprobs, sampled))}
        forget_rows(None, req)
        assert is_refused(req) is is_ended
    assert buffer_of(req).problem.status == 503
    early = Req("a")
    early.input_embeds, early.customized_info = [[0.5]], {}
    forget_rows(None, early)
    assert not is_refused(early)


@pytest.mark.parametrize(
    ("pushed", "words"), [(Weights(4, "8"), ", '7' and then '8';"), (Weights(4, "7"), "scored; send")]
)
def test_a_prompt_that_is_scored_by_two_weights_is_told_to_come_back(
    logprobs: torch.Tensor, pushed: Weights, words: str
) -> None:
    chunk = [extract(logprobs, [0.9] * 3, torch.tensor([1, 2, 3]))]
    before, after = (
        PromptSets(RequestedRows(("a", "b"), (0.9, 0.0)), (3, 0), chunk, each) for each in (WEIGHTS, pushed)
    )
    req, other = Req("a"), Req("b")
    for sets in (before, before, after, after):
        sets.consume(SimpleNamespace(reqs=[req, other]), [None, None])
        if sets is before:
            assert not is_refused(req)
    assert words in problem_of(req)
    assert other.customized_info is None

    answer = Answer([], prompt_tokens=9)
    reason = answer.send_on(buffer_of(req)[0:1])["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 503, "ServiceUnavailable")
    assert problem_of(req) in reason["message"]


def test_a_prompt_of_which_nothing_was_scored_before_the_push(logprobs: torch.Tensor) -> None:
    """The chunks before its first scored position left KV of the old weights."""
    chunk = [extract(logprobs, [0.9] * 3, torch.tensor([1, 2, 3]))]
    req = Req("a")
    sets = PromptSets(RequestedRows(("a",), (0.9,)), (3,), chunk, Weights(4, "8"))
    sets.consume(SimpleNamespace(reqs=[req]), [None])
    assert buffer_of(req).problem.status == 503


def test_a_prompt_scored_again_by_other_weights_comes_from_them_alone(logprobs: torch.Tensor) -> None:
    chunk = [extract(logprobs, [0.9] * 3, torch.tensor([1, 2, 3]))]
    req = Req("a")
    for weights in (Weights(2, "8"), WEIGHTS):
        req.sglang_topp_weights = weights
        PromptSets(RequestedRows(("a",), (0.9,)), (3,), chunk, weights).consume(
            SimpleNamespace(reqs=[req]), [None]
        )
        if weights is not WEIGHTS:
            forget_rows(None, req)
    assert len(rows_of(req)) == 3
    assert buffer_of(req).num_positions == 3


def test_a_request_that_starts_over_has_the_sets_of_its_last_run(logprobs: torch.Tensor) -> None:
    sampled = logprobs.argmax(1).tolist()
    req = Req("a")
    req.customized_info = {KEY: part_of(sets_of(logprobs, sampled))}
    batch = SimpleNamespace(reqs=[req, Req("b"), Req("c")])
    generated(logprobs.flip(0), sampled[::-1]).consume(batch, [commit(0, sampled[2]), None, None])
    assert buffer_of(req).generated.sets() == sets_of(logprobs, sampled)[2:]
    assert buffer_of(req).spans == [("default", 1)]


class Answer:
    """Pass one request through the HTTP process, with the fields that SGLang itself writes."""

    def __init__(self, tokens: list[int], prompt_tokens: int = 0, **fields: Any) -> None:
        obj = SimpleNamespace(rid="a", stream=False, return_routed_experts=False, **fields)
        attach(obj, SetsRequest(threshold=0.9, is_base64=True))
        streaming = SimpleNamespace(incremental_streaming_output=False, disaggregation_mode="null")
        self.manager = SimpleNamespace(**vars(streaming), server_args=streaming, abort_request=str)
        self.tokens, self.process, self.sent = tokens, HTTP, 0
        self.state = SimpleNamespace(
            obj=obj,
            last_output_offset=0,
            input_token_logprobs_val=[-1.0] * prompt_tokens,
        )
        self.manager.rid_to_state = {"a": self.state}
        self.meta_info: dict[str, Any] = {
            "id": "a",
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }

    def receive(
        self, generated: list[PackedSet] | None, prompt: Any = (), finished: bool = True
    ) -> dict[str, Any]:
        """Receive sets as the scheduler sends them: those of new tokens, and the prompt's rows."""
        part = None if generated is None else part_of(generated, prompt, self.sent)
        self.sent += len(generated or ())
        return self.send_on([] if part is None else part[0 : part.end], finished)

    def send_on(self, slices: list[SetBuffer], finished: bool = True) -> dict[str, Any]:
        info = {"other": [[1]], KEY: [pickle.loads(pickle.dumps(slices))]}
        recv_obj = SimpleNamespace(rids=["a"], output_ids=[self.tokens], customized_info=info)
        answers.receive_sets(self.manager, recv_obj)
        assert recv_obj.customized_info == {"other": [[1]]}  # another plugin's key stays
        answers.write_meta_info(
            self.process, None, self.manager, self.meta_info, self.state, 0, None, False, finished=finished
        )
        return self.send() if finished else self.meta_info

    def send(self) -> dict[str, Any]:
        """Return the `meta_info` that `_stream_one_response` sends."""
        out = {"output_ids": getattr(self.state, "output_ids", self.tokens), "meta_info": self.meta_info}
        return asyncio.run(self._send(out))["meta_info"]

    async def _send(self, out: dict[str, Any]) -> dict[str, Any]:
        async def chunks(self: Any, obj: Any, request: Any) -> AsyncGenerator[Any, None]:
            yield out

        answer = answers.write_sets(self.process, chunks, self.manager, self.state.obj)
        try:
            (sent,) = [each async for each in answer]
        except HTTPException:  # SGLang does not yield such an answer
            return out
        return sent


def sets_of(logprobs: torch.Tensor, sampled: list[int]) -> list[PackedSet]:
    return extract(logprobs, [0.9] * len(sampled), torch.tensor(sampled)).on_host()


def part_of(
    generated: list[PackedSet], prompt: Any = (), first: int = 0, versions: str | None = None
) -> SetBuffer:
    """Return a request's buffer in the scheduler, after its first tokens were sent."""
    buffer = SetBuffer(first)
    for i, packed in enumerate(generated):
        buffer.append(packed, versions[i] if versions else "default")
    for row in (*prompt, *([(b"", b"")] if prompt else ())):
        buffer.prompt.append(row)
    buffer.prompt_version = "7"
    return buffer


def test_a_whole_answer_is_written(logprobs: torch.Tensor) -> None:
    sampled = logprobs.argmax(1).tolist()
    meta_info = Answer(sampled).receive(sets_of(logprobs, sampled))
    assert meta_info["finish_reason"] == {"type": "length"}
    assert len(formats.decode_top_p(meta_info, sampled)) == 3


@needs(Feature.WEIGHT_VERSIONS)
def test_versions_are_those_of_the_entries_whatever_sglang_tells(logprobs: torch.Tensor) -> None:
    sampled = logprobs.argmax(1).tolist()
    buffer = part_of(sets_of(logprobs, sampled), versions="778")
    answer = Answer(sampled)
    answer.meta_info |= {"weight_version": "9", "weight_versions": [{"version": "9", "start": 0, "end": 3}]}
    meta_info = answer.send_on(buffer[0:3])
    assert meta_info["weight_version"] == "8"
    assert meta_info["weight_versions"] == [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 3},
    ]


def test_a_chunk_holds_what_there_was_when_it_was_made(logprobs: torch.Tensor) -> None:
    """SGLang puts its own lists into a chunk, and appends to them until the chunk is sent."""
    sampled = logprobs.argmax(1).tolist()
    answer = Answer(sampled[:1])
    answer.state.obj.stream = True
    answer.state.output_ids = sampled[:1]
    reported = answer.meta_info["output_token_logprobs"]
    first = answer.receive(sets_of(logprobs, sampled)[:1], finished=False)
    assert "output_top_p_logprobs_lengths" not in first  # encoded only if it is sent

    answer.meta_info = {"id": "a", "finish_reason": None, "output_token_logprobs": reported}
    reported.append([-1.0, sampled[1], None])
    answer.tokens = sampled[1:2]
    second = answer.receive(sets_of(logprobs, sampled)[1:2], finished=False)
    answer.state.output_ids.append(sampled[1])
    for meta_info, count in ((first, 1), (second, 2)):
        answer.meta_info = meta_info
        sent = answer.send()
        assert len(sent["output_token_logprobs"]) == count
        assert len(formats.decode_top_p(sent, sampled[:count])) == count


def test_a_calls_sets_are_counted_until_it_ends(logprobs: torch.Tensor) -> None:
    """Those that arrive before the answer begins and after, and not those that come too late."""
    sampled, counts = logprobs.argmax(1).tolist(), []
    process = http_process(limit=1)
    call = Call()
    token = current_call.set(call)
    answer = Answer(sampled)
    answer.state.obj.stream, answer.state.output_ids = True, list(sampled)
    answer.process = process
    for _ in range(2):
        answer.receive(sets_of(logprobs, sampled), finished=False)
        answer.send()
        counts.append(process.in_flight.total)
    sizes = sum(len(ids) // 4 for ids, _ in sets_of(logprobs, sampled))
    assert counts == [sizes, 2 * sizes]
    with pytest.raises(HTTPException, match=f"hold {2 * sizes} candidates, more than the 1 that fit") as busy:
        process.check_room(is_streamed=False)
    assert busy.value.status_code == 429
    with pytest.raises(CallEndedError) as streamed:
        process.check_room(is_streamed=True)
    assert streamed.value.status_code == 429
    call.close()
    assert process.in_flight.total == 0
    answer.receive(sets_of(logprobs, sampled), finished=False)
    assert process.in_flight.total == 0
    process.check_room(is_streamed=False)
    current_call.reset(token)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sets: None, "0 candidate sets for 3 generated tokens"),
        (lambda sets: sets[:2], "2 candidate sets for 3 generated tokens"),
        (lambda sets: [*sets, sets[0]], "4 candidate sets for 3"),
    ],
)
def test_what_is_missing_is_an_error(logprobs: torch.Tensor, change: Any, words: str) -> None:
    sampled = logprobs.argmax(1).tolist()
    meta_info = Answer(sampled).receive(change(sets_of(logprobs, sampled)))
    assert not any("top_p" in key for key in meta_info)
    reason = meta_info["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 500)
    assert words in reason["message"]


@needs(Feature.WEIGHT_VERSIONS)
def test_where_no_token_was_asked_for_the_version_is_the_prompts(logprobs: torch.Tensor) -> None:
    packed = sets_of(logprobs, logprobs.argmax(1).tolist())
    answer = Answer([], prompt_tokens=3)
    answer.meta_info["weight_version"] = "8"
    meta_info = answer.receive([], packed[:2])
    assert meta_info["input_top_p_logprobs_lengths"][0] == -1
    assert meta_info["weight_version"] == "7"
    assert meta_info["weight_versions"] == [{"version": "7", "start": 0, "end": 0}]


def test_missing_prompt_sets_are_an_error(logprobs: torch.Tensor) -> None:
    packed = sets_of(logprobs, sampled := logprobs.argmax(1).tolist())
    good = Answer(sampled, prompt_tokens=3).receive(packed, packed[:2])
    assert good["input_top_p_logprobs_lengths"][0] == -1
    for prompt in ((), packed[:1], packed):
        meta_info = Answer(sampled, prompt_tokens=3).receive(packed, prompt)
        assert (
            f"{len(prompt) + bool(prompt)} candidate sets for 3 prompt"
            in meta_info["finish_reason"]["message"]
        )


def test_a_prompt_position_with_nan_is_told(logprobs: torch.Tensor) -> None:
    logprobs[1, 7] = torch.nan
    chunk = [extract(logprobs, [0.9] * 3, torch.tensor([1, 2, 3]))]
    req = Req("a")
    PromptSets(RequestedRows(("a",), (0.9,)), (3,), chunk, WEIGHTS).consume(
        SimpleNamespace(reqs=[req]), [None]
    )
    assert problem_of(req).startswith("no candidate set at prompt position 2: ")
    assert "NaN" in problem_of(req)


def test_an_abort_keeps_its_own_cause(logprobs: torch.Tensor) -> None:
    answer = Answer([1, 2, 3])
    answer.meta_info["finish_reason"] = {"type": "abort", "message": "the user did it"}
    assert answer.receive(None)["finish_reason"] == {
        "type": "abort",
        "message": "the user did it; top_logprobs_p: 0 candidate sets for 3 generated tokens",
    }
