"""Resume an interrupted answer, with the request field `resumed_tokens`.

If a request resumes an answer, the end of its prompt consists of tokens that an earlier request generated.
`resumed_tokens` is the number of tokens from the earlier request. If `resumed_tokens` is 0, the request
begins a new answer that a later request may resume. The answer's text and the search for stop strings begin
at the resumed tokens, as if nothing had interrupted the answer.

Three hooks correct the answer of an aborted request with `resumed_tokens`:

- `finish_or_abort` reports the aborted answer as finished if the last token completes the answer. Without
  this hook, SGLang reports a complete answer as aborted, and a caller tries to resume the complete answer.
- `send_all_tokens` sends all tokens of a request that was retracted and then aborted in the queue. Without
  this hook, the answer lacks the tokens that the scheduler had not sent to the HTTP process before the abort.
- `send_while_paused` sends the answer of a request that is aborted during an `in_place` pause. Without this
  hook, SGLang sends the answer only after the pause.

The answer repeats `resumed_tokens` in `meta_info`. The scheduler checks the sampling parameters again, after
SGLang has merged the server's defaults (`scheduler.requests`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_topp.engine_contract import RESUMED, find_resume_problem
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.hooks import Seam, after, around
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.releases import Feature, refused
from sglang_topp_patches.request import sets_request, without_fields

__all__ = [
    "CALLED",
    "begin_text",
    "check_fields",
    "finish_or_abort",
    "hold_back_stop_string",
    "note_in_meta_info",
    "send_all_tokens",
    "send_while_paused",
    "tail_str",
]

CALLED = (
    Seam(
        "sglang.srt.managers.schedule_batch.FINISH_ABORT",
        "Tell why a request was aborted.",
        keywords=("status_code",),
        since="0.5.23",
    ),
    Seam(
        "sglang.srt.managers.scheduler.Scheduler.collect_inflight_reqs",
        "Find the running requests that are aborted during an `in_place` pause.",
        since="0.5.23",
    ),
)


def check_fields(process: HttpProcess, field: Callable[[str], Any], num_prompts: int) -> list[int | None]:
    """Check `resumed_tokens`, and return its value for each prompt, or None for a prompt without the field.

    Args:
        process: the state of this HTTP process.
        field: a function that takes the name of a request field, and returns the field's value. The function
            returns the value that the caller sent, not SGLang's normalized value. If the caller did not send
            the field, the function returns None.
        num_prompts: the number of prompts.

    Raises:
        InvalidInputError: a value is invalid. The error message names the field, the value, and the expected
            values.
    """
    given = field(RESUMED)
    counts = given if isinstance(given, list) else [given] * num_prompts
    if len(counts) != num_prompts:
        raise InvalidInputError(
            f"{RESUMED}: got {len(counts)} values for {num_prompts} prompts, expected one per prompt"
        )
    if all(count is None for count in counts):
        return counts
    for count in counts:
        if count is not None and (type(count) is not int or count < 0):
            raise InvalidInputError(
                f"{RESUMED}: got {count!r}, expected a whole number of 0 or more, or null"
            )
    if problems := (*filter(None, [refused(Feature.RESUMED)]), *process.problems()):
        raise InvalidInputError(f"{RESUMED}: answers are not resumed here: {'; '.join(problems)}")
    ids, params = field("input_ids"), field("sampling_params")
    is_many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = ids if is_many else [ids]
    for i, count in enumerate(counts):
        if not count:
            continue
        each = params[i] if isinstance(params, list) and i < len(params) else params
        if isinstance(each, Mapping) and (problem := find_resume_problem(without_fields(each))):
            raise InvalidInputError(f"sampling_params.{problem}")
        prompt = prompts[i] if i < len(prompts) and isinstance(prompts[i], list) else []
        if count > len(prompt):
            raise InvalidInputError(
                f"{RESUMED}: got {count} with a prompt of {len(prompt) or 'no'} token ids; expected input_ids"
                " that end with the tokens to continue from"
            )
        # With --allow-auto-truncate, SGLang cuts the resumed tokens off, and the answer would repeat them.
        if process.model and len(prompt) > process.model.model.context_length:
            raise InvalidInputError(
                f"{RESUMED}: got {count} with a prompt of {len(prompt)} token ids, expected at most"
                f" {process.model.model.context_length}, the context length"
            )
    return counts


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager.add_logprob_to_meta_info")
def note_in_meta_info(
    result: None, self: Any, meta_info: dict[str, Any], state: Any, *_: Any, **__: Any
) -> None:
    """Repeat `resumed_tokens` in the answer."""
    if (count := sets_request(state.obj).resumed_tokens) is not None:
        meta_info[RESUMED] = count


# -- in the scheduler ---------------------------------------------------------------------------------


@around("sglang.srt.managers.schedule_batch.Req.update_finish_state", since="0.5.23")
def finish_or_abort(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Report a complete answer as finished, not as aborted."""
    abort, resumed_tokens = self.to_finish, sets_request(self).resumed_tokens
    if abort is None or self.finished() or resumed_tokens is None or not _is_requested(abort):
        original(self, *args, **kwargs)
        return
    self.to_finish = None
    original(self, *args, **kwargs)
    if not self.finished():
        self.finished_reason = abort


