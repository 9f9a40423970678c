"""The kernels' ports, each against its definition."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.speculative.kernels import renorm_top_k, renorm_top_p, sample_tree, verify_tree_greedily

VOCAB = 7
HIGHEST_COIN = 1 - 2**-24


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(40, VOCAB, generator=generator).mul(2).softmax(-1)
    probs[:10] = (probs[:10] * 8).round().clamp(min=1) / 8  # ties
    probs[10:15, 2:5] = 0
    return probs / probs.sum(-1, keepdim=True)


def normalized(row: list[float], kept: set[int]) -> np.ndarray:
    weights = np.array([prob if i in kept else 0.0 for i, prob in enumerate(row)])
    return weights / weights.sum()


@pytest.mark.parametrize("k", [1, 2, 5, VOCAB, 1 << 30])
def test_top_k_keeps_tokens_with_fewer_than_k_above(k: int) -> None:
    probs = rows()
    found = renorm_top_k(probs, torch.full((len(probs),), k, dtype=torch.int32))
    for row, got in zip(probs.tolist(), found, strict=True):
        kept = {i for i, prob in enumerate(row) if sum(other > prob for other in row) < k}
        np.testing.assert_allclose(got, normalized(row, kept), atol=1e-6)
        assert {i for i, weight in enumerate(got.tolist()) if weight} == {i for i in kept if row[i]}


@pytest.mark.parametrize("p", [1e-6, 0.31, 0.77, 0.999, 1.0])
def test_top_p_keeps_tokens_with_less_than_p_above(p: float) -> None:
    probs = rows()
    found = renorm_top_p(probs, torch.full((len(probs),), p))
    for row, got in zip(probs.double().tolist(), found, strict=True):
        kept = {i for i, prob in enumerate(row) if prob and sum(x for x in row if x > prob) < p}
        np.testing.assert_allclose(got, normalized(row, kept), atol=1e-6)
        assert {i for i, weight in enumerate(got.tolist()) if weight} == kept


# Of each tree: its drafted tokens, each node's first child, and each node's next sibling.
CHAIN = ([0, 1, 2, 3], [1, 2, 3, -1], [-1] * 4)
TREE = ([0, 1, 2, 3, 4, 1], [1, 3, 5, -1, -1, -1], [-1, 2, -1, 4, -1, -1])


def walk(
    tree: tuple[list[int], list[int], list[int]], target: Tensor, coins: Tensor, final: Tensor, **options: Any
) -> tuple[list[list[int]], Tensor]:
    """Return the tokens that each row of [R] coins draws, and the nodes that it visits."""
    count, nodes, depth = len(coins), len(tree[0]), 4
    place = torch.arange(count * nodes).view(count, nodes)
    predicts = torch.zeros(count * nodes, dtype=torch.int32)
    accepted = torch.full((count, depth), -1, dtype=torch.int32)
    lengths = torch.zeros(count, dtype=torch.int32)
    tokens, children, siblings = (torch.tensor(each).expand(count, -1) for each in tree)
    target = target.expand(count, -1, -1)
    sample_tree(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=lengths,
        candidates=tokens,
        retrive_index=place,
        retrive_next_token=children,
        retrive_next_sibling=siblings,
        uniform_samples=coins,
        uniform_samples_for_final_sampling=final,
        target_probs=target,
        draft_probs=torch.zeros(count, nodes, VOCAB),
        **options,
    )
    counts = (lengths + 1).tolist()
    drawn = [predicts[row[:n].long()].tolist() for row, n in zip(accepted, counts, strict=True)]
    assert (accepted >= 0).sum(1).tolist() == counts
    return drawn, accepted - torch.arange(count)[:, None] * nodes


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_drawn_tokens_follow_the_targets_distribution(tree: Any) -> None:
    """The first token by the root's distribution, and the second by that of the node that was reached."""
    generator = torch.Generator().manual_seed(1)
    target = renorm_top_p(
        torch.randn(len(tree[0]), VOCAB, generator=generator).softmax(-1), torch.full((len(tree[0]),), 0.8)
    )
    count = 4000
    coins = torch.rand(count, len(tree[0]), generator=generator)
    drawn, nodes = walk(tree, target, coins, torch.rand(count, generator=generator))
    check_frequencies([run[0] for run in drawn], target[0])
    for node in set(nodes[:, 1].tolist()) & set(range(len(tree[0]))):
        seconds = [run[1] for run, at in zip(drawn, nodes[:, 1].tolist(), strict=True) if at == node]
        check_frequencies(seconds, target[node])
    assert max(map(len, drawn)) > 2


def check_frequencies(tokens: list[int], probs: Tensor) -> None:
    """Check the counts by a chi-square test at a significance of one in a million."""
    counts = Counter(tokens)
    support = [i for i, prob in enumerate(probs.tolist()) if prob > 0]
    assert set(counts) <= set(support)
    expected = np.array([probs[i].item() for i in support]) * len(tokens)
    found = np.array([counts[i] for i in support])
    assert ((found - expected) ** 2 / expected).sum() < 45


@pytest.mark.parametrize("coin", [0.0, HIGHEST_COIN])
def test_extreme_coins_draw_from_the_support(coin: float) -> None:
    target = torch.zeros(4, VOCAB)
    target[:, [3, 5]] = torch.tensor([0.25, 0.75])
    drawn, _ = walk(CHAIN, target, torch.full((1, 4), coin), torch.full((1,), coin))
    assert drawn == [[3 if coin == 0 else 5]]


def test_older_kernel_accepts_a_draft_without_mass_at_coin_0() -> None:
    target = torch.zeros(4, VOCAB)
    target[:, 5] = 1
    drawn, _ = walk(CHAIN, target, torch.zeros(1, 4), torch.zeros(1), accepts_zero_mass=True)
    assert drawn == [[1, 2, 3, 5]]


def test_last_token_of_the_vocabulary_is_drawn_if_no_mass_is_left() -> None:
    target = torch.zeros(4, VOCAB)
    drawn, _ = walk(CHAIN, target, torch.full((1, 4), 0.5), torch.full((1,), 0.5))
    assert drawn == [[VOCAB - 1]]


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_verification_accepts_the_path_of_most_likely_tokens(tree: Any) -> None:
    tokens, children, siblings = tree
    nodes = len(tokens)
    for best in itertools.product(range(1, 5), repeat=2):
        predict = [*best, *([best[0]] * (nodes - 2))]
        # By definition: follow the child whose token is the best one, as long as there is one.
        expected, node = [], 0
        while True:
            expected.append(predict[node])
            below, child = [], children[node]
            while child != -1:
                below.append(child)
                child = siblings[child]
            following = [child for child in below if tokens[child] == predict[node]]
            if not following:
                break
            (node,) = following
        predicts = torch.zeros(nodes, dtype=torch.int32)
        accepted = torch.full((1, 4), -1, dtype=torch.int32)
        lengths = torch.zeros(1, dtype=torch.int32)
        as_rows = [torch.tensor([each]) for each in (tokens, list(range(nodes)), children, siblings, predict)]
        verify_tree_greedily(predicts, accepted, lengths, *as_rows)
        assert predicts[accepted[0, : int(lengths[0]) + 1].long()].tolist() == expected
