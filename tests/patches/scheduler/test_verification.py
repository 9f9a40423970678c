"""The sets of accepted tokens, around SGLang's own `eagle_sample` with chains and trees."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_topp_patches.releases import Feature
from sglang_topp_patches.scheduler import requests, verification
from sglang_topp_patches.scheduler.host_copy_before_0_5_19 import Committed
from sglang_topp_patches.set_buffer import KEY, PackedSet
from tests.skip_missing_features import skip_without
from tests.speculative.run_eagle_sample import (
    CHAIN,
    TREE,
    Tree,
    Verified,
    by_definition,
    commit,
    ids_of,
    logprobs_of,
    problem_of,
    request,
    verify,
)

skip_without(Feature.SPECULATIVE)

VOCAB = 40
HIGHEST_COIN = 1 - 2**-24
BOTH = pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])


@pytest.fixture(autouse=True)
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "refuse_too_many", lambda req: None)


def logits_of(count: int, tree: Tree, seed: int = 0) -> Tensor:
    """Logits under which each draft is likely, and accepted now and then."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, len(tree.tokens), VOCAB, generator=generator) * 2
    logits[:, :, 1:5] += 2
    for node, child in enumerate(tree.children):
        while child != -1:
            logits[:, node, tree.tokens[child]] += 3
            child = tree.siblings[child]
    return logits


MIXED = (
    {"top_logprobs_p": 0.9},
    {},
    {"top_logprobs_source": "sampler", "top_k": 5},
    {"top_logprobs_source": "sampler", "top_p": 0.6, "top_k": 30},
    {"top_logprobs_p": 0.3, "top_p": 0.8},
    {"top_logprobs_source": "sampler", "top_k": 1},
    {"top_logprobs_p": 1.0, "top_k": 3},
)
TEMPERATURES = (0.7, 1.0, 1.3, 1.0, 2.0, 1.0, 1.0)


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_every_accepted_token_has_the_set_of_its_node(tree: Tree, seed: int) -> None:
    reqs = [request(f"r{i}", **fields) for i, fields in enumerate(MIXED)]
    logits = logits_of(len(reqs), tree, seed)
    torch.manual_seed(seed)
    verified = verify(reqs, logits, tree, temperatures=TEMPERATURES)
    assert verified.probs is not None
    for row, found in enumerate(commit(verified)):
        if not MIXED[row]:
            assert found == []
            continue
        check_row(verified, row, found, logits[row] / TEMPERATURES[row])


def check_row(verified: Verified, row: int, found: list[PackedSet], logits: Tensor) -> None:
    fields, tokens = MIXED[row], verified.tokens[row]
    assert len(found) == len(tokens)
    assert verified.reqs[row].customized_info[KEY].spans == [("7", len(tokens))]
    for slot, (entry, token, node) in enumerate(zip(found, tokens, verified.nodes[row], strict=True)):
        logprobs = torch.log_softmax(logits[node], -1)
        assert verified.probs is not None
        support = set(verified.probs[row, node].nonzero().flatten().tolist())
        if "top_logprobs_p" in fields:
            assert set(ids_of(entry)) == by_definition(logprobs, fields["top_logprobs_p"]) | {token}
        else:
            assert set(ids_of(entry)) == ({token} if fields["top_k"] == 1 else support)
        for token_id, logprob in logprobs_of(entry).items():
            assert logprob == pytest.approx(float(logprobs[token_id]), abs=1e-6)
        assert logprobs_of(entry)[token] == float(verified.logprobs[row, slot])


@BOTH
def test_accepted_runs_have_every_length(tree: Tree) -> None:
    """Otherwise the tests here would show less than they say."""
    torch.manual_seed(0)
    reqs = [request(f"r{i}", top_logprobs_p=0.5) for i in range(300)]
    verified = verify(reqs, logits_of(len(reqs), tree), tree)
    assert {len(tokens) for tokens in verified.tokens} == set(range(1, tree.depth + 1))


@BOTH
@pytest.mark.parametrize("coin", [0.0, HIGHEST_COIN])
@pytest.mark.parametrize("fields", [{"top_logprobs_source": "sampler"}, {"top_logprobs_p": 0.8}], ids=str)
def test_extreme_coins_stay_inside(tree: Tree, coin: float, fields: dict[str, Any]) -> None:
    reqs = [request(f"r{i}", top_p=0.7, **fields) for i in range(20)]
    logits = logits_of(len(reqs), tree)
    logits[::2, :, 1:5] = -torch.inf  # no draft has any mass
    verified = verify(reqs, logits, tree, coins=coin)
    for tokens, found in zip(verified.tokens, commit(verified), strict=True):
        assert [token in ids_of(entry) for token, entry in zip(tokens, found, strict=True)]


@pytest.mark.parametrize("fields", [{"top_logprobs_source": "sampler"}, {"top_logprobs_p": 0.8}], ids=str)
def test_token_outside_of_its_support_is_an_error(fields: dict[str, Any]) -> None:
    """The fault of SGLang's issue 35771: at coin 0 the kernel accepts a draft without mass."""
    reqs = [request("a", **fields), request("b", **fields), request("c")]
    logits = logits_of(3, CHAIN)
    logits[0, 1, 2] = -torch.inf  # the second draft of the first request
    verified = verify(reqs, logits, coins=0.0, accepts_zero_mass=True)
    assert [tokens[:2] for tokens in verified.tokens] == [[1, 2]] * 3
    first, second, third = commit(verified)
    words = "no candidate set at position 1: verification drew token 2, which is outside of its support"
    assert [problem_of(verified, row) for row in range(3)] == [words, "", ""]
    assert [len(found) > 0 for found in (first, second, third)] == [False, True, False]


