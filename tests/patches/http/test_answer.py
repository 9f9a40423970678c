"""The last chunk of a request that is aborted while it waits, and the status of an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager

from sglang_topp_patches.http.answer import write_last_chunk, write_sets
from sglang_topp_patches.http.request_fields import send_to_scheduler
from sglang_topp_patches.request import NOTHING, SetsRequest
from tests.patches.make_http_process import http_process


def make_manager() -> Any:
    """Make the part of SGLang's manager that the method uses. Its request has streamed two tokens."""
    obj = SimpleNamespace(
        stream=True,
        return_logprob=True,
        top_logprobs_num=1,
        token_ids_logprob=None,
        return_text_in_logprobs=False,
        return_flat_raw_top_logprobs=False,
        return_flat_raw_output_top_logprobs=False,
        sglang_topp_request=SetsRequest(threshold=0.9),
    )
    clock = SimpleNamespace(set_finished_time=lambda: None, get_e2e_latency=lambda: 0.5)
    state = ReqState(
        [], False, asyncio.Event(), obj, clock, last_output_offset=2, text="ab", output_ids=[5, 6]
    )
    state.output_token_logprobs_val, state.output_token_logprobs_idx = [-0.5, -0.25], [5, 6]
    state.output_top_logprobs_val, state.output_top_logprobs_idx = [[-0.5], [-0.25]], [[5], [6]]
    manager = SimpleNamespace(
        rid_to_state={"a": state},
        incremental_streaming_output=True,
        server_args=SimpleNamespace(incremental_streaming_output=True, weight_version="default"),
        config_value=lambda name: "default",
        _release_lora_once=lambda state: None,
    )
    for name in ("add_logprob_to_meta_info", "detokenize_logprob_tokens", "detokenize_top_logprobs_tokens"):
        setattr(manager, name, partial(getattr(TokenizerManager, name), manager))
    manager.state = state
    return manager


def test_what_was_streamed_is_not_repeated() -> None:
    manager = make_manager()
    write_last_chunk(TokenizerManager._handle_abort_req, manager, AbortReq(rid="a"))
    (chunk,) = manager.state.out_list
    assert (chunk["text"], chunk["output_ids"]) == ("", [])
    assert chunk["meta_info"]["output_token_logprobs"] == chunk["meta_info"]["output_top_logprobs"] == []
    assert chunk["meta_info"]["completion_tokens"] == 2
    assert chunk["meta_info"]["finish_reason"]["type"] == "abort"


def test_where_chunks_hold_everything_the_last_one_does() -> None:
    manager = make_manager()
    manager.incremental_streaming_output = manager.server_args.incremental_streaming_output = False
    write_last_chunk(TokenizerManager._handle_abort_req, manager, AbortReq(rid="a"))
    (chunk,) = manager.state.out_list
    assert (chunk["text"], chunk["output_ids"]) == ("ab", [5, 6])
    assert len(chunk["meta_info"]["output_token_logprobs"]) == chunk["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("other", ["without sets", "gone"])
def test_other_requests_are_answered_as_sglang_does(other: str) -> None:
    sglangs = TokenizerManager._handle_abort_req
    answers = []
    for handle in (sglangs, partial(write_last_chunk, sglangs)):
        manager = make_manager()
        state = manager.state
        if other == "without sets":
            state.obj.sglang_topp_request = NOTHING
        else:
            manager.rid_to_state.clear()
        with contextlib.suppress(KeyError):  # what 0.5.12 lacks
            handle(manager, AbortReq(rid="a"))
        answers.append(state.out_list)
    assert answers[0] == answers[1]
    assert len(answers[0]) == (0 if other == "gone" else 1)
    if other == "without sets":
        # With incremental chunks, SGLang repeats the last token. Remove the hook once SGLang does not.
        assert answers[0][0]["output_ids"] == [6]
        assert answers[0][0]["text"] == "ab"


REFUSED = {"type": "abort", "status_code": 413, "message": "too many candidates"}


@pytest.mark.parametrize("wants_sets", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", [REFUSED, {"type": "abort", "message": "asked for"}])
async def test_an_error_is_answered_with_its_status(
    reason: dict[str, Any], stream: bool, wants_sets: bool
) -> None:
    """Not within a stream, whose status was already sent, and not for requests without sets."""
    chunk = {"meta_info": {"finish_reason": reason}}

    async def chunks(self: Any, obj: Any, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        yield chunk

    wanted = SetsRequest(threshold=0.9 if wants_sets else 0)
    obj = SimpleNamespace(rid="a", stream=stream, sglang_topp_request=wanted)
    manager = SimpleNamespace(rid_to_state={"a": SimpleNamespace(obj=obj)})
    answer = write_sets(http_process(), chunks, manager, obj)
    if reason is REFUSED and wants_sets and not stream:
        with pytest.raises(HTTPException) as raised:
            await anext(answer)
        assert (raised.value.status_code, raised.value.detail) == (413, "too many candidates")
    else:
        assert [each async for each in answer] == [chunk]


@pytest.mark.parametrize("asks", [True, False])
async def test_a_release_without_the_field_returns_the_prompts_ids(asks: bool) -> None:
    closed = []

    async def chunks(self: Any, obj: Any, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"text": "a"}
            yield {"text": "ab"}
        finally:
            closed.append(True)

    obj = SimpleNamespace(rid="a", sglang_topp_request=SetsRequest(returns_prompt_ids=asks, resumed_tokens=0))
    tokenized = SimpleNamespace(input_ids=range(3), sampling_params=SimpleNamespace(custom_params=None))
    send_to_scheduler(tokenized, None, obj)
    answer = write_sets(http_process(), chunks, None, obj)
    assert await anext(answer) == {"text": "a", **({"prompt_token_ids": [0, 1, 2]} if asks else {})}
    await answer.aclose()
    assert closed
