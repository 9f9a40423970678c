"""Which weights each generated token came from, under SGLang's name and in its form (`weight_versions`).

SGLang counts, when weights change, the tokens that a request has by then. A pass that had run, but whose
token was not counted yet (overlap scheduling does that), is then told to be the new weights'. So the
version in force is noted with every pass that takes sets, and what SGLang tells of those requests is
replaced.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Versions"]


class Versions:
    """The versions of one sample's tokens, from the first one on.

    Attributes:
        prompt: that of its prompt's positions. (They are scored in one version or not at all, and the pass
            that scored the last one drew the first token.)
    """

    def __init__(self) -> None:
        self.prompt = ""
        self._spans: list[tuple[str, int]] = []  # a version, and where its tokens end

    def add(self, version: str) -> None:
        """The next token's."""
        end = self._spans[-1][1] + 1 if self._spans else 1
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, end)
        else:
            self._spans.append((version, end))

    def name_first(self, version: str) -> None:
        """The first token's, where it was added as the empty one."""
        rest = self._spans[1:]
        if not rest or rest[0][0] != version:
            rest.insert(0, (version, 1))
        self._spans = rest

    def meta_info(self, num_tokens: int) -> dict[str, Any]:
        """SGLang's two fields for the first `num_tokens` tokens.

        `weight_version` is the last token's; `weight_versions` holds
        `{"version": name, "start": first token, "end": the one after the last}` in order. Without a token it
        is the prompt's, and its one span ends at 0.
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
