"""Speculative verification by rejection sampling, with SGLang's kernel, for `test_rejection_sampling`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from sglang_topp_patches.scheduler import requests
from tests.speculative.run_eagle_sample import (
    CHAIN,
    Verified,
    by_definition,
    commit,
    ids_of,
    logprobs_of,
    request,
    verify,
)

VOCAB = 40
EITHER_RULE = pytest.mark.parametrize("by_block", [False, True], ids=["by token", "by block"])


@pytest.fixture(autouse=True)
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "refuse_too_many", lambda req: None)


def run(reqs: list[object], logits: Tensor, by_block: bool) -> Verified:
    """Verify drafts that were drawn from another distribution than the target's."""
    proposal = torch.softmax(logits[:, :-1] + torch.randn(logits[:, :-1].shape), -1)
    drafts = torch.multinomial(proposal.flatten(0, 1), 1).view(proposal.shape[:2])
    return verify(reqs, logits, CHAIN, drafts=drafts, draft_probs=proposal, by_block=by_block)


@EITHER_RULE
def test_every_accepted_token_has_the_set_of_its_node(by_block: bool) -> None:
    torch.manual_seed(1)
    kinds = [
        {"top_logprobs_p": 0.9, "top_p": 0.8},
        {"top_logprobs_source": "sampler", "top_k": 5},
        {"top_logprobs_source": "sampler", "top_p": 0.7, "top_k": 30},
        {},
    ]
    reqs = [request(f"r{i}", **kinds[i % len(kinds)]) for i in range(48)]
    logits = torch.randn(len(reqs), len(CHAIN.tokens), VOCAB) * 2
    verified = run(reqs, logits, by_block)
    assert verified.probs is not None
    for row, found in enumerate(commit(verified)):
        kind = kinds[row % len(kinds)]
        assert len(found) == (len(verified.tokens[row]) if kind else 0)
        nodes = verified.nodes[row]
        for entry, token, node in zip(found, verified.tokens[row], nodes, strict=bool(kind)):
            logprobs = torch.log_softmax(logits[row, node], -1)
            support = set(verified.probs[row, node].nonzero().flatten().tolist())
            assert token in support
            p = kind.get("top_logprobs_p")
            assert set(ids_of(entry)) == (support if p is None else by_definition(logprobs, p) | {token})
            for token_id, logprob in logprobs_of(entry).items():
                assert logprob == pytest.approx(float(logprobs[token_id]), abs=1e-6)
    assert {1, 2, 3} <= {len(tokens) for tokens in verified.tokens}


@EITHER_RULE
def test_drawn_tokens_follow_the_sets(by_block: bool) -> None:
    """A chi-square test of 1,000 draws at one position, at a significance of one in a million."""
    torch.manual_seed(2)
    count = 1000
    logits = (torch.randn(1, len(CHAIN.tokens), VOCAB) * 2).expand(count, -1, -1)
    fields = {"top_k": 12, "top_p": 0.9}
    reqs = [request("a", top_logprobs_source="sampler", **fields)]
    reqs += [request(f"r{i}", **fields) for i in range(count - 1)]
    verified = run(reqs, logits, by_block)
    (entry, *_), *_ = commit(verified)
    weights = logprobs_of(entry)
    probs = np.exp(np.array(list(weights.values()), np.float64))
    expected = probs / probs.sum() * count
    found = np.bincount([tokens[0] for tokens in verified.tokens], minlength=VOCAB)[list(weights)]
    assert found.sum() == count
    assert ((found - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, len(weights) - 1)
