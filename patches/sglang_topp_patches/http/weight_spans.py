"""Record which weights generated each token, and correct SGLang's `weight_versions`.

When weights are pushed, SGLang attributes the tokens that it has counted to the old weights. With overlap
scheduling, the old weights may have generated one more token that is not counted yet. SGLang attributes this
token to the new weights. So every pass that makes sets records its weight version, and these spans replace
SGLang's in the answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WeightSpans"]


class WeightSpans:
    """The versions of the weights that generated one sample's tokens, from the first token on.

    Attributes:
        prompt: the weight version that scored the prompt's positions. One version scores all of them, or the
            request fails. The pass that scored the last position drew the first token.
    """

    def __init__(self) -> None:
        self.prompt = ""
        self._spans: list[tuple[str, int]] = []  # a version, and the index after its last token

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

        `weight_version` is the version of the last token. `weight_versions` lists the spans in order, as
        `{"version": name, "start": first index, "end": index after the last}`. Without a token, both fields
        give the prompt's version, and the one span ends at 0.
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
