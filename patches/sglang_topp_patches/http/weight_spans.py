"""Record which weights generated each token, and correct SGLang's `weight_versions`.

At a push, SGLang attributes the tokens that it has counted to the old weights. With overlap scheduling the
old weights may have generated one more token, which is not counted yet. SGLang attributes it to the new
weights. So every pass that makes sets records its version, and these spans replace SGLang's in the answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WeightSpans"]


class WeightSpans:
    """The versions of one sample's tokens, from the first one on.

    Attributes:
        prompt: the version of the prompt's positions. They are scored with one version or not at all, and the
            pass that scored the last one drew the first token.
    """

    def __init__(self) -> None:
        self.prompt = ""
        self._spans: list[tuple[str, int]] = []  # a version, and where its tokens end

    def add(self, version: str) -> None:
        """Append the version of the next token."""
        end = self._spans[-1][1] + 1 if self._spans else 1
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, end)
        else:
            self._spans.append((version, end))

    def name_first(self, version: str) -> None:
        """Set the version of the first token, which was appended without one."""
        rest = self._spans[1:]
        if not rest or rest[0][0] != version:
            rest.insert(0, (version, 1))
        self._spans = rest

    def meta_info(self, num_tokens: int) -> dict[str, Any]:
        """Return SGLang's two fields for the first `num_tokens` tokens.

        `weight_version` is the last token's. `weight_versions` holds
        `{"version": name, "start": first token, "end": the one after the last}` in order. Without a token
        both are the prompt's, and its one span ends at 0.
        """
        spans: list[dict[str, Any]] = []
        if not num_tokens:
            spans.append({"version": self.prompt, "start": 0, "end": 0})
        start = 0
        for version, end in self._spans:
            if start >= num_tokens:
                break
            spans.append({"version": version, "start": start, "end": min(end, num_tokens)})
            start = end
        return {"weight_version": spans[-1]["version"], "weight_versions": spans}
