"""Random requests to `/generate` and `/rollouts`: valid ones, and ones that must be refused."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BAD", "VOCAB_SIZE", "Ask", "random_ask"]

VOCAB_SIZE = 512
THRESHOLDS = (None, 0, 1e-6, 0.1, 0.5, 0.8, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Ask:
    """One request for a prompt.

    Attributes:
        prompt: a text, or token ids.
        p: the threshold. None and 0 request no sets by threshold.
        from_sampler: whether to request the sets that the sampler could draw, without a threshold.
        sampling: SGLang's sampling parameters, including `n`.
        stream: whether the answer is streamed.
        base64: the form of the sets in a request to the engine.
        scores_prompt: whether a request to the engine asks for the prompt's sets.
        in_custom_params: whether the threshold is in `custom_params`.
    """

    prompt: str | list[int]
    p: float | None
    sampling: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    base64: bool = True
    scores_prompt: bool = False
    in_custom_params: bool = False
    from_sampler: bool = False

    @property
    def wants_sets(self) -> bool:
        return bool(self.p) or self.from_sampler

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields that request the sets, as all routes name them."""
        source = {"top_logprobs_source": "sampler"} if self.from_sampler else {}
        return {"top_logprobs_p": self.p, **source}

    @property
    def n(self) -> int:
        return int(self.sampling["n"])

    def for_engine(self, rid: str) -> dict[str, Any]:
        """Return the body of `POST /generate`."""
        body: dict[str, Any] = {
            "text" if isinstance(self.prompt, str) else "input_ids": self.prompt,
            "sampling_params": dict(self.sampling),
            "return_logprob": True,
            "stream": self.stream,
        }
        if self.n == 1:
            body["rid"] = rid
        if self.scores_prompt:
            body["logprob_start_len"] = 0
        place = body
        if self.in_custom_params and self.wants_sets:
            place = body["sampling_params"]["custom_params"] = {}
        place.update(self.fields, return_logprobs_in_base64=self.base64)
        return body

    def for_sidecar(self, rid: str) -> dict[str, Any]:
        """Return the body of `POST /rollouts`."""
        prompts = self.prompt if isinstance(self.prompt, str) else [self.prompt]
        body = {"prompts": prompts, "sampling_params": dict(self.sampling), "stream": self.stream}
        return {**body, **self.fields, "request_id": rid}


def random_ask(rng: random.Random) -> Ask:
    """Return a length, mostly a short one.

    Some long requests cannot end early, but the scheduler admits them as if they could. Together they exceed
    the KV cache, so they are retracted.
    """
    length = rng.choice((1, 3, 3, 10, 10, 30, 30, 150))
    prompt: str | list[int] = "".join(rng.choices("abcdefghij ", k=length))
    if rng.random() < 0.4:
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]
    sampling: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 1, 2, 3)),
        "max_new_tokens": rng.choice((0, 1, 2, 4, 8, 16, 24)),
        "temperature": rng.choice((0.0, 0.7, 1.0, 1.0, 1.0, 1.5)),
        "top_p": rng.choice((0.5, 0.9, 1.0)),
    }
    if rng.random() < 0.15:
        sampling |= {"max_new_tokens": rng.choice((40, 80, 120)), "logit_bias": {"0": -100.0}}
    for chance, more in (
        (0.1, {"top_k": 5}),
        (0.1, {"min_p": 0.05}),
        (0.1, {"frequency_penalty": 0.5}),
        (0.1, {"repetition_penalty": 1.2}),
        (0.1, {"stop": ["a", "bc"]}),
        (0.1, {"stop_token_ids": [70, 71, 72]}),
        (0.1, {"min_new_tokens": 1}),
        (0.1, {"ignore_eos": True}),
        (0.02, {"regex": "[a-z]{1,6}"}),
    ):
        if rng.random() < chance:
            sampling |= more
    # A completed regular expression ends the sample, so fewer tokens than this would be an error.
    if "min_new_tokens" in sampling and ("regex" in sampling or sampling["max_new_tokens"] < 1):
        del sampling["min_new_tokens"]
    from_sampler = rng.random() < 0.25
    return Ask(
        prompt,
        None if from_sampler else rng.choice(THRESHOLDS),
        sampling,
        stream=rng.random() < 0.5,
        base64=rng.random() < 0.6,
        scores_prompt=rng.random() < 0.15,
        in_custom_params=rng.random() < 0.2,
        from_sampler=from_sampler,
    )


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_p": 1.5}, "top_logprobs_p"),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_p": -0.1}, "top_logprobs_p"),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_p": "0.9"}, "top_logprobs_p"),
    ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_p": [0.9, 0.9]}, "top_logprobs_p"),
    ("/generate", {"text": "a", "top_logprobs_p": 0.9}, "return_logprob"),
    (
        "/generate",
        {"text": "a", "return_logprob": True, "top_logprobs_p": 0.9, "return_logprobs_in_base64": 1},
        "return_logprobs_in_base64",
    ),
    (
        "/generate",
        {"text": "a", "return_logprob": True, "top_logprobs_p": 0.9, "top_logprobs_source": "sampler"},
        "top_logprobs_source",
    ),
    ("/generate", {"text": "a", "top_logprobs_source": "sampler"}, "return_logprob"),
    ("/rollouts", {"prompts": "a", "top_logprobs_source": "nucleus"}, "top_logprobs_source"),
    ("/rollouts", {"prompts": "a", "top_logprobs_p": 2}, "top_logprobs_p"),
    ("/rollouts", {"prompts": []}, "prompts"),
    ("/rollouts", {"prompts": [[-1]]}, "prompts"),
    ("/rollouts", {"prompts": "a", "sampling_params": {"n": 0}}, "n"),
    ("/rollouts", {"prompts": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ("/rollouts", {"prompts": "a", "sampling_params": {"no_such": 1}}, "no_such"),
    ("/rollouts", {"prompts": "a", "n": 2}, "n"),
    ("/rollouts", {"prompts": "a", "stream": "yes"}, "stream"),
    ("/rollouts", {"prompts": "a", "timeout_s": -1}, "timeout_s"),
)
"""Route, body, and the field that the 400 must name."""
