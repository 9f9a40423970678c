"""SGLang's kernels of speculative verification in plain torch and NumPy, for machines without an accelerator.

No package of SGLang has them for a CPU. Each function takes what SGLang passes to the kernel of that name and
returns or writes what the kernel does. `test_kernels` compares each with its definition.

Shape legend: B requests, D nodes of a request's tree, A accepted tokens at most, V vocabulary, N rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["renorm_top_k", "renorm_top_p", "sample_tree", "verify_tree_greedily"]


def renorm_top_k(probs_NV: Tensor, top_k_N: Tensor) -> Tensor:
    """Keep the tokens that are at least as likely as the k-th, ties included, and renormalize."""
    vocab = probs_NV.shape[1]
    order_NV = probs_NV.sort(dim=-1, descending=True).values
    last_N1 = order_NV.gather(1, (top_k_N.long().clamp(1, vocab) - 1)[:, None])
    return _normalized(probs_NV * (probs_NV >= last_N1))


def renorm_top_p(probs_NV: Tensor, top_p_N: Tensor) -> Tensor:
    """Keep the tokens above which there is less mass than p, ties included, and renormalize."""
    order_NV = probs_NV.sort(dim=-1, descending=True).values
    above_NV = order_NV.double().cumsum(-1) - order_NV.double()
    is_kept_NV = (above_NV < top_p_N[:, None]) & (order_NV > 0)
    last_N1 = order_NV.gather(1, (is_kept_NV.sum(1) - 1).clamp(min=0)[:, None])
    return _normalized(probs_NV * (probs_NV >= last_N1))


def _normalized(probs_NV: Tensor) -> Tensor:
    return probs_NV / probs_NV.sum(-1, keepdim=True)


def sample_tree(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    accepts_zero_mass: bool = False,
) -> None:
    """Walk each tree from its root, and draw every token from the target's distribution at its node.

    Args:
        predicts: int32 [B * D], written: the token drawn at each visited node.
        accept_index: int32 [B, A], written: the visited nodes, the root first. The rest keeps its -1.
        accept_token_num: int32 [B], written: how many drafts were accepted.
        candidates: int64 [B, D], the drafted tokens. The root's is already committed.
        retrive_index: int64 [B, D], the nodes' places in `predicts`.
        retrive_next_token: int64 [B, D], a node's first child, or -1.
        retrive_next_sibling: int64 [B, D], a node's next sibling, or -1.
        uniform_samples: float32 [B, D], the coins for the drafts below each node.
        uniform_samples_for_final_sampling: float32 [B].
        target_probs: float32 [B, D, V].
        draft_probs: float32 [B, D, V], zeros, written: the mass of rejected drafts.
        threshold_single: accept a draft of at least this mass.
        threshold_acc: accept a draft if its coin is below the mass so far, divided by this.
        deterministic: ignored; the sums are.
        accepts_zero_mass: behave as the kernel before SGLang's pull request 35798.
    """
    targets, drafts = target_probs.numpy(), draft_probs.numpy()
    coins, last_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    places, count_at_most = retrive_index.tolist(), accept_index.shape[1] - 1
    walks = zip(candidates.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist(), strict=True)
    for row, (tokens, children, siblings) in enumerate(walks):
        path, node, mass, coin = [0], 0, 0.0, coins[row][0]
        drawn: list[int] = []
        while len(drawn) < count_at_most:
            at, node = node, children[node]
            while node != -1:
                prob = float(targets[row, at, tokens[node]])
                mass += prob
                is_accepted = coin <= mass / threshold_acc or prob >= threshold_single
                if not accepts_zero_mass:
                    is_accepted = prob > 0 and (coin < mass / threshold_acc or prob >= threshold_single)
                if is_accepted:
                    break
                drafts[row, at, tokens[node]] = prob
                node = siblings[node]
            if node == -1:
                break
            mass, coin = 0.0, coins[row][node]
            drawn.append(tokens[node])
            path.append(node)
        rest = targets[row, path[-1]]
        if len(drawn) != count_at_most:
            rest = np.maximum(rest - drafts[row, path[-1]], 0)
        drawn.append(_draw(rest, last_coins[row]))
        accept_token_num[row] = len(drawn) - 1
        for place, (node, token) in enumerate(zip(path, drawn, strict=True)):
            accept_index[row, place] = places[row][node]
            predicts[places[row][node]] = token


def _draw(weights: NDArray[np.float32], coin: float) -> int:
    """Return the first token whose cumulative weight exceeds the coin's share of the total."""
    sums = weights.cumsum()
    (exceeding,) = np.nonzero((sums > np.float32(coin) * sums[-1]) & (weights > 0))
    (possible,) = np.nonzero(weights > 0)
    if len(exceeding):
        return int(exceeding[0])
    return int(possible[-1]) if len(possible) else len(weights) - 1


def verify_tree_greedily(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the drafts that are the target's most likely tokens; see `sample_tree` for the arguments.

    Args:
        target_predict: int64 [B, D], the target's most likely token at each node.
        topk: ignored.
    """
    for row in range(len(candidates)):
        node, count = 0, 0
        while True:
            place = int(retrieve_index[row, node])
            accept_index[row, count] = place
            token = int(target_predict[row, node])
            predicts[place] = token
            child = int(retrieve_next_token[row, node])
            while child != -1 and int(candidates[row, child]) != token:
                child = int(retrieve_next_sibling[row, child])
            if child == -1 or count + 1 == accept_index.shape[1]:
                break
            node, count = child, count + 1
        accept_token_num[row] = count
    return predicts, accept_index, accept_token_num
