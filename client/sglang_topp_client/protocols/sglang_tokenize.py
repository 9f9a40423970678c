"""Protocol of SGLang's `POST /tokenize`, which turns chat messages into token ids.

The engine applies its chat template and tokenizes the messages as it does for `/v1/chat/completions`. The
client then sends the token ids to `/generate`. The client does not send the messages to
`/v1/chat/completions`, because that route cannot resume an interrupted sample.

Request::

    {"messages": [{"role": "user", "content": "..."}, ...]}

Answer::

    {"tokens": [...], "count": 12, "max_model_len": 4096}
"""

from __future__ import annotations

from typing import Any

from sglang_topp.errors import WireError
from sglang_topp_client.codecs.json_fields import parse_token_ids, read_field
from sglang_topp_client.requests import Messages

__all__ = ["PATH", "body", "prompt_ids"]

PATH = "/tokenize"


def body(messages: Messages) -> dict[str, Any]:
    """Return the JSON body of a `/tokenize` request."""
    return {"messages": messages}


def prompt_ids(answer: Any) -> list[int]:
    """Return the prompt's token ids from the answer to `/tokenize`.

    Raises:
        WireError: the answer has no token ids.
    """
    if not isinstance(answer, dict):
        raise WireError(PATH, f"got {type(answer).__name__}, expected an object")
    ids: list[int] = parse_token_ids("tokens", read_field(answer, "tokens", list)).tolist()
    if not ids:
        raise WireError("tokens", "got none: the chat template renders nothing for the messages")
    return ids
