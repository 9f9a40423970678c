"""TokenTexts: the text of single tokens, read from a model's `tokenizer.json`.

This module needs the package `tokenizers`, which SGLang installs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from sglang_topp.errors import InvalidInputError
from sglang_topp_client import Rollout

TokenText: TypeAlias = "str | list[int]"
"""The text of one token, or the list of the token's bytes if these bytes alone are not valid UTF-8."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """A mapping from token ids to their texts.

    Args:
        path: a `tokenizer.json`, or a directory that holds a `tokenizer.json`, such as a model's directory.

    Raises:
        InvalidInputError: the file does not exist, or holds no tokenizer.
        ModuleNotFoundError: the package `tokenizers` is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "tokenizers is not installed; it reads the texts of tokens: pip install tokenizers",
                name="tokenizers",
            ) from None
        file = Path(path, "tokenizer.json") if os.path.isdir(path) else Path(path)
        try:
            raw = file.read_text(encoding="utf-8")
            self._tokenizer: Any = Tokenizer.from_str(raw)
            decoder = json.dumps(json.loads(raw).get("decoder"))
        except OSError as error:
            raise InvalidInputError(
                f"--tokenizer: got {os.fspath(path)}, expected a tokenizer.json or the directory of a model"
                f" that holds one: {error.strerror}"
            ) from None
        except Exception as error:  # `tokenizers` raises `Exception` itself, not a subclass
            raise InvalidInputError(f"--tokenizer: {file} holds no tokenizer: {error}") from None
        self._added = {
            token_id: token.content for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._bytes_of = _byte_level() if '"ByteLevel"' in decoder else None

    def text_of(self, token_id: int) -> TokenText | None:
        """Return the text of a token, or None for an id that the tokenizer lacks."""
        if token_id in self._added:
            added: str = self._added[token_id]
            return added
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return None
        raw = self._to_bytes(piece)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    def _to_bytes(self, piece: str) -> bytes:
        if self._bytes_of is not None:
            # Each character of `_byte_level` stands for one byte. Encode any other character as UTF-8.
            return b"".join(self._bytes_of.get(one, one.encode()) for one in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def texts_of(self, token_ids: Iterable[int]) -> dict[str, TokenText]:
        """Return a mapping from token ids to texts, without the ids that the tokenizer lacks."""
        texts = ((token_id, self.text_of(token_id)) for token_id in token_ids)
        return {str(token_id): text for token_id, text in texts if text is not None}

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens, with special tokens."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def agrees_with(self, rollout: Rollout) -> bool:
        """Return whether this tokenizer decodes the rollout's output to the text that the engine returned.

        The engine leaves out stop strings and end tokens. The result is therefore also True if one of the two
        texts is a prefix of the other.

        If `Rollout.extend` appended tokens, this method compares only the last turn, because `Rollout.text`
        covers only the last turn.
        """
        ids = rollout.output_ids[rollout.turn_start :].tolist()
        mine, theirs = (self._tokenizer.decode(ids).strip(), rollout.text.strip())
        return not theirs or not mine or mine.startswith(theirs) or theirs.startswith(mine)


def _byte_level() -> dict[str, bytes]:
    """Return a mapping from the 256 characters of byte-level BPE to the bytes that they stand for.

    A byte is written as its Latin-1 character if this character is printable and not a space. The other
    bytes, in ascending order, are written as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
