"""Put candidate sets from the scheduler into the answer's `meta_info`, in SGLang's tokenizer manager.

SGLang's `TokenizerManager._handle_batch_output` reads each message from the scheduler, and adds the new
tokens to the answers. Three hooks add the sets of these tokens, in this order:

1. `receive_sets` removes each request's new sets, a `SetBuffer`, from the scheduler's message. The hook runs
   before `_handle_batch_output`.
2. `write_meta_info` adds the new sets to the request's `Sample`, which keeps them until they are sent. It
   also records which token positions the next chunk of the answer contains. The hook runs inside
   `_handle_batch_output`, and also when SGLang aborts a queued request.
3. `write_sets` writes the sets of the recorded token positions into the chunk when SGLang sends the chunk. An
   answer that is not streamed is one chunk.

If a request asked for sets and a token in the answer has no set, the request ends with an error. The error
has the finish reason `abort`. Its status is 500, or the status with which the scheduler refused the request.
Without the error, the answer would look like an answer to a request that asked for no sets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from itertools import islice
from typing import Any

from sglang_topp import formats
from sglang_topp.engine_contract import RESUMED
from sglang_topp_patches import disaggregation
from sglang_topp_patches.hooks import Seam, after, around, before
from sglang_topp_patches.http import slime_fields
from sglang_topp_patches.http.process_state import Call, CallEndedError, HttpProcess, current_call
from sglang_topp_patches.memory import LIST_FORM_COST, InFlight
from sglang_topp_patches.releases import Feature, refused
from sglang_topp_patches.request import DISTRIBUTION, SAMPLER, SOURCE, SetsRequest, sets_request
from sglang_topp_patches.set_buffer import KEY, NO_SET, Positions, Problem, SetBuffer

CALLED = (
    Seam(
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        "Know which fields of a chunk have one entry per token.",
        ("meta_info", "last_output_offset"),
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request",
        "Abort a request that can only end as an error.",
        ("rid",),
    ),
)

_ROUTES = "routed_experts"
_ARRIVED = "_sglang_topp_arrived"
_SAMPLE = "_sglang_topp_sample"
# The lists in `meta_info` that have one entry per token. SGLang appends to the lists until the answer ends.
_PER_TOKEN = (
    *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
    *("output_token_sampling_mask", "output_token_sampling_logprobs"),
)


@before("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output")
def receive_sets(self: Any, recv_obj: Any) -> None:
    """Take sets out of a scheduler's message.

    After the hook, the message has the same keys as a message from an unpatched scheduler.
    """
    info, parts = getattr(recv_obj, "customized_info", None), None
    if isinstance(info, dict):  # with `SGLANG_USE_PICKLE_IPC=0`, a pickle, which has no sets
        parts = info.pop(KEY, None)
        recv_obj.customized_info = info or None
    tokens = getattr(recv_obj, "output_ids", None) or [()] * len(recv_obj.rids)
    # A request without a buffer has an empty list, or None for each of its tokens.
    sent = [each[0] if each else None for each in parts or [()] * len(recv_obj.rids)]
    # The event loop handles one scheduler message at a time, so `_ARRIVED` holds only what that one brought.
    setattr(self, _ARRIVED, dict(zip(recv_obj.rids, zip(tokens, sent, strict=True), strict=True)))


class Sample:
    """One sample of an answer: the sets that the HTTP process has received, and may still send to the client.

    Attributes:
        wanted: what the sample's request wants.
        sets: the sets, or the problem with which the sample ends.
        num_tokens: the number of generated tokens that the HTTP process has received.
        first_token_id: the id of the first generated token, or None until a token has arrived.
        question: fetches the first token's set from the prefill server, while `lacks_first`.
        is_aborted: whether the HTTP process aborted the sample because a position has no set.
        record: what a sample whose sets are sent at the end adds to the answer; None if it wants no sets.
        is_written: whether `record` is complete.
        cause: why the sample ended without sets, or "".
    """

    def __init__(self, wanted: SetsRequest) -> None:
        self.wanted = wanted
        self.sets = SetBuffer()
        self.num_tokens = 0
        self.first_token_id: int | None = None
        self.question: asyncio.Task[disaggregation.FirstToken] | None = None
        self.is_aborted = False
        self.record: dict[str, Any] | None = None
        self.is_written = not wanted.field
        self.cause = ""
        self._counted = 0
        self._call: Call | None = None

    def add(self, token_ids: Sequence[int], part: SetBuffer | None) -> None:
        """Add new tokens, and what the scheduler sent with them."""
        if self.first_token_id is None and token_ids:
            self.first_token_id = token_ids[0]
        self.num_tokens += len(token_ids)
        if part is not None:
            self.sets.extend(part)
        self._count()

    @property
    def lacks_first(self) -> bool:
        """Whether the first token has arrived, but its candidate set is still on the prefill server."""
        return self.sets.first == 0 and self.sets.generated.sizes[:1].tolist() == [NO_SET]

    def add_first_token(self, first: disaggregation.FirstToken) -> None:
        """Store the candidate sets from the prefill server: the sets of the first token and of the prompt."""
        if first.sets.problem is not None:
            self.sets.fail(first.sets.problem)
        elif self.sets.problem is None:
            (packed,) = first.sets.generated.sets()
            self.sets.set_first(packed, first.sets.spans[0][0])
            self.sets.prompt, self.sets.prompt_version = first.sets.prompt, first.sets.prompt_version
        self._count()

    def attach(self, call: Call | None, in_flight: InFlight) -> None:
        """Count the sample's candidates as the HTTP call's, including those that already arrived."""
        if call is not None and self._call is None:
            call.count_in(in_flight)
            self._call = call
            self._count()

    def forget(self, stop: int) -> None:
        """Free the sets of the tokens before index `stop`. No later chunk needs them."""
        self.sets.first += len(self.sets.generated.take(stop - self.sets.first))
        self._count()

    def _count(self) -> None:
        if self._call is not None:
            held = self.sets.num_held
            cost = 1 if self.wanted.is_base64 else LIST_FORM_COST
            self._call.add((held - self._counted) * cost)
            self._counted = held

    @property
    def has_failed(self) -> bool:
        """Whether the sample ends with an error: a set is missing, or the scheduler refused the request."""
        return self.sets.problem is not None

    @property
    def status(self) -> int:
        """The HTTP status of the error that ends a failed sample."""
        return self.sets.problem.status if self.sets.problem else HTTPStatus.INTERNAL_SERVER_ERROR

    def check(self, num_prompt: int | None) -> str:
        """Return the problem if a token or a prompt position lacks its set, and otherwise an empty string.

        Args:
            num_prompt: the number of prompt positions that need a set. If `num_prompt` is None, the number of
                the prompt's sets is not checked, because the server that scores the prompt checks the number.
        """
        if self.sets.problem is not None:
            return self.sets.problem.text
        if self.sets.end != self.num_tokens:
            return f"{self.sets.end} candidate sets for {self.num_tokens} generated tokens"
        if num_prompt is not None and len(self.sets.prompt) != num_prompt:
            return f"{len(self.sets.prompt)} candidate sets for {num_prompt} prompt tokens"
        return ""


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager.add_logprob_to_meta_info", state=HttpProcess)
def write_meta_info(
    process: HttpProcess,
    result: None,
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    top_logprobs_num: int,
    token_ids_logprob: Any,
    return_text_in_logprobs: bool,
    **kwargs: Any,
) -> None:
    """Add candidate sets to the answer."""
    wanted, finished = sets_request(state.obj), meta_info["finish_reason"] is not None
    field, at_end = wanted.field, wanted.is_sent_at_end
    if wanted.resumed_tokens is not None:
        meta_info[RESUMED] = wanted.resumed_tokens
    if not field and not wanted.is_base64:
        return
    stream = getattr(state.obj, "stream", False) and not at_end
    is_shown = stream or finished
    # An incremental chunk holds the token positions since the previous chunk. A chunk that is not incremental
    # holds all token positions so far.
    start = state.last_output_offset if stream and _setting(self, "incremental_streaming_output") else 0
    if wanted.is_base64 and top_logprobs_num and is_shown and not at_end:
        _write_top_k(meta_info, state, start)
    if not field:
        return

    sample = _sample(state)
    sample.add(*getattr(self, _ARRIVED, {}).pop(meta_info["id"], ((), None)))
    if sample.lacks_first and sample.question is None and sample.first_token_id is not None:
        asking = disaggregation.fetch_first_token(self.server_args, state, sample.first_token_id)
        sample.question = asyncio.create_task(asking)
    if sample.has_failed and not finished:
        sample.is_aborted = True
        self.abort_request(state.obj.rid)
    if not is_shown:
        return
    # If `top_logprobs_source` is "sampler", a prompt has no sets, because its tokens were not sampled. With
    # the default, "distribution", a prompt position needs a set if SGLang reports a log-prob for the
    # position, unless the prefill server scores it. The sample counts generated tokens by their ids, because
    # SGLang may report a log-prob without a token if `max_new_tokens` is 0.
    role = self.server_args.disaggregation_mode
    num_prompt = 0 if wanted.is_from_sampler else len(state.input_token_logprobs_val)
    problem = sample.check(None if role == "decode" and not wanted.is_from_sampler else num_prompt)
    if finished:
        if problem:
            sample.sets.fail(Problem(problem))
        if role == "prefill":
            process.prefill_server.keep(state.obj, sample.first_token_id, sample.sets)
    if not problem:
        meta_info[KEY] = [start, sample.num_tokens]
    elif finished:
        _fail(meta_info, f"{field}: {problem}", sample)
    else:
        meta_info[KEY] = None  # `write_sets` drops a chunk whose `KEY` is None


@around("sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response", state=HttpProcess)
def write_sets(
    process: HttpProcess,
    original: Callable[..., AsyncGenerator[dict[str, Any], None]],
    self: Any,
    obj: Any,
    request: Any = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Write the sets into each chunk that is sent.

    If a client reads more slowly than the engine generates, SGLang omits some chunks, and the next chunk
    covers the tokens of the omitted chunks. The hook writes sets only into the chunks that SGLang sends to
    the client.
    """
    chunks, wanted = original(self, obj, request), sets_request(obj)
    if wanted.returns_prompt_ids:
        chunks = _with_prompt_ids(chunks, obj)
    if not wanted.field and not wanted.is_sent_at_end:
        return chunks
    state, call = self.rid_to_state[obj.rid], current_call.get()
    sample = _sample(state)
    if call is not None:
        sample.attach(call, process.in_flight)
        if wanted.is_sent_at_end:
            call.samples.append(sample)
    return _with_sets(chunks, self, state, sample) if wanted.field else chunks


