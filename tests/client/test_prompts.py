"""Chat messages as the argument `prompts`, and media in prompts or sampling parameters."""

import re
from types import MappingProxyType

import pytest

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.requests import plan, plan_scores

USER = {"role": "user", "content": "Hi"}
TOOL_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([USER], [(USER,)]),
        ((USER, USER), [(USER, USER)]),
        ([[USER]], [(USER,)]),
        ([[USER], (USER, TOOL_CALL)], [(USER,), (USER, TOOL_CALL)]),
        ([MappingProxyType(USER)], [(USER,)]),
        ([{"role": "user", "content": []}], [({"role": "user", "content": []},)]),
    ],
)
def test_every_form_of_chat_messages(prompts, expected):
    planned = plan(prompts, {"n": 2})
    assert [one.prompt for one in planned] == expected
    assert all(one.samples == (0, 1) for one in planned)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([USER, "Hi"], "prompts[1]: got str, expected a chat message with role and content"),
        ([[USER], "Hi"], "prompts[1]: got 'Hi' among chats, expected a list of messages"),
        ([[USER], [1, 2]], "prompts[1][0]: got int, expected a chat message"),
        ([[1, 2], [USER]], "prompts[0][0]: got int, expected a chat message"),
        ([[USER], []], "prompts[1]: got [] among chats"),
        ([{"content": "Hi"}], "prompts[0].role: got None, expected text, such as 'user'"),
        ([{"role": 1, "content": "Hi"}], "prompts[0].role: got 1"),
        ([{"role": "user", "content": 5}], "prompts[0].content: got int, expected text or parts of text"),
        ([{"role": "user", "content": ["Hi"]}], "prompts[0].content[0]: got a part of type None"),
        ([{"role": "user", "content": "\ud800"}], "prompts[0]: got text with a lone surrogate"),
        ([{"role": "user", "content": "", "x": float("nan")}], "prompts[0]: cannot be sent as JSON"),
        ([{"role": "user", "content": "", "x": {1}}], "prompts[0]: cannot be sent as JSON"),
    ],
)
def test_wrong_messages_are_named(prompts, message):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        plan(prompts, None)


@pytest.mark.parametrize(
    "kind", ["image_url", "image", "video_url", "video", "input_audio", "audio_url", "audio", "file"]
)
def test_media_parts_are_refused_by_name(kind):
    chat = [USER, {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind}]}]
    message = f"prompts[0][1].content[1]: got a part of type '{kind}', expected 'text'; the client sends no"
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)} images, audio, or video"):
        plan([chat], None)


@pytest.mark.parametrize(
    "name", ["image_data", "video_data", "audio_data", "images", "modalities", "multi_modal_data"]
)
def test_media_fields_are_refused_by_name(name):
    message = f"got {name}, expected text only; the client sends no images"
    with pytest.raises(InvalidInputError, match=f"^sampling_params: {message}"):
        plan([1], {name: ["a.png"]})
    with pytest.raises(InvalidInputError, match=rf"^sampling_params\[1\]: {message}"):
        plan([[1], [2]], [{}, {name: ["a.png"]}])
    with pytest.raises(InvalidInputError, match=rf"^prompts\[0\]: {message}"):
        plan([{"prompt": "What is it?", name: ["a.png"]}], None)
    assert plan([1], {name: None})[0].sampling_params == {name: None}


def test_scores_take_no_messages():
    with pytest.raises(InvalidInputError, match="sequences: got chat messages"):
        plan_scores([[USER]])
