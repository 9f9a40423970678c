"""One rank of `test_tensor_parallel`.

    python tensor_parallel_rank.py RANK RANKS RENDEZVOUS_FILE

Every case computes its values twice: on this rank as a part of the group, and alone. It prints their largest
difference, relative to the largest value, as one JSON line.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from distillation_oracle import teacher_sets
from replay_oracle import EMPTY, SINGLE, error, leaves, mixed, random_sets, targets_of

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import (
    Layout,
    candidate_index,
    distillation_loss,
    replay_metrics,
    replayed_old_logprobs,
    score,
    score_logits,
)

H = 19
SIZES = [3, SINGLE, 7, EMPTY, 5, 2, SINGLE, EMPTY, 5, 4, 2]
T = len(SIZES)
VALUES = ("logprobs", "entropy", "candidate_logprobs", "kl", "full_logprobs", "full_entropy")
FORMS = [(direction, outside) for direction in ("forward", "reverse") for outside in ("tail", "renormalized")]


def vocab_range(vocab_size: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the first and the last + 1 row of a rank's head, as `torch.chunk` splits them."""
    width = -(-vocab_size // tp_size)
    return min(tp_rank * width, vocab_size), min((tp_rank + 1) * width, vocab_size)


@contextmanager
def dense_share(share: float):
    """Compute positions from logits over the whole vocabulary if their sets are at least this share of it."""
    before = dict(candidate_index.DENSE_SHARES)
    candidate_index.DENSE_SHARES.update(dict.fromkeys(before, candidate_index.DenseShare(share, 0)))
    yield
    candidate_index.DENSE_SHARES.update(before)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def worst(pairs) -> float:
    return max(error(mine, alone) for mine, alone in pairs)


def values_of(result) -> dict[str, torch.Tensor]:
    return {name: getattr(result, name) for name in VALUES if getattr(result, name, None) is not None}


def both(function, whole: dict, shared: tuple[str, ...], cut, vocab: int, group, **options) -> float:
    """Run `function` alone on the whole tensors and in the group on this rank's `cut` of them."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    start, stop = vocab_range(vocab, ranks, rank)
    alone = dict(zip(whole, leaves(*whole.values()), strict=True))
    result = function(**alone, **options)
    expected = values_of(result)
    mixed(expected).backward()

    mine = {
        name: leaves(tensor if name in shared or tensor is None else cut(name, tensor, start, stop))[0]
        for name, tensor in whole.items()
    }
    got = values_of(function(**mine, **options, tp_group=group, vocab_start=start))
    mixed(got).backward()
    pairs = [(got[name], expected[name]) for name in expected]
    for name, tensor in mine.items():
        if tensor is not None:
            gradient = alone[name].grad
            pairs.append((tensor.grad, gradient if name in shared else cut(name, gradient, start, stop)))
    return worst(pairs)


def head_case(function, group, vocab: int, dtype=torch.float64, **options) -> float:
    whole = {
        "hidden": draw(T, H).to(dtype),
        "weight": draw(vocab, H).to(dtype),
        "bias": draw(vocab).to(dtype),
    }
    return both(function, whole, ("hidden",), lambda _, x, a, b: x[a:b], vocab, group, **options)


def logits_case(function, group, vocab: int, dtype=torch.float64, **options) -> float:
    whole = {"logits": 3 * draw(T, vocab).to(dtype)}
    return both(function, whole, (), lambda _, x, a, b: x[:, a:b], vocab, group, **options)


def tensor_parallel(group) -> dict[str, float]:
    out = {}
    adjust = {
        "temperature": torch.linspace(0.3, 1.7, T, dtype=torch.float64),
        "softcap": 2.5,
        "logit_scale": 0.4,
    }
    for vocab, vocab_size in ((61, None), (64, 61), (7, None), (9, 8)):
        # 61 and 9 ids: the last shard is shorter, or empty on 4 ranks. 64 and 9: padded beyond 61 and 8.
        sets = random_sets(SIZES, vocab_size or vocab)
        targets = targets_of(sets).clamp(min=0)
        asked = {
            "targets": targets,
            "sets": sets,
            "entropy": True,
            "per_candidate": True,
            "kl_to": -draw(sum(SIZES)).abs(),
            "vocab_size": vocab_size,
        }
        full = {"targets": targets, "entropy": True, "vocab_size": vocab_size, "chunk_rows": 3}
        name = f"vocab {vocab}" + (f" padded from {vocab_size}" if vocab_size else "")
        out[f"head, {name}"] = head_case(score, group, vocab, **asked, **adjust)
        out[f"logits, {name}"] = logits_case(score_logits, group, vocab, **asked, full=True)
        out[f"full head, {name}"] = head_case(score, group, vocab, **full, **adjust)
        out[f"full logits, {name}"] = logits_case(score_logits, group, vocab, **full, temperature=0.7)
    for share in (0.05, 0.0):  # some or all positions with two or more candidates are dense
        with dense_share(share):
            sets = random_sets([*SIZES[:-2], 61, 30], 61)
            targets = targets_of(sets).clamp(min=0)
            asked = {"targets": targets, "sets": sets, "entropy": True}
            listed = {"per_candidate": True, "kl_to": -draw(len(sets.token_ids)).abs()}
            name = "some dense positions" if share else "all positions dense"
            out[f"head, {name}"] = head_case(score, group, 61, **asked, **adjust)
            out[f"head, each candidate, {name}"] = head_case(score, group, 61, **asked, **listed, **adjust)
            out[f"head, both, {name}"] = head_case(score, group, 61, **asked, full=True, **adjust)
            out[f"logits, {name}"] = logits_case(score_logits, group, 61, **asked)
            out[f"logits, both, {name}"] = logits_case(score_logits, group, 61, **asked, full=True)
    sets = random_sets(SIZES, 61)
    plain = {"targets": targets_of(sets), "sets": sets, "entropy": True}
    copied = plain | {"sets": sets.to_torch()}
    out["head, over tensors"] = max(head_case(score, group, 61, **copied) for _ in range(2))
    out["bfloat16 head"] = head_case(score, group, 61, dtype=torch.bfloat16, **plain)
    return out


def distilled(group) -> dict[str, float]:
    """Tails that are spread over the ranks, and sets of the whole vocabulary, which have no tail."""
    out = {}
    adjust = {
        "temperature": torch.linspace(0.3, 1.7, T, dtype=torch.float64),
        "softcap": 2.5,
        "logit_scale": 0.4,
    }
    for vocab, vocab_size in ((61, None), (9, 8)):
        teacher = 2 * draw(T, vocab_size or vocab)
        usual = teacher_sets(teacher, 0.8, [1] * T, empty=(3,))
        whole = teacher_sets(teacher, 1.0, [1] * T)
        sets = CandidateSets.concat([usual[:-2], whole[-2:]])
        for direction, outside in FORMS:
            asked = {
                "teacher_sets": sets,
                "direction": direction,
                "outside": outside,
                "loss_mask": [0] + [1] * (T - 1),
                "vocab_size": vocab_size,
                "chunk_rows": 3,
            }
            name = f"distillation, {direction}, {outside}, vocab {vocab}"
            out[name] = head_case(distillation_loss, group, vocab, **asked, **adjust)
    sets = teacher_sets(2 * draw(T, 61), 0.8, [1] * T)
    asked = {"teacher_sets": sets, "direction": "forward", "outside": "tail"}
    out["bfloat16 distillation"] = head_case(distillation_loss, group, 61, dtype=torch.bfloat16, **asked)
    return out


def weight_grads(group) -> dict[str, float]:
    """Compare gradients of two micro-batches, in a buffer of this rank's rows, with one process."""
    out = {}
    for vocab, vocab_size in ((61, None), (9, 8)):
        start, stop = vocab_range(vocab, dist.get_world_size(group), dist.get_rank(group))
        hidden, weight = leaves(draw(T, H), draw(vocab, H))
        local_hidden, local_weight = leaves(hidden, weight[start:stop])
        local_weight.main_grad = torch.zeros_like(local_weight.detach())
        for seed in range(2):
            sets = random_sets(SIZES, vocab_size or vocab, seed=seed)
            asked = {"targets": targets_of(sets).clamp(min=0), "sets": sets, "vocab_size": vocab_size}
            sharded = asked | {"tp_group": group, "vocab_start": start}
            mixed(values_of(score(hidden, weight, **asked))).backward()
            sharded["weight_grad"] = local_weight.main_grad
            mixed(values_of(score(local_hidden, local_weight, **sharded))).backward()
        assert local_weight.grad is None
        pairs = [
            (local_weight.main_grad, weight.grad[start:stop]),
            (local_hidden.grad, hidden.grad),
        ]
        out[f"gradient of the head in a buffer, vocab {vocab}"] = worst(pairs)
    return out


def data_parallel(group) -> dict[str, float]:
    """DistributedDataParallel also reduces gradients that were added to `weight.grad` outside of autograd."""

    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(H, H), torch.nn.Linear(H, 61, bias=False)

        def forward(self, states, sets, buffered):
            weight = self.head.weight
            if buffered and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            where = weight.grad if buffered else "dense"
            return score(self.body(states), weight, targets_of(sets), sets, weight_grad=where).logprobs

    out = {}
    for bucket_view in (False, True):
        grads = []
        for buffered in (False, True):
            torch.manual_seed(0)
            policy = Policy().double()
            wrapped = torch.nn.parallel.DistributedDataParallel(
                policy, process_group=group, gradient_as_bucket_view=bucket_view
            )
            for step in range(2):
                policy.zero_grad()
                for micro in range(2):
                    seed = dist.get_rank(group) + 10 * micro + 100 * step
                    sets, states = random_sets(SIZES, 61, seed=seed), draw(T, H, seed=seed)
                    with wrapped.no_sync() if micro < 1 else nullcontext():
                        wrapped(states, sets, buffered).sum().backward()
            grads.append([parameter.grad for parameter in policy.parameters()])
        out["data parallel" + " in bucket views" * bucket_view] = worst(zip(*grads, strict=True))
    return out


def ruled_out_on_one_rank(group) -> dict[str, float]:
    """All logits of one rank's shard are -inf. The other ranks hold the mass."""
    vocab = 16
    sets = random_sets([16, 5], vocab)
    start, stop = vocab_range(vocab, dist.get_world_size(group), 1)
    logits = draw(2, vocab)
    logits[:, start:stop] = -torch.inf
    targets = torch.tensor([int(ids[(ids < start) | (ids >= stop)][0]) for ids, _ in sets])
    (alone,) = leaves(logits)
    want = score_logits(alone, targets, sets, entropy=True, full=True)
    low, high = vocab_range(vocab, dist.get_world_size(group), dist.get_rank(group))
    (mine,) = leaves(logits[:, low:high])
    got = score_logits(mine, targets, sets, entropy=True, full=True, tp_group=group, vocab_start=low)
    mixed(values_of(want)).backward()
    mixed(values_of(got)).backward()
    pairs = [(values_of(got)[name], value) for name, value in values_of(want).items()]
    return {"a shard of -inf": worst([*pairs, (mine.grad, alone.grad[:, low:high])])}


def raised_everywhere(group) -> dict[str, float]:
    """An error that only one rank detects is raised on all ranks, or the others would wait forever."""
    out = {}
    vocab, sets = 61, random_sets(SIZES, 61)
    start, stop = vocab_range(vocab, dist.get_world_size(group), dist.get_rank(group))
    hidden, weight, targets = draw(T, H), draw(vocab, H), targets_of(sets)
    broken = weight.clone()
    broken[0] = torch.nan  # held by rank 0
    everywhere = random_sets([61], 61)
    calls = {
        "log-prob at position 0 is NaN": lambda: score(
            hidden[:1],
            broken[start:stop],
            targets_of(everywhere),
            everywhere,
            tp_group=group,
            vocab_start=start,
        ),
        "vocabulary shards hold": lambda: score(
            hidden, weight[start + 1 : stop], targets, sets, tp_group=group, vocab_start=start + 1
        ),
        "is not in the vocabulary": lambda: score(
            hidden, weight[start:stop], targets.clamp(min=0) + 61, tp_group=group, vocab_start=start
        ),
    }
    for message, call in calls.items():
        try:
            call()
        except InvalidInputError as problem:
            out[f"raises {message!r}"] = 0.0 if message in str(problem) else 1.0
        else:
            out[f"raises {message!r}"] = 1.0
    return out


def context_parallel(cp_group, tp_group=None) -> dict[str, float]:
    """Each rank scores its rows of each layout. Together they equal the rows of one process."""
    cp_size, cp_rank = dist.get_world_size(cp_group), dist.get_rank(cp_group)
    prompts, responses = [3, 0, 5, 2, 1], [4, 6, 0, 7, 3]
    rng = np.random.default_rng(0)
    num_positions, vocab = sum(responses), 61
    sets = random_sets(rng.integers(0, 8, num_positions).tolist(), vocab)
    loss_mask = rng.random(num_positions) < 0.8
    ids = targets_of(sets).clamp(min=0)
    weights = draw(num_positions)
    start, stop = (0, vocab) if tp_group is None else vocab_range(vocab, 2, dist.get_rank(tp_group))

    # Padded on both sides, row by row; 24 columns can be cut into 2 * cp_size chunks.
    padded = np.zeros((len(prompts), 24), np.int64)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        before = [0, 24 - prompt - response, 5][i % 3]
        padded[i, before : before + prompt + response] = 1

    def run(layout: Layout, hidden, weight, cp_group, **sharded):
        rows = layout.select_rows(prompts, responses, loss_mask=loss_mask)
        picked = rows.select(hidden)
        replayed = score(picked, weight, rows.take(ids), rows.take_sets(sets), entropy=True, **sharded)
        unmasked = score(picked, weight, rows.take(ids), entropy=True, **sharded)
        values = [replayed.logprobs, replayed.entropy, unmasked.logprobs, unmasked.entropy]
        spread = [rows.scatter(value, cp_group) for value in values]
        sum((value * weights * (n + 1)).sum() for n, value in enumerate(spread)).backward()
        return spread

    out = {}
    for format_, mask in (("packed", None), ("padded", padded)):
        for split in ("zigzag", "contiguous"):
            alone_layout = Layout(attention_mask=mask)
            alone_rows = alone_layout.select_rows(prompts, responses)
            hidden, weight = leaves(draw(alone_rows.num_hidden_rows, H), draw(vocab, H))
            expected = run(alone_layout, hidden, weight, None)

            # This rank's hidden states: the rows that it scores, and noise elsewhere.
            layout = Layout(split, cp_size, cp_rank, mask)
            rows = layout.select_rows(prompts, responses)
            local = draw(rows.num_hidden_rows, H, seed=7)
            alone_at = dict(zip(alone_rows.positions, alone_rows.hidden_rows, strict=True))
            source = torch.tensor([int(alone_at[p]) for p in rows.positions], dtype=torch.int64)
            local[torch.tensor(rows.hidden_rows)] = hidden.detach()[source]
            mine, my_weight = leaves(local, weight.detach()[start:stop])
            sharded = {} if tp_group is None else {"tp_group": tp_group, "vocab_start": start}
            got = run(layout, mine, my_weight, cp_group, **sharded)

            # Every rank of the group holds the same head; data-parallel training sums its gradient.
            dist.all_reduce(my_weight.grad, group=cp_group)
            pairs = list(zip(got, expected, strict=True))
            pairs.append((my_weight.grad, weight.grad[start:stop]))
            pairs.append((mine.grad[torch.tensor(rows.hidden_rows)], hidden.grad[source]))
            others = torch.ones(len(local), dtype=torch.bool)
            others[torch.tensor(rows.hidden_rows)] = False
            assert not mine.grad[others].any()
            out[f"{format_} {split}" + ("" if tp_group is None else " with tensor parallelism")] = worst(
                pairs
            )

    layout = Layout("zigzag", cp_size, cp_rank)
    rows, everything = layout.select_rows(prompts, responses), Layout().select_rows(prompts, responses)
    new = draw(num_positions)
    old = replayed_old_logprobs(sets)
    part = replay_metrics(rows.take(new), rows.take(old), rows.take_sets(sets)).all_reduce(cp_group)
    whole = replay_metrics(everything.take(new), everything.take(old), everything.take_sets(sets))
    out["metrics" + ("" if tp_group is None else " with tensor parallelism")] = worst(
        [(torch.tensor(a), torch.tensor(b)) for a, b in zip(astuple(part), astuple(whole), strict=True)]
    )
    return out


def main() -> None:
    rank, ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    world = dist.group.WORLD
    results = tensor_parallel(world) | ruled_out_on_one_rank(world) | raised_everywhere(world)
    results |= distilled(world) | weight_grads(world) | context_parallel(world)
    if ranks == 2:
        results |= data_parallel(world)
    if ranks == 4:
        tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        cp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        results |= context_parallel(cp_groups[rank % 2], tp_groups[rank // 2])
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
