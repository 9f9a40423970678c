"""Record the version of the weights that generated each token, and correct SGLang's `weight_versions`.

A span is a run of tokens that the same weights generated. When weights are pushed, SGLang ends the current
span after the last token that it has counted. With overlap scheduling, the old weights may have generated one
more token that SGLang has not counted yet. SGLang wrongly puts this token into the new span. So the scheduler
sends each forward pass's weight version with the candidate sets. `WeightSpans` runs in the HTTP process,
collects these versions, and replaces SGLang's spans in the answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WeightSpans"]


class WeightSpans:
    """The versions of the weights that generated one sample's tokens, in the order of the tokens.

    Attributes:
        prompt: the version of the weights that scored the prompt. If the weights change while a prompt is
            scored, the request fails.
    """

    def __init__(self) -> None:
        self.prompt = ""
        self._spans: list[tuple[str, int]] = []  # the weight version and the end index of each span

    def add(self, version: str) -> None:
        """Record the weight version of the sample's next token."""
        end = self._spans[-1][1] + 1 if self._spans else 1
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, end)
        else:
            self._spans.append((version, end))

    def name_first(self, version: str) -> None:
        """Replace the empty weight version that `add` recorded for the first token.

        A decode server receives the first token's weight version later than the token itself.
        """
        rest = self._spans[1:]
        if not rest or rest[0][0] != version:
            rest.insert(0, (version, 1))
        self._spans = rest

    def meta_info(self, num_tokens: int) -> dict[str, Any]:
        """Return the fields `weight_version` and `weight_versions` for the first `num_tokens` tokens.

        `weight_version` is the version of the weights that generated the last token. `weight_versions` lists
        the spans in order, as `{"version": name, "start": first index, "end": index after the last}`. If
        `num_tokens` is 0, `weight_version` is the version of the weights that scored the prompt. In this
        case, `weight_versions` has one span with this version, from 0 to 0.
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