def _is_requested(reason: Any) -> bool:
    """Return whether a caller requested the abort. An abort by SGLang itself has a `status_code`."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(reason, FINISH_ABORT) and reason.status_code is None


@around("sglang.srt.managers.scheduler.Scheduler.send_abort_output", since="0.5.23")
def send_all_tokens(original: Callable[..., None], self: Any, abort_req: Any, req: Any) -> None:
    """Also send the tokens of an aborted request.

    SGLang calls `send_abort_output`, for example, if a request is aborted in the waiting queue. The hooked
    function itself sends no tokens. A request in the waiting queue has tokens if SGLang retracted the
    request, that is, stopped the request and put it back into the queue.
    """
    if sets_request(req).resumed_tokens is None or not len(req.output_ids) or abort_req.finished_reason:
        original(self, abort_req, req)
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT()
    self.output_streamer.stream_output([req], req.return_logprob)


@after("sglang.srt.managers.scheduler.Scheduler.abort_request", since="0.5.23")
def send_while_paused(result: None, self: Any, recv_req: Any) -> None:
    """Answer aborted requests during an `in_place` pause.

    SGLang ends an aborted request and frees its KV cache in the next forward pass, which runs only after the
    pause. `send_while_paused` sends the aborted request's answer during the pause. The next forward pass does
    not send the same answer again, because `stream_output` has set the request's `finished_output`.
    """
    if not self._engine_paused:
        return
    for req in self.collect_inflight_reqs():
        abort = req.to_finish
        if not _is_requested(abort) or req.finished() or req.finished_output:
            continue
        if sets_request(req).resumed_tokens is None or not len(req.output_ids):
            continue
        req.finished_reason = abort
        self.output_streamer.stream_output([req], req.return_logprob)
        req.finished_reason = req.finished_len = None


@around("sglang.srt.managers.schedule_batch.Req.tail_str", since="0.5.23")
def tail_str(original: Callable[..., str], self: Any, new_accepted_len: int = 1) -> str:
    """Also search the resumed tokens for stop strings."""
    params, count = self.sampling_params, sets_request(self).resumed_tokens
    if not count or not (params.stop_strs or params.stop_regex_strs):
        return original(self, new_accepted_len)
    # To find a stop string, SGLang searches at most the last `num_tokens` tokens of the answer.
    num_tokens = max(params.stop_str_max_len, params.stop_regex_max_len) + 1 + max(new_accepted_len - 1, 0)
    missing = min(num_tokens - len(self.output_ids), count)
    if missing <= 0:
        return original(self, new_accepted_len)
    ids = [*self.origin_input_ids_unpadded[-missing:], *self.output_ids]
    text: str = self.tokenizer.decode(ids)
    return text


@around("sglang.srt.managers.schedule_batch.Req.check_match_stop_str_prefix", since="0.5.23")
def hold_back_stop_string(original: Callable[[Any], bool], self: Any) -> bool:
    """Return whether the text may end inside a stop string.

    If the last token ends in the middle of a character, the text ends with U+FFFD. Without this hook, SGLang
    overlooks that the text before U+FFFD may be the start of a stop string, and sends the text. The next
    token may complete the character and the stop string, but SGLang cannot withdraw text that it has sent.
    """
    if original(self):
        return True
    if not self.sampling_params.stop_strs or sets_request(self).resumed_tokens is None:
        return False
    text = self.tail_str()
    whole = text.rstrip("\ufffd")
    return whole != text and any(
        whole.endswith(stop[:length])
        for stop in self.sampling_params.stop_strs
        for length in range(1, len(stop))
    )


@around("sglang.srt.managers.schedule_batch.Req.init_incremental_detokenize", since="0.5.23")
def begin_text(original: Callable[[Any], tuple[Any, int]], self: Any) -> tuple[Any, int]:
    """Decode the resumed tokens again.

    With this hook, the answer's text includes the text of the resumed tokens. The interruption may have split
    a character between two tokens, so SGLang decodes the new tokens together with the resumed tokens.
    """
    is_first = self.surr_offset is None or self.read_offset is None
    decode_ids, offset = original(self)
    if not is_first or not (count := sets_request(self).resumed_tokens):
        return decode_ids, offset
    from sglang.srt.managers.schedule_batch import INIT_INCREMENTAL_DETOKENIZATION_OFFSET

    self.read_offset -= count
    self.surr_offset = max(self.read_offset - INIT_INCREMENTAL_DETOKENIZATION_OFFSET, 0)
    prompt = self.origin_input_ids_unpadded
    self.surr_and_decode_ids = prompt[self.surr_offset :] + self.output_ids_through_stop
    return self.surr_and_decode_ids, self.read_offset - self.surr_offset