async def _with_prompt_ids(
    chunks: AsyncGenerator[dict[str, Any], None], obj: Any
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(chunks):
        async for out in chunks:
            out["prompt_token_ids"] = obj.sglang_topp_prompt_ids
            yield out


async def _with_sets(
    chunks: AsyncGenerator[dict[str, Any], None], self: Any, state: Any, sample: Sample
) -> AsyncGenerator[dict[str, Any], None]:
    """Write the sets, and answer every error with its own HTTP status.

    Before 0.5.23, SGLang answers some errors with a 200.
    """
    from fastapi import HTTPException

    wanted, is_stream = sample.wanted, getattr(state.obj, "stream", False)
    async with aclosing(chunks):
        async for out in chunks:
            meta_info = out["meta_info"]
            reason = meta_info.get("finish_reason")
            if meta_info.get(KEY) is not None:
                if sample.lacks_first:
                    assert sample.question is not None
                    sample.add_first_token(await sample.question)
                if problem := sample.check(None) or _add_routes_shape(self, state.obj, meta_info):
                    self.abort_request(state.obj.rid)
                    sample.cause = f"{wanted.field}: {problem}"
                    if is_stream:
                        raise CallEndedError(sample.cause, sample.status)
                    raise HTTPException(sample.status, sample.cause)
                _write_sets(self, out, state, sample)
            elif reason is None and not wanted.is_sent_at_end:
                # Drop a chunk in which a token has no set. Without sets, the chunk would look like an answer
                # to a request that asked for no sets. A later chunk of the answer reports the error.
                continue
            elif reason is not None:
                if reason.get("type") != "abort":
                    raise RuntimeError(
                        "SGLang answered a request for candidate sets without the hook that records them"
                    )
                sample.cause = reason.get("message") or "the engine sent none"
                if not is_stream and (status := reason.get("status_code")) is not None:
                    raise HTTPException(int(status), reason.get("message"))
            yield out


def _add_routes_shape(self: Any, obj: Any, meta_info: dict[str, Any]) -> str:
    """Add the shape of the routed experts to a finished answer. Return the problem if rows are missing.

    The rows are those of the positions from `routed_experts_start_len` on, without the last token's.
    """
    reason, num_tokens = meta_info["finish_reason"], meta_info[KEY][1]
    if not obj.return_routed_experts or reason is None:
        return ""
    rows = meta_info.get(_ROUTES)
    if rows is None:
        return f"SGLang sent no {_ROUTES}" if num_tokens or reason["type"] != "abort" else ""
    config = self.model_config.hf_text_config
    expected = max(meta_info["prompt_tokens"] + num_tokens - 1 - obj.routed_experts_start_len, 0)
    shape = [expected, config.num_hidden_layers, config.num_experts_per_tok]
    if 3 * len(rows) // 4 - rows.count("=") != 4 * math.prod(shape):
        return f"{_ROUTES}: got {len(rows)} base64 characters, expected those of int32 {shape}"
    meta_info[f"{_ROUTES}_shape"] = shape
    return ""


def _write_sets(self: Any, out: dict[str, Any], state: Any, sample: Sample) -> None:
    meta_info, obj, wanted = out["meta_info"], state.obj, sample.wanted
    start, stop = meta_info.pop(KEY)
    is_stream = getattr(obj, "stream", False) and not wanted.is_sent_at_end
    is_incremental = is_stream and _setting(self, "incremental_streaming_output")
    if not is_incremental:
        # Copy the chunk's lists up to the chunk's last token, because SGLang appends to the original lists
        # while the caller still uses the chunk.
        if "output_ids" in out:
            out["output_ids"] = out["output_ids"][:stop]
        for name in _PER_TOKEN:
            if isinstance(meta_info.get(name), list):
                meta_info[name] = meta_info[name][: max(stop, 1)]
    first = sample.sets.first
    positions = sample.sets.generated.positions(start - first, stop - first)
    if wanted.is_for_slime:
        slime_fields.write_nuclei(meta_info, positions)
    elif wanted.is_sent_at_end:
        sample.record = {
            "output_ids": state.output_ids[:stop],
            **_our_fields(self, state, sample, stop, positions),
        }
        sample.is_written = True
    else:
        meta_info.update(_our_fields(self, state, sample, stop, positions))
    if is_incremental:
        sample.forget(stop)


def _our_fields(self: Any, state: Any, sample: Sample, stop: int, generated: Positions) -> dict[str, Any]:
    """Return the fields of an answer with `stop` tokens, of which `generated` has the last ones."""
    obj, wanted, sets = state.obj, sample.wanted, sample.sets
    fields: dict[str, Any] = {SOURCE: SAMPLER if wanted.is_from_sampler else DISTRIBUTION}
    num_prompt = len(sets.prompt)
    if refused(Feature.WEIGHT_VERSIONS):
        fields["weight_versions"] = None
    elif stop or num_prompt:
        fields.update(sets.weight_versions(stop))
    sides: list[tuple[formats.Side, Positions]] = [("output", generated)]
    if num_prompt:
        sides.append(("input", sets.prompt.positions(0, num_prompt)))
    for side, positions in sides:
        if wanted.is_base64:
            fields |= formats.encode_top_p(side, positions.token_ids, positions.logprobs, positions.lengths)
        else:
            with_text = obj.return_text_in_logprobs and not _setting(self, "skip_tokenizer_init")
            fields |= _list_form(self, side, positions, with_text)
    return fields


def _sample(state: Any) -> Sample:
    found: Sample | None = getattr(state, _SAMPLE, None)
    if found is None:
        found = Sample(sets_request(state.obj))
        setattr(state, _SAMPLE, found)
    return found


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager._coalesce_streaming_chunks")
def merge_chunks(
    result: dict[str, Any], self: Any, out_list: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Keep all sets of merged chunks."""
    if "meta_info" in result:
        parts = [chunk["meta_info"] for chunk in out_list]
        result["meta_info"].update(formats.merge_stream_chunks(parts))
        # If the request's sets are sent at the end, only the last chunk has sets. So only the `meta_info` of
        # the last chunk has `KEY`.
        if any(KEY in part for part in parts[:-1]):
            if all(part.get(KEY) for part in parts):
                result["meta_info"][KEY] = [parts[0][KEY][0], parts[-1][KEY][1]]
            elif KEY in result["meta_info"]:
                result["meta_info"][KEY] = None
    return result


@around("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req")
def write_last_chunk(original: Callable[..., None], self: Any, recv_obj: Any) -> None:
    """Correct an aborted answer's last chunk.

    When SGLang retracts a running request, for example for a pause, the request goes back to the scheduler's
    queue. SGLang may already have streamed a part of the request's answer. If the request is aborted in the
    queue, SGLang sends a wrong last chunk. The wrong chunk has the text and the log-probs of the whole
    answer, but only the answer's last token id.

    With incremental chunks, all releases send the wrong chunk. Earlier chunks already contain the whole
    answer, so the hook removes the text, the token ids, and their log-probs from the last chunk. Without
    incremental chunks, only releases before 0.5.20 send the wrong chunk. In this case, the hook puts all
    token ids of the answer into the last chunk.
    """
    state = self.rid_to_state.get(recv_obj.rid)
    original(self, recv_obj)
    if state is None or not sets_request(state.obj).field:
        return
    if not getattr(state.obj, "stream", False):
        return
    out = state.out_list[-1]
    if _setting(self, "incremental_streaming_output"):
        from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

        out |= {"text": "", "output_ids": []}
        _slice_streaming_output_meta_info(out["meta_info"], len(state.output_ids))
    else:
        out["output_ids"] = list(state.output_ids)


def _setting(manager: Any, name: str) -> bool:
    """Return a setting of SGLang's `TokenizerManager`, which only its server arguments have before 0.5.16."""
    return bool(getattr(manager if hasattr(manager, name) else manager.server_args, name))


def _list_form(self: Any, side: formats.Side, positions: Positions, with_text: bool) -> dict[str, Any]:
    triples = iter(
        self.detokenize_logprob_tokens(positions.logprobs.tolist(), positions.token_ids.tolist(), with_text)
    )
    return {
        f"{side}_top_p_logprobs": [
            None if length < 0 else list(islice(triples, length)) for length in positions.lengths
        ]
    }


def _write_top_k(meta_info: dict[str, Any], state: Any, start: int) -> None:
    """Replace SGLang's lists of top-k log-probs with packed arrays.

    If the request asked for SGLang's own flat arrays (`return_flat_raw_top_logprobs`), the answer keeps those
    arrays.
    """
    sides: tuple[tuple[formats.Side, int], ...] = (("input", 0), ("output", start))
    for side, first in sides:
        if meta_info.pop(f"{side}_top_logprobs", None) is not None:
            values = getattr(state, f"{side}_top_logprobs_val")[first:]
            meta_info.update(
                formats.encode_top_k(side, values, getattr(state, f"{side}_top_logprobs_idx")[first:])
            )


def _fail(meta_info: dict[str, Any], message: str, sample: Sample) -> None:
    """Report the problem with which a sample ends."""
    reason, problem = meta_info["finish_reason"], sample.sets.problem
    assert problem is not None
    if not problem.is_refusal and reason.get("type") == "abort" and not sample.is_aborted:
        # The missing set is not the reason why the request was aborted, so report SGLang's reason.
        # If `reason` has no status, SGLang answers with 200, although sets are missing. So also report
        # `message`.
        if reason.get("status_code") is None:
            both = "; ".join(filter(None, (reason.get("message"), message)))
            meta_info["finish_reason"] = {**reason, "message": both}
        return
    meta_info["finish_reason"] = {
        "type": "abort",
        "message": message,
        "status_code": problem.status,
        # Python 3.13 calls a 413 "Content Too Large".
        "err_type": HTTPStatus(problem.status).phrase.replace(" ", "").replace("Content", "RequestEntity"),
    }
