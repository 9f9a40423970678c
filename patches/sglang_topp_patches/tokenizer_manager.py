"""The response side, in the HTTP process: entries from the scheduler -> fields of `meta_info`.

`_handle_batch_output` delivers the scheduler's entries. `add_logprob_to_meta_info` runs within it for
every request, and on its own for one that is aborted while it waits. It notes which positions a chunk
shows; `_stream_one_response`, which sends it, has their sets written. A request that asked for sets and
did not get one for each visible token ends as an error (finish reason `abort`, status 500): it never
looks like an answer without the feature.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from sglang_topp import wire
from sglang_topp_patches import disaggregation
from sglang_topp_patches.budget import LIST_FORM_COST
from sglang_topp_patches.payload import (
    AT_END,
    BASE64,
    DISTRIBUTION,
    KEY,
    PROMPT_KEY,
    SAMPLER,
    SETS,
    SOURCE,
    Entry,
    Positions,
    asking_field,
    from_sampler,
    join,
)
from sglang_topp_patches.received import EndedError, Received
from sglang_topp_patches.releases import Feature, internals, refused
from sglang_topp_patches.routes import current_call

__all__ = [
    "answer_with_status",
    "merge_chunks",
    "receive_entries",
    "write_last_chunk",
    "write_meta_info",
    "write_sets",
    "write_sets_of",
]

_ARRIVED = "_sglang_topp_arrived"
_RECEIVED = "_sglang_topp_received"


def receive_entries(self: Any, recv_obj: Any) -> None:
    """BEFORE hook on `TokenizerManager._handle_batch_output`: take our keys out of the batch.

    What stays is what SGLang would have received without us.
    """
    nothing: list[tuple[()]] = [()] * len(recv_obj.rids)
    info = internals().take_customized_info(recv_obj)
    entries, prompt_rows = info.pop(KEY, nothing), info.pop(PROMPT_KEY, nothing)
    if entries is not nothing or prompt_rows is not nothing:
        recv_obj.customized_info = info or None
    ours = zip(getattr(recv_obj, "output_ids", nothing), entries, prompt_rows, strict=True)
    # One loop handles one batch at a time.
    setattr(self, _ARRIVED, dict(zip(recv_obj.rids, ours, strict=True)))


def write_meta_info(
    result: None,
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    top_logprobs_num: int,
    token_ids_logprob: Any,
    return_text_in_logprobs: bool,
    **kwargs: Any,
) -> None:
    """AFTER hook on `TokenizerManager.add_logprob_to_meta_info`."""
    finished = meta_info["finish_reason"] is not None
    get = vars(state.obj).get
    field, base64 = asking_field(get), get(BASE64)
    at_end = get(AT_END, False)
    if at_end and finished and not field:
        meta_info[SETS] = None
    if not field and not base64:
        return
    stream = getattr(state.obj, "stream", False) and not at_end
    shown = stream or finished
    # An incremental chunk holds the positions since the last one; everything else is cumulative.
    start = state.last_output_offset if stream and internals().streams_increments(self) else 0
    if base64 and top_logprobs_num and shown and not at_end:
        _write_top_k(meta_info, state, start)
    if not field:
        return

    received = _received(state)
    received.add(*getattr(self, _ARRIVED, {}).pop(meta_info["id"], ((), (), ())))
    if received.refusal is not None and not finished:
        self.abort_request(state.obj.rid)
    if not shown:
        return
    # Visible tokens are counted, not log-probs: SGLang may report that of a token which `max_new_tokens` 0
    # keeps from being one.
    # Nobody drew a prompt's tokens.
    num_prompt = 0 if from_sampler(get) else disaggregation.num_scored(state)
    problem = received.check(num_prompt)
    if finished:
        disaggregation.keep(state, received, problem)
    if problem:
        if finished:
            _fail(meta_info, f"{field}: {problem}", received.refusal)
        else:
            meta_info[KEY] = None  # not to be shown
        return
    meta_info[KEY] = [start, received.num_tokens]


def write_sets(
    original: Callable[..., AsyncGenerator[dict[str, Any], None]],
    self: Any,
    *,
    obj: Any,
    state: Any,
    request: Any = None,
) -> AsyncGenerator[dict[str, Any], None]:
    """AROUND hook on `TokenizerManager._stream_one_response`: sets are written into what is sent, as it is.

    A reader that is slower than the engine is sent some of the chunks only: the others cost nothing.
    """
    chunks = original(self, obj=obj, state=state, request=request)
    if not asking_field(vars(obj).get):
        return chunks
    return _with_sets(chunks, self, state)


def answer_with_status(
    chunks: AsyncGenerator[dict[str, Any], None], self: Any, *, obj: Any, **kwargs: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """AFTER hook on `TokenizerManager._stream_one_response` where SGLang answers with but a few statuses: an
    error of ours has its own."""
    return _with_status(chunks, obj) if asking_field(vars(obj).get) else chunks


def write_sets_of(
    original: Callable[..., AsyncGenerator[dict[str, Any], None]], self: Any, obj: Any, request: Any = None
) -> AsyncGenerator[dict[str, Any], None]:
    """AROUND hook on `TokenizerManager._wait_one_response`: the same before 0.5.19."""
    chunks = original(self, obj, request)
    if not asking_field(vars(obj).get):
        return chunks
    return _with_status(_with_sets(chunks, self, self.rid_to_state[obj.rid]), obj)


async def _with_status(
    chunks: AsyncGenerator[dict[str, Any], None], obj: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """SGLang answers some errors with a status of its own, and others with a 200: every one has its own."""
    from fastapi import HTTPException

    async with aclosing(chunks):
        try:
            async for out in chunks:
                reason = out["meta_info"].get("finish_reason") or {}
                status = reason.get("status_code") if reason.get("type") == "abort" else None
                if status is not None and not getattr(obj, "stream", False):
                    raise HTTPException(int(status), reason.get("message"))
                yield out
        except EndedError as error:
            if getattr(obj, "stream", False):
                raise
            raise HTTPException(error.status_code, str(error)) from error


async def _with_sets(
    chunks: AsyncGenerator[dict[str, Any], None], self: Any, state: Any
) -> AsyncGenerator[dict[str, Any], None]:
    received = _received(state)
    abort = partial(self.abort_request, state.obj.rid)
    received.belongs_to(current_call.get(), abort)
    async with aclosing(chunks), disaggregation.asking(state.obj) as first:
        async for out in chunks:
            received.check_call()
            meta_info = out["meta_info"]
            reason = meta_info.get("finish_reason")
            if meta_info.get(KEY) is not None:
                if received.lacks_first:
                    await disaggregation.take(first, state, received)
                    received.check_call()
                if problem := received.check(None):
                    abort()
                    raise EndedError(f"{asking_field(vars(state.obj).get)}: {problem}", received.status)
                _write_sets(self, out, state, received)
            elif reason is None and not getattr(state.obj, AT_END, False):
                # Tokens without their sets look like an answer without the feature. The error is to come.
                continue
            elif reason is not None and reason.get("type") != "abort":
                raise RuntimeError(
                    "SGLang made an answer to a request for candidate sets without noting them"
                )
            yield out


def _write_sets(self: Any, out: dict[str, Any], state: Any, received: Received) -> None:
    meta_info, obj = out["meta_info"], state.obj
    start, stop = meta_info.pop(KEY)
    at_end = getattr(obj, AT_END, False)
    incremental = getattr(obj, "stream", False) and internals().streams_increments(self) and not at_end
    if not incremental:
        # SGLang goes on writing into these lists until the chunk is sent.
        if "output_ids" in out:
            out["output_ids"] = out["output_ids"][:stop]
        meta_info["output_token_logprobs"] = meta_info["output_token_logprobs"][: max(stop, 1)]
    target = meta_info.setdefault(SETS, {"output_ids": state.output_ids[:stop]}) if at_end else meta_info
    target[SOURCE] = SAMPLER if from_sampler(vars(obj).get) else DISTRIBUTION
    if (stop or received.prompt) and not refused(Feature.WEIGHT_VERSIONS):
        target.update(received.versions.meta_info(stop))
    sides: list[tuple[wire.Side, Positions]] = [("output", join(islice(received.generated, start, stop)))]
    if received.prompt:
        sides.append(("input", join(received.prompt)))
    for side, positions in sides:
        if getattr(obj, BASE64, False):
            fields = wire.encode_sets(side, positions.token_ids, positions.logprobs, positions.lengths)
        else:
            with_text = obj.return_text_in_logprobs and not internals().skips_tokenizer(self)
            fields = _list_form(self, side, positions, with_text)
        target.update(fields)
    if incremental:
        received.forget(start, stop)


def _received(state: Any) -> Received:
    cost = 1 if getattr(state.obj, BASE64, False) else LIST_FORM_COST
    received: Received = state.__dict__.setdefault(_RECEIVED, Received(cost))
    return received


def merge_chunks(
    result: dict[str, Any], self: Any, out_list: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """AFTER hook on `TokenizerManager._coalesce_streaming_chunks`: merged chunks keep all their sets."""
    if "meta_info" in result:
        parts = [chunk["meta_info"] for chunk in out_list]
        result["meta_info"].update(wire.merge_output_fields(parts))
        # Sets that are written at the end are in the last chunk alone.
        if any(KEY in part for part in parts[:-1]):
            if all(part.get(KEY) for part in parts):
                result["meta_info"][KEY] = [parts[0][KEY][0], parts[-1][KEY][1]]
            elif KEY in result["meta_info"]:
                result["meta_info"][KEY] = None
    return result


def write_last_chunk(original: Callable[..., None], self: Any, recv_obj: Any) -> None:
    """AROUND hook on `TokenizerManager._handle_abort_req`, which ends a request that waits.

    One that a pause made wait again may have been streamed in part. SGLang's last chunk then has all of the
    text and of the log-probs, with the last token alone (before 0.5.20 or where chunks hold only what is
    new). Now it has all tokens, or where chunks hold only what is new, nothing.
    """
    state = self.rid_to_state.get(recv_obj.rid)
    original(self, recv_obj)
    if state is None or not asking_field(vars(state.obj).get):
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


def _list_form(self: Any, side: wire.Side, positions: Positions, with_text: bool) -> dict[str, Any]:
    triples = iter(
        self.detokenize_logprob_tokens(positions.logprobs.tolist(), positions.token_ids.tolist(), with_text)
    )
    return {
        f"{side}_top_p_logprobs": [
            None if length < 0 else list(islice(triples, length)) for length in positions.lengths
        ]
    }


def _write_top_k(meta_info: dict[str, Any], state: Any, start: int) -> None:
    """SGLang's fixed-k lists become arrays; its own flat form, where asked for, stays."""
    sides: tuple[tuple[wire.Side, int], ...] = (("input", 0), ("output", start))
    for side, first in sides:
        if meta_info.pop(f"{side}_top_logprobs", None) is not None:
            values = getattr(state, f"{side}_top_logprobs_val")[first:]
            meta_info.update(
                wire.encode_top_k(side, values, getattr(state, f"{side}_top_logprobs_idx")[first:])
            )


def _fail(meta_info: dict[str, Any], message: str, refusal: Entry | None) -> None:
    reason = meta_info.get("finish_reason") or {}
    if refusal is None and reason.get("type") == "abort":  # an error already, and its own cause comes first
        if reason.get("status_code") is None:  # it may show tokens
            both = "; ".join(filter(None, (reason.get("message"), message)))
            meta_info["finish_reason"] = {**reason, "message": both}
        return
    meta_info["finish_reason"] = {
        "type": "abort",
        "message": message,
        "status_code": refusal.status if refusal else HTTPStatus.INTERNAL_SERVER_ERROR,
        "err_type": _error_type(refusal),
    }


def _error_type(refusal: Entry | None) -> str:
    if refusal is None:
        return "InternalServerError"
    return "WeightsChanged" if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE else "BudgetExceeded"
