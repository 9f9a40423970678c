"""Prompts: check a caller's texts, token ids, and chat messages, and refuse images, audio, and video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.argument_checks import as_array, as_token_ids, find_json_problem, is_text

__all__ = ["Messages", "Prompt", "Prompts", "find_media", "prompts_of"]

Prompts: TypeAlias = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Sequence[Mapping[str, Any]]
    | Sequence[Sequence[Mapping[str, Any]]]
)
Messages: TypeAlias = tuple[Mapping[str, Any], ...]
"""The chat messages of one prompt, to which the engine applies its chat template."""
Prompt: TypeAlias = str | list[int] | Messages

# The names of media fields in the APIs of SGLang, vLLM, transformers, and OpenAI.
_MEDIA = (
    *("image", "images", "image_data", "image_url", "video", "videos", "video_data", "video_url"),
    *(
        "audio",
        "audios",
        "audio_data",
        "audio_url",
        "input_audio",
        "modalities",
        "mm_data",
        "multi_modal_data",
    ),
)
_NO_MEDIA = (
    "the client sends no images, audio, or video: a Rollout records token ids alone, from which a trainer"
    " could not score such a prompt"
)


def find_media(fields: Mapping[Any, Any]) -> str | None:
    """Return an error message, or None if `fields` holds no images, audio, or video."""
    found = next((name for name in _MEDIA if fields.get(name) is not None), None)
    return None if found is None else f"got {found}, expected text only; {_NO_MEDIA}"


def prompts_of(name: str, prompts: Any, *, takes_messages: bool = False) -> list[Prompt]:
    """Check a caller's prompts, and return each one as text, token ids, or chat messages.

    Args:
        name: the name of the caller's argument, for error messages.
        prompts: one prompt, or several prompts.
        takes_messages: whether the prompts may be chat messages.

    Raises:
        InvalidInputError: there are no prompts, or a prompt is invalid.
    """
    if isinstance(prompts, str):
        return [_text(name, prompts)]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        array = as_array(name, prompts) if hasattr(prompts, "__array__") else None
        if array is None or not array.ndim:
            raise InvalidInputError(
                f"{name}: got {type(prompts).__name__}, expected text, texts, token ids, or lists of these"
            )
        prompts = array
    items = list(prompts)
    if not items:
        raise InvalidInputError(f"{name}: got none, expected at least one, of at least one token")
    is_conversation = any(isinstance(item, Mapping) for item in items)
    if is_conversation or any(map(_is_conversation, items)):
        if not takes_messages:
            raise InvalidInputError(
                f"{name}: got chat messages, expected text or token ids; apply the chat template and give the"
                " token ids, such as Rollout.prompt_ids"
            )
        if is_conversation:
            return [_messages(name, items)]
        return [_messages(f"{name}[{i}]", item) for i, item in enumerate(items)]
    if all(isinstance(item, str) for item in items):
        return [_text(f"{name}[{i}]", item) for i, item in enumerate(items)]
    if all(isinstance(item, int | np.integer) for item in items):
        return [as_token_ids(name, prompts)]
    if any(isinstance(item, str) for item in items):
        raise InvalidInputError(f"{name}: got text and token ids in one request, expected one kind")
    return [as_token_ids(f"{name}[{i}]", item) for i, item in enumerate(items)]


def _text(name: str, text: str) -> str:
    if not text:
        raise InvalidInputError(f"{name}: got an empty text, expected at least one token")
    if not is_text(text):
        raise InvalidInputError(f"{name}: got text with a lone surrogate, which is no Unicode text")
    return text


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and any(isinstance(one, Mapping) for one in prompt)


def _messages(name: str, messages: Any) -> Messages:
    """Check the chat messages of one prompt.

    The engine later checks the messages against its chat template, which the client does not have.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidInputError(f"{name}: got {describe(messages)} among chats, expected a list of messages")
    for i, message in enumerate(messages):
        at = f"{name}[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidInputError(
                f"{at}: got {type(message).__name__}, expected a chat message with role and content"
            )
        if (problem := find_media(message) or find_json_problem(dict(message))) is not None:
            raise InvalidInputError(f"{at}: {problem}")
        if not isinstance(message.get("role"), str):
            raise InvalidInputError(
                f"{at}.role: got {describe(message.get('role'))}, expected text, such as 'user'"
            )
        _check_content(f"{at}.content", message.get("content"))
    return tuple(dict(message) for message in messages)


def _check_content(name: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return  # an assistant's message with tool calls may have the content None
    if not isinstance(content, list | tuple):
        raise InvalidInputError(f"{name}: got {type(content).__name__}, expected text or parts of text")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InvalidInputError(
                f"{name}[{i}]: got a part of type {describe(kind)}, expected 'text'; {_NO_MEDIA}"
            )
