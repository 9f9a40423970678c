"""Answers that go on with what another request began: the field `resumed_tokens`, and what SGLang does of it.

The field says how many of the last prompt tokens begin the answer; 0 says that none do, and that the answer
may itself be resumed later. SGLang looks for stop strings, and makes the text, from them on, as it would have
done without it. And what an abort leaves behind is whole:

- the token that was drawn when the abort came is looked at first: where it ends the answer, the answer has
  ended. SGLang itself calls it aborted, and nobody could tell that nothing may follow;
- a request that was retracted, and waits, is sent with all of its tokens, not with those that it had
  streamed.

The field reaches the scheduler inside `sampling_params.custom_params`, and is repeated in `meta_info`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_topp.errors import InvalidInputError
from sglang_topp.resumable import RESUMED, cut_problem
from sglang_topp_patches import mode
from sglang_topp_patches.payload import FIELDS, KEY, custom_params
from sglang_topp_patches.releases import Feature, refused
from sglang_topp_patches.seams import status

__all__ = [
    "begin_text",
    "check_fields",
    "finish_or_abort",
    "note_in_meta_info",
    "send_what_is_there",
    "spread",
    "tail_str",
]


def check_fields(field: Callable[[str], Any], num_prompts: int) -> list[int | None]:
    """The field of each prompt of one request, None where it is not given.

    Args:
        field: looks one of the request's fields up, as it came; None where it is not there.
        num_prompts: the number of prompts.

    Raises:
        InvalidInputError: a sentence naming the field, what it got and what it takes.
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
    if problems := tuple(filter(None, (*status().problems, refused(Feature.RESUMED), *mode.refusals()))):
        raise InvalidInputError(f"{RESUMED}: answers are not resumed here: {'; '.join(problems)}")
    if any(counts):
        _check_prompts(field, counts)
    return counts


def _check_prompts(field: Callable[[str], Any], counts: Sequence[int | None]) -> None:
    ids = field("input_ids")
    is_many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = ids if is_many else [ids]
    params = field("sampling_params")
    for i, count in enumerate(counts):
        if not count:
            continue
        prompt = prompts[i] if i < len(prompts) else None
        if not isinstance(prompt, list) or count > len(prompt):
            got = f"{len(prompt)} token ids" if isinstance(prompt, list) else "no token ids"
            raise InvalidInputError(
                f"{RESUMED}: got {count} with a prompt of {got}; expected input_ids that end with the tokens"
                " to go on from"
            )
        each = params[i] if isinstance(params, list) and i < len(params) else params
        if isinstance(each, Mapping) and (problem := cut_problem(_without_ours(each))):
            raise InvalidInputError(f"sampling_params.{problem}")


def _without_ours(params: Mapping[str, Any]) -> dict[str, Any]:
    custom = params.get("custom_params")
    if isinstance(custom, Mapping):
        custom = {name: value for name, value in custom.items() if name not in (*FIELDS, KEY, RESUMED)}
    return {**params, "custom_params": custom}


def spread(self: Any, field: Callable[[str], Any]) -> None:
    """Hand the field of a request that SGLang has laid out on to the scheduler.

    Args:
        self: the `GenerateReqInput`.
        field: looks up what was given before.

    Raises:
        InvalidInputError: as `check_fields`.
    """
    if field(RESUMED) is None:
        return
    counts = check_fields(field, self.batch_size)
    if self.is_single:
        setattr(self, RESUMED, counts[0])
        self.sampling_params = _to_scheduler(self.sampling_params, counts[0])
        return
    # With n > 1 SGLang repeats the whole list of prompts.
    repeated = [counts[i % self.batch_size] for i in range(len(self.sampling_params))]
    setattr(self, RESUMED, repeated)
    self.sampling_params = [
        _to_scheduler(params, count) for params, count in zip(self.sampling_params, repeated, strict=True)
    ]


def _to_scheduler(params: Mapping[str, Any], count: int | None) -> Mapping[str, Any]:
    if count is None:
        return params
    custom = params.get("custom_params") or {}
    if not isinstance(custom, Mapping):
        raise InvalidInputError(f"sampling_params.custom_params: got {custom!r}, expected an object")
    return {**params, "custom_params": {**custom, RESUMED: count}}


def note_in_meta_info(
    result: None, self: Any, meta_info: dict[str, Any], state: Any, *_: Any, **__: Any
) -> None:
    """AFTER hook on `TokenizerManager.add_logprob_to_meta_info`: who asked sees that it was heard."""
    if (count := vars(state.obj).get(RESUMED)) is not None:
        meta_info[RESUMED] = count


# -- in the scheduler ---------------------------------------------------------------------------------


def _num_resumed(req: Any) -> int | None:
    """The field of one request of the scheduler's; None where it is not given. Whatever came past the checks
    is no more than its prompt."""
    count = custom_params(req).get(RESUMED)
    if type(count) is not int or count < 0:
        return None
    return min(count, len(req.origin_input_ids_unpadded))


def finish_or_abort(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook on `Req.update_finish_state`: a token that ends the answer ends it, aborted or not."""
    abort = self.to_finish
    if abort is None or self.finished() or _num_resumed(self) is None or not _is_order(abort):
        original(self, *args, **kwargs)
        return
    self.to_finish = None
    original(self, *args, **kwargs)
    if not self.finished():
        self.finished_reason = abort


def _is_order(reason: Any) -> bool:
    """Whether somebody asked for the abort: a refusal has a status."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(reason, FINISH_ABORT) and reason.status_code is None


def send_what_is_there(original: Callable[..., None], self: Any, abort_req: Any, req: Any) -> None:
    """AROUND hook on `Scheduler.send_abort_output`, which ends a request that waits."""
    if _num_resumed(req) is None or not len(req.output_ids) or abort_req.finished_reason:
        original(self, abort_req, req)
        return
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.finished_reason = FINISH_ABORT()
    self.output_streamer.stream_output([req], req.return_logprob)


def tail_str(original: Callable[..., str], self: Any, new_accepted_len: int = 1) -> str:
    """AROUND hook on `Req.tail_str`: the text in which stop strings are looked for begins before the cut."""
    params = self.sampling_params
    if (not params.stop_strs and not params.stop_regex_strs) or not (count := _num_resumed(self)):
        return original(self, new_accepted_len)
    # As many tokens as SGLang takes where it has them.
    num_tokens = max(params.stop_str_max_len, params.stop_regex_max_len) + 1 + max(new_accepted_len - 1, 0)
    missing = min(num_tokens - len(self.output_ids), count)
    if missing <= 0:
        return original(self, new_accepted_len)
    ids = [*self.origin_input_ids_unpadded[-missing:], *self.output_ids]
    text: str = self.tokenizer.decode(ids)
    return text


def begin_text(original: Callable[[Any], tuple[Any, int]], self: Any) -> tuple[Any, int]:
    """AROUND hook on `Req.init_incremental_detokenize`: the answer's text begins before the cut, where a
    character may have been cut in two."""
    is_first = self.surr_offset is None or self.read_offset is None
    decode_ids, offset = original(self)
    if not is_first or not (count := _num_resumed(self)):
        return decode_ids, offset
    from sglang.srt.managers.schedule_batch import INIT_INCREMENTAL_DETOKENIZATION_OFFSET

    self.read_offset -= count
    self.surr_offset = max(self.read_offset - INIT_INCREMENTAL_DETOKENIZATION_OFFSET, 0)
    prompt = self.origin_input_ids_unpadded
    self.surr_and_decode_ids = prompt[self.surr_offset :] + self.output_ids_through_stop
    return self.surr_and_decode_ids, self.read_offset - self.surr_offset
