"""Resume an interrupted answer, with the request field `resumed_tokens`, in the scheduler.

If a request resumes an answer, the end of its prompt consists of tokens that an earlier request generated.
`resumed_tokens` is their number. If it is 0, the request begins a new answer that a later request may resume.
The answer's text and the search for stop strings begin at the resumed tokens, as if nothing had interrupted
the answer: such a request becomes a `ResumableReq`.

Two hooks correct the answer of an aborted request with `resumed_tokens`:

- `send_all_tokens` sends all tokens of a request that was retracted and then aborted in the queue. Without
  this hook, the answer lacks the tokens that the scheduler had not sent to the HTTP process before the abort.
- `send_while_paused` sends the answer of a request that is aborted during an `in_place` pause. Without this
  hook, SGLang sends the answer only after the pause.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from sglang_topp_patches.hooks import Seam, after, around
from sglang_topp_patches.request import sets_request

_REQ = "sglang.srt.managers.schedule_batch.Req"
CALLED = (
    Seam(
        f"{_REQ}.update_finish_state", "Report a complete answer as finished, not as aborted.", since="0.5.23"
    ),
    Seam(f"{_REQ}.tail_str", "Also search the resumed tokens.", ("new_accepted_len",), since="0.5.23"),
    Seam(f"{_REQ}.check_match_stop_str_prefix", "Hold back the start of a stop string.", since="0.5.23"),
    Seam(f"{_REQ}.init_incremental_detokenize", "Decode the resumed tokens again.", since="0.5.23"),
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


@cache
def resumable_req() -> type[Any]:
    """Return the class of a request with `resumed_tokens`, which derives from SGLang's `Req`."""
    from sglang.srt.managers.schedule_batch import Req

    class ResumableReq(Req):  # type: ignore[misc]  # SGLang ships no types
        """A request that resumes an answer, or that a later one may resume."""

        to_finish: Any
        surr_offset: Any

        def update_finish_state(self, *args: Any, **kwargs: Any) -> None:
            """Report a complete answer as finished, not as aborted.

            Otherwise, a caller would try to resume an answer that is complete.
            """
            abort = self.to_finish
            if abort is None or self.finished() or not _is_requested(abort):
                super().update_finish_state(*args, **kwargs)
                return
            self.to_finish = None
            super().update_finish_state(*args, **kwargs)
            if not self.finished():
                self.finished_reason = abort

        def tail_str(self, new_accepted_len: int = 1) -> str:
            """Also search the resumed tokens for stop strings."""
            params, count = self.sampling_params, sets_request(self).resumed_tokens
            text: str = super().tail_str(new_accepted_len)
            if not count or not (params.stop_strs or params.stop_regex_strs):
                return text
            # SGLang searches at most the last `num_tokens` tokens of the answer.
            num_tokens = max(params.stop_str_max_len, params.stop_regex_max_len) + max(new_accepted_len, 1)
            missing = min(num_tokens - len(self.output_ids), count)
            if missing > 0:
                text = self.tokenizer.decode([*self.origin_input_ids_unpadded[-missing:], *self.output_ids])
            return text

        def check_match_stop_str_prefix(self) -> bool:
            """Return whether the text may end inside a stop string.

            If the last token ends in the middle of a character, the text ends with U+FFFD. SGLang overlooks
            that the text before it may be the start of a stop string, and sends the text. The next token may
            complete the character and the stop string, but SGLang cannot withdraw text that it has sent.
            """
            if super().check_match_stop_str_prefix():
                return True
            stops = self.sampling_params.stop_strs
            if not stops:
                return False
            text = self.tail_str()
            whole = text.rstrip("\ufffd")
            starts = tuple(stop[:length] for stop in stops for length in range(1, len(stop)))
            return whole != text and whole.endswith(starts)

        def init_incremental_detokenize(self) -> tuple[Any, int]:
            """Decode the resumed tokens again, so that the answer's text includes theirs.

            The interruption may have split a character between two tokens, so SGLang decodes the new tokens
            together with the resumed tokens.
            """
            is_first = self.surr_offset is None or self.read_offset is None
            decode_ids, offset = super().init_incremental_detokenize()
            if not is_first or not (count := sets_request(self).resumed_tokens):
                return decode_ids, offset
            self.read_offset -= count
            self.surr_offset = max(self.surr_offset - count, 0)
            prompt = self.origin_input_ids_unpadded
            self.surr_and_decode_ids = prompt[self.surr_offset :] + self.output_ids_through_stop
            return self.surr_and_decode_ids, self.read_offset - self.surr_offset

    return ResumableReq


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
        self.batch_result_processor._maybe_collect_routed_experts(req)
        self.output_streamer.stream_output([req], req.return_logprob)
        req.finished_reason = req.finished_len = None