def test_drawn_tokens_follow_the_sets() -> None:
    """A chi-square test of 100,000 draws at one position, at a significance of one in a million."""
    from scipy.stats import chi2

    torch.manual_seed(5)
    count, rounds = 1000, 100
    tree = Tree((0, 1), (1, -1), (-1, -1), 2)
    logits = logits_of(1, tree).expand(count, -1, -1)
    drawn = np.zeros(VOCAB)
    reqs = [request("a", top_k=12, top_p=0.9, top_logprobs_source="sampler")]
    reqs += [request(f"r{i}", top_k=12, top_p=0.9) for i in range(count - 1)]
    for _ in range(rounds):
        verified = verify(reqs, logits, tree, temperatures=[0.8] * count)
        drawn += np.bincount([tokens[0] for tokens in verified.tokens], minlength=VOCAB)
    (entry, *_), *_ = commit(verified)
    weights = logprobs_of(entry)
    assert 3 < len(weights) <= 12
    probs = np.exp(np.array(list(weights.values()), np.float64))
    expected = probs / probs.sum() * count * rounds
    found = drawn[list(weights)]
    assert found.sum() == count * rounds
    statistic = ((found - expected) ** 2 / expected).sum()
    assert statistic < chi2.ppf(1 - 1e-6, len(weights) - 1)


@BOTH
def test_greedy_verification(tree: Tree) -> None:
    fields = ({"top_logprobs_p": 0.9}, {"top_logprobs_source": "sampler"}, {}, {"top_logprobs_p": 1e-6})
    reqs = [request(f"r{i}", top_k=1, **each) for i, each in enumerate(fields)]
    logits = logits_of(len(reqs), tree)
    verified = verify(reqs, logits, tree)
    assert verified.probs is None
    for row, found in enumerate(commit(verified)):
        for entry, token, node in zip(found, verified.tokens[row], verified.nodes[row], strict=bool(found)):
            logprobs = torch.log_softmax(logits[row, node], -1)
            assert token == int(logprobs.argmax())
            p = fields[row].get("top_logprobs_p")
            assert set(ids_of(entry)) == ({token} if p is None else by_definition(logprobs, float(p)))
    assert not commit(verified)[2]


def test_sampled_request_that_is_verified_greedily_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some devices SGLang takes the most likely tokens, whatever the request's parameters are."""
    utils = importlib.import_module("sglang.srt.speculative.eagle_utils")
    monkeypatch.setattr(utils, "_is_hip", True)
    reqs = [request("a", top_logprobs_p=0.9), request("b", top_k=1, top_logprobs_p=0.9)]
    verified = verify(reqs, logits_of(2, CHAIN))
    assert [len(found) > 0 for found in commit(verified)] == [False, True]
    assert "does not show what it drew from" in problem_of(verified, 0)
    assert not problem_of(verified, 1)


def one_verification() -> Verified:
    logits = torch.zeros(2, 5, VOCAB)
    for node in range(4):
        logits[:, node, node + 1] = 50
    logits[:, 4, 9] = 50
    reqs = [request("a", top_logprobs_p=0.9), request("b", top_logprobs_source="sampler")]
    return verify(reqs, logits)


@pytest.mark.parametrize("counts", [[5, 5], [2, 1], [1, 0], [0, 4]], ids=str)
def test_only_committed_tokens_get_sets(counts: list[int]) -> None:
    """A stop or a grammar ends a run of accepted tokens before its end; an abort before its begin."""
    verified = one_verification()
    assert verified.tokens == [[1, 2, 3, 4, 9]] * 2
    for found, count, tokens in zip(commit(verified, counts), counts, verified.tokens, strict=True):
        assert [ids_of(entry) for entry in found] == [[token] for token in tokens[:count]]


@pytest.mark.parametrize(
    ("committed", "problem"),
    [
        ((1, 8, 3), "position 1: token 8 became visible, and 2 was drawn"),
        ((1, 2, 3, 4, 9, 7), "position 5: a token became visible without being drawn"),
    ],
)
def test_committed_tokens_are_the_drawn_ones(committed: tuple[int, ...], problem: str) -> None:
    verified = one_verification()
    commits = [Committed(0, committed), None]
    verified.output.consume(SimpleNamespace(reqs=verified.reqs), commits)
    assert problem_of(verified, 0) == f"no candidate set at {problem}"
    assert verified.reqs[0].stream, "the request ends with what it has"
    assert verified.reqs[1].customized_info is None


def test_rows_that_moved_are_errors() -> None:
    verified = one_verification()
    verified.reqs[0].rid = "another"
    commit(verified)
    assert problem_of(verified, 0).endswith("position 0: row 0 was drawn for request a")


def test_tokens_of_another_verification_get_nothing() -> None:
    """SGLang's DFlash workers report log-probs through the same function, of tokens that they drew."""
    output = SimpleNamespace(next_token_logits=torch.zeros(5, VOCAB), auxiliary_device_output=None)
    setattr(output, verification._FIELD, None)
    calls = []
    verification.compute_logprobs(
        lambda *args, **_: calls.append(args),
        SimpleNamespace(),
        output,
        torch.zeros(5),
        chain_stride=5,
    )
    assert len(calls) == 1
    assert output.auxiliary_device_output is None
