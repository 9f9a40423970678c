"""Hook SGLang's tokenizer manager: put candidate sets from the scheduler into the answer's `meta_info`.

SGLang's `TokenizerManager._handle_batch_output` reads each message from the scheduler, and adds the new
tokens to the answers. Three hooks add the sets of these tokens, in this order:

1. `receive_sets` removes each request's new sets, a `SetBuffer`, from the scheduler's message. The hook runs
   before `_handle_batch_output`.
2. `write_meta_info` adds the new sets to the request's `ResponseAccumulator`, which keeps them until they are
   sent. The hook also records which token positions the next chunk of the answer
   contains. The hook runs inside `_handle_batch_output`, and also when SGLang aborts a queued request.
3. `write_sets` writes the sets of the recorded token positions into the chunk when SGLang sends the chunk. An
   answer that is not streamed is one chunk.

If a request asked for sets and a token in the answer has no set, the request ends with an error. The error
has the finish reason `abort`. Its status is 500, or the status with which the scheduler refused the request.
Without the error, the answer would look like an answer to a request that asked for no sets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from sglang_topp import formats
from sglang_topp_patches import disaggregation
from sglang_topp_patches.hooks import Seam, after, around, before
from sglang_topp_patches.http import slime_fields
from sglang_topp_patches.http.process_state import CallEndedError, HttpProcess
from sglang_topp_patches.http.response_accumulator import ResponseAccumulator
from sglang_topp_patches.http.route_policy import current_call
from sglang_topp_patches.memory import LIST_FORM_COST
from sglang_topp_patches.releases import Feature, internals, refused
from sglang_topp_patches.request import DISTRIBUTION, SAMPLER, SOURCE, sets_request
from sglang_topp_patches.set_buffer import KEY, SETS, Positions, Problem

__all__ = [
    "CALLED",
    "answer_with_status",
    "merge_chunks",
    "receive_sets",
    "write_last_chunk",
    "write_meta_info",
    "write_sets",
    "write_sets_of",
]

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

_ARRIVED = "_sglang_topp_arrived"
_ACCUMULATOR = "_sglang_topp_accumulator"
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
    info = internals().take_customized_info(recv_obj)
    parts = info.pop(KEY, None)
    if parts is not None:
        recv_obj.customized_info = info or None
    tokens = getattr(recv_obj, "output_ids", None) or [()] * len(recv_obj.rids)
    # A request without a buffer has an empty list, or None for each of its tokens.
    sent = [each[0] if each else None for each in parts or [()] * len(recv_obj.rids)]
    # The event loop handles one scheduler message at a time, so `_ARRIVED` holds only what that one brought.
    setattr(self, _ARRIVED, dict(zip(recv_obj.rids, zip(tokens, sent, strict=True), strict=True)))


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
    finished = meta_info["finish_reason"] is not None
    wanted = sets_request(state.obj)
    field, at_end = wanted.field, wanted.is_sent_at_end
    if at_end and finished and not field:
        meta_info[SETS] = None
    if not field and not wanted.is_base64:
        return
    stream = getattr(state.obj, "stream", False) and not at_end
    is_shown = stream or finished
    # An incremental chunk holds the token positions since the previous chunk. A chunk that is not incremental
    # holds all token positions so far.
    start = state.last_output_offset if stream and internals().streams_increments(self) else 0
    if wanted.is_base64 and top_logprobs_num and is_shown and not at_end:
        _write_top_k(meta_info, state, start)
    if not field:
        return

    accumulator = _accumulator(state)
    accumulator.add(*getattr(self, _ARRIVED, {}).pop(meta_info["id"], ((), None)))
    if accumulator.lacks_first and accumulator.question is None and accumulator.first_token_id is not None:
        asking = disaggregation.fetch_first_token(self.server_args, state, accumulator.first_token_id)
        accumulator.question = asyncio.create_task(asking)
    if accumulator.has_failed and not finished:
        accumulator.is_aborted = True
        self.abort_request(state.obj.rid)
    if not is_shown:
        return
    # If `top_logprobs_source` is "sampler", a prompt has no sets, because its tokens were not sampled. With
    # the default, "distribution", a prompt position needs a set if SGLang reports a log-prob for the
    # position. The accumulator counts generated tokens by their ids, because SGLang may report a log-prob
    # without a token if `max_new_tokens` is 0.
    num_prompt = 0 if wanted.is_from_sampler else disaggregation.num_scored_here(self.server_args, state)
    problem = accumulator.check(num_prompt)
    if finished:
        sets, token_id = accumulator.sets, accumulator.first_token_id
        if problem:
            sets.fail(Problem(problem))
        process.prefill_server.keep(self.server_args, state.obj, token_id, sets)
    if problem:
        if finished:
            _fail(meta_info, f"{field}: {problem}", accumulator)
        else:
            meta_info[KEY] = None  # `write_sets` drops a chunk whose `KEY` is None
        return
    meta_info[KEY] = [start, accumulator.num_tokens]


@around(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
    since="0.5.19",
    state=HttpProcess,
)
def write_sets(
    process: HttpProcess,
    original: Callable[..., AsyncGenerator[dict[str, Any], None]],
    self: Any,
    *,
    obj: Any,
    state: Any,
    request: Any = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Write the sets into each chunk that is sent.

    If a client reads more slowly than the engine generates, SGLang omits some chunks, and the next chunk
    covers the tokens of the omitted chunks. The hook writes sets only into the chunks that SGLang sends to
    the client.
    """
    chunks = original(self, obj=obj, state=state, request=request)
    if not sets_request(obj).field:
        return chunks
    return _with_sets(process, chunks, self, state)


@after(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
    since="0.5.19",
    until="0.5.23",
)
def answer_with_status(
    chunks: AsyncGenerator[dict[str, Any], None], self: Any, *, obj: Any, **kwargs: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """Set each error's HTTP status.

    Before 0.5.23, SGLang answers only some errors with their own HTTP status.
    """
    return _with_status(chunks, obj) if sets_request(obj).field else chunks


@around(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
    until="0.5.19",
    state=HttpProcess,
)
def write_sets_of(
    process: HttpProcess,
    original: Callable[..., AsyncGenerator[dict[str, Any], None]],
    self: Any,
    obj: Any,
    request: Any = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """Write sets and error statuses.

    This hook combines `write_sets` and `answer_with_status`.
    """
    chunks = original(self, obj, request)
    if not sets_request(obj).field:
        return chunks
    return _with_status(_with_sets(process, chunks, self, self.rid_to_state[obj.rid]), obj)


async def _with_status(
    chunks: AsyncGenerator[dict[str, Any], None], obj: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """Answer every error with its own HTTP status. Unpatched SGLang answers some errors with a 200."""
    from fastapi import HTTPException

    async with aclosing(chunks):
        try:
            async for out in chunks:
                reason = out["meta_info"].get("finish_reason") or {}
                status = reason.get("status_code") if reason.get("type") == "abort" else None
                if status is not None and not getattr(obj, "stream", False):
                    raise HTTPException(int(status), reason.get("message"))
                yield out
        except CallEndedError as error:
            if getattr(obj, "stream", False):
                raise
            raise HTTPException(error.status_code, str(error)) from error


async def _with_sets(
    process: HttpProcess, chunks: AsyncGenerator[dict[str, Any], None], self: Any, state: Any
) -> AsyncGenerator[dict[str, Any], None]:
    accumulator = _accumulator(state)
    abort = partial(self.abort_request, state.obj.rid)
    accumulator.attach(current_call.get(), process.in_flight)
    async with aclosing(chunks):
        async for out in chunks:
            meta_info = out["meta_info"]
            reason = meta_info.get("finish_reason")
            if meta_info.get(KEY) is not None:
                if accumulator.lacks_first:
                    assert accumulator.question is not None
                    accumulator.add_first_token(await accumulator.question)
                if problem := accumulator.check(None):
                    abort()
                    field = sets_request(state.obj).field
                    raise CallEndedError(f"{field}: {problem}", accumulator.status)
                _write_sets(self, out, state, accumulator)
            elif reason is None and not sets_request(state.obj).is_sent_at_end:
                # Drop a chunk in which a token has no set. Without sets, the chunk would look like an answer
                # to a request that asked for no sets. A later chunk of the answer reports the error.
                continue
            elif reason is not None and reason.get("type") != "abort":
                raise RuntimeError(
                    "SGLang answered a request for candidate sets without the hook that records them"
                )
            yield out


def _write_sets(self: Any, out: dict[str, Any], state: Any, accumulator: ResponseAccumulator) -> None:
    meta_info, obj, wanted = out["meta_info"], state.obj, sets_request(state.obj)
    start, stop = meta_info.pop(KEY)
    is_stream = getattr(obj, "stream", False) and not wanted.is_sent_at_end
    is_incremental = is_stream and internals().streams_increments(self)
    if not is_incremental:
        # Copy the chunk's lists up to the chunk's last token, because SGLang appends to the original lists
        # while the caller still uses the chunk.
        if "output_ids" in out:
            out["output_ids"] = out["output_ids"][:stop]
        for name in _PER_TOKEN:
            if isinstance(meta_info.get(name), list):
                meta_info[name] = meta_info[name][: max(stop, 1)]
    first = accumulator.sets.first
    positions = accumulator.sets.generated.positions(start - first, stop - first)
    if wanted.is_for_slime:
        slime_fields.write_nuclei(meta_info, positions)
    else:
        _write_our_fields(self, meta_info, state, accumulator, stop, positions)
    if is_incremental:
        accumulator.forget(stop)


def _write_our_fields(
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    accumulator: ResponseAccumulator,
    stop: int,
    generated: Positions,
) -> None:
    obj, wanted = state.obj, sets_request(state.obj)
    target = meta_info
    if wanted.is_sent_at_end:
        target = meta_info.setdefault(SETS, {"output_ids": state.output_ids[:stop]})
    target[SOURCE] = SAMPLER if wanted.is_from_sampler else DISTRIBUTION
    sets, num_prompt = accumulator.sets, len(accumulator.sets.prompt)
    if refused(Feature.WEIGHT_VERSIONS):
        target["weight_versions"] = None
    elif stop or num_prompt:
        target.update(sets.weight_versions(stop))
    sides: list[tuple[formats.Side, Positions]] = [("output", generated)]
    if num_prompt:
        sides.append(("input", sets.prompt.positions(0, num_prompt)))
    for side, positions in sides:
        if wanted.is_base64:
            fields = formats.encode_top_p(side, positions.token_ids, positions.logprobs, positions.lengths)
        else:
            with_text = obj.return_text_in_logprobs and not internals().skips_tokenizer(self)
            fields = _list_form(self, side, positions, with_text)
        target.update(fields)


def _accumulator(state: Any) -> ResponseAccumulator:
    cost = 1 if sets_request(state.obj).is_base64 else LIST_FORM_COST
    accumulator: ResponseAccumulator = state.__dict__.setdefault(_ACCUMULATOR, ResponseAccumulator(cost))
    return accumulator


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
    if internals().streams_increments(self):
        from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

        out |= {"text": "", "output_ids": []}
        _slice_streaming_output_meta_info(out["meta_info"], len(state.output_ids))
    else:
        out["output_ids"] = list(state.output_ids)


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


def _fail(meta_info: dict[str, Any], message: str, accumulator: ResponseAccumulator) -> None:
    reason, problem = meta_info.get("finish_reason") or {}, accumulator.sets.problem
    refusal = problem if problem is not None and problem.is_refusal else None
    if refusal is None and reason.get("type") == "abort" and not accumulator.is_aborted:
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
        "status_code": refusal.status if refusal else HTTPStatus.INTERNAL_SERVER_ERROR,
        "err_type": _error_type(refusal),
    }


def _error_type(refusal: Problem | None) -> str:
    if refusal is None:
        return "InternalServerError"
    return "ServiceUnavailable" if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE else "BudgetExceeded"
