"""The adapter for slime in slime's own trainer functions. They run where its source is on PYTHONPATH."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from tests.integrations.megatron.cpu_ranks import (
    PADDED_VOCAB,
    VOCAB,
    Ranks,
    make_config,
    make_layers,
    make_model,
    run,
)
from tests.integrations.megatron.packed_rollouts import LENGTHS, random_sets

pytest.importorskip("slime", reason="slime is not on PyPI; put its source on PYTHONPATH")
loss = importlib.import_module("slime.backends.megatron_utils.loss")
data = importlib.import_module("slime.backends.megatron_utils.data")
adapter = importlib.import_module("sglang_topp_integrations.megatron.slime")
original = loss.get_log_probs_and_entropy

# The second sample has no response on some ranks, and the last response token of the third is a tool's.
SAMPLES = [(prompt, response) for prompt, response in LENGTHS if response]
LAYOUTS = [
    (Ranks(), False),
    (Ranks(tp=2), False),
    (Ranks(cp=2), False),
    (Ranks(cp=2), True),
    (Ranks(tp=2, cp=2), True),
]
IDS = [f"{ranks}{'-allgather' * allgather}" for ranks, allgather in LAYOUTS]


def rollout(allgather: bool) -> tuple[Namespace, dict[str, Any]]:
    """Return slime's arguments and batch, with a set of mixed size for each response token."""
    rng = np.random.default_rng(1)
    tokens = [torch.tensor(rng.integers(0, VOCAB, sum(lengths))) for lengths in SAMPLES]
    sets = [
        random_sets(rng, ids[len(ids) - n :].tolist(), [1, 2, 3, 50], [int(i % 5 == 4) for i in range(n)])
        for ids, (_, n) in zip(tokens, SAMPLES, strict=True)
    ]
    # Any order within a set: the engine's is by log-prob.
    shuffled = [torch.tensor([token for ids, _ in each for token in ids[::-1].tolist()]) for each in sets]
    batch = {
        "unconcat_tokens": tokens,
        "total_lengths": [sum(lengths) for lengths in SAMPLES],
        "response_lengths": [n for _, n in SAMPLES],
        "top_p_token_ids": shuffled,
        "top_p_token_offsets": [torch.from_numpy(each.offsets.astype(np.int32)) for each in sets],
    }
    args = Namespace(
        rollout_temperature=0.7, allgather_cp=allgather, log_probs_chunk_size=-1, entropy_coef=0.1
    )
    return args, batch


def num_local_rows(ranks: Ranks, allgather: bool) -> int:
    totals = [sum(lengths) for lengths in SAMPLES]
    multiple = 1 if allgather or ranks.cp == 1 else 2 * ranks.cp
    padded = sum(-(-total // multiple) * multiple for total in totals)
    return -(-padded // (8 * ranks.cp)) * 8


@pytest.mark.parametrize(("ranks", "allgather"), LAYOUTS, ids=IDS)
def test_log_probs_and_gradients_equal_those_of_slime(ranks: Ranks, allgather: bool) -> None:
    for values, gradient in run(ranks, _compare_log_probs, allgather):
        assert values < 2e-6
        assert gradient < 2e-6


def _compare_log_probs(ranks: Ranks, allgather: bool) -> tuple[float, float]:
    args, batch = rollout(allgather)
    adapter.install(args)
    replaced = loss.get_log_probs_and_entropy
    assert replaced is not original
    seed = 10 * torch.distributed.get_rank()
    shape = (1, num_local_rows(ranks, allgather), PADDED_VOCAB // ranks.tp)
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    results = []
    for function in (replaced, original):
        leaf = logits.clone().requires_grad_()
        empty, found = function(leaf, args=args, with_entropy=True, **batch)
        assert empty.shape == (0,)
        log_probs = found["log_probs"]
        assert [len(each) for each in log_probs] == [len(each) for each in found["entropy"]]
        torch.cat([(i + 1) * each.sum()[None] for i, each in enumerate(log_probs)]).sum().backward()
        results.append((torch.cat(log_probs), leaf.grad))
    return tuple(float((mine - other).abs().max()) for mine, other in zip(*results, strict=True))


def test_entropies_are_those_of_the_sets() -> None:
    ((entropies, gradient, has_gradient),) = run(Ranks(), _entropies)
    assert entropies < 1e-6
    assert gradient < 1e-6
    assert not has_gradient


def _entropies(ranks: Ranks) -> tuple[float, float, bool]:
    args, batch = rollout(False)
    adapter.install(args)
    logits = torch.randn(
        1, num_local_rows(ranks, False), PADDED_VOCAB, generator=torch.Generator().manual_seed(3)
    )
    mine, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    _, found = loss.get_log_probs_and_entropy(mine, args=args, with_entropy=True, **batch)
    torch.cat(found["entropy"]).sum().backward()
    expected, start = [], 0
    for i, (prompt, response) in enumerate(SAMPLES):
        ids, edges = batch["top_p_token_ids"][i], batch["top_p_token_offsets"][i]
        for t in range(response):
            kept = ids[edges[t] : edges[t + 1]].long()
            logprobs = (other[0, start + prompt + t - 1, kept] / 0.7).log_softmax(-1)
            expected.append(-(logprobs.exp() * logprobs).sum())
        start += prompt + response
    torch.stack(expected).sum().backward()
    args.entropy_coef = 0
    _, metric = loss.get_log_probs_and_entropy(mine, args=args, with_entropy=True, **batch)
    return (
        float((torch.cat(found["entropy"]) - torch.stack(expected)).abs().max()),
        float((mine.grad - other.grad).abs().max()),
        metric["entropy"][0].requires_grad,
    )


def test_other_calls_and_other_releases() -> None:
    run(Ranks(), _others)


def _others(ranks: Ranks) -> None:
    args, batch = rollout(False)
    importer = importlib.import_module("tests.integrations.megatron.test_slime")
    importer.get_log_probs_and_entropy = original
    adapter.install(args)
    assert importer.get_log_probs_and_entropy is loss.get_log_probs_and_entropy
    plain = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    logits = torch.randn(1, num_local_rows(ranks, False), PADDED_VOCAB)
    pairs = [
        torch.cat(function(logits, args=args, **plain)[1]["log_probs"])
        for function in (original, loss.get_log_probs_and_entropy)
    ]
    assert torch.equal(*pairs)
    batch["top_p_token_offsets"][0] = batch["top_p_token_offsets"][0][:-1]
    with pytest.raises(InvalidInputError, match="top_p_token_offsets"):
        loss.get_log_probs_and_entropy(logits, args=args, **batch)
    loss.get_log_probs_and_entropy = lambda logits, *, args: None
    with pytest.raises(InvalidInputError, match="other parameters"):
        adapter.install(args)


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2, sequence_parallel=True), Ranks(tp=2, cp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_without_logits_has_the_same_gradients(ranks: Ranks, tied: bool) -> None:
    for values, gradients in run(ranks, _compare_models, tied):
        assert values < 1e-5
        assert gradients < 1e-5


def _compare_models(ranks: Ranks, tied: bool) -> tuple[float, float]:
    args, batch = rollout(False)
    iterator = data.DataIterator(
        {
            "tokens": batch["unconcat_tokens"],
            "loss_masks": [torch.ones(n) for _, n in SAMPLES],
            "total_lengths": batch["total_lengths"],
            "response_lengths": batch["response_lengths"],
        },
        [[*range(len(SAMPLES))]] * 2,
    )
    data.accelerator.device = lambda: torch.device("cpu")
    adapter.install(args)
    provided = _provided_by_slime(ranks, tied)
    model = make_model(ranks, torch.float32, tied)
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for is_hidden in (False, True):
        if is_hidden:
            provided.load_state_dict(model.state_dict())
            model = provided
        inputs = data.get_batch(iterator, ["tokens", "loss_masks", "total_lengths", "response_lengths"], 8)
        output = model(inputs["tokens"], None, None, packed_seq_params=inputs["packed_seq_params"])
        function = loss.get_log_probs_and_entropy if is_hidden else original
        _, found = function(output, args=args, **batch)
        model.zero_grad()
        (torch.cat(found["log_probs"]).sum() + 0 * output.sum()).backward()
        results.append((torch.cat(found["log_probs"]), {n: p.grad for n, p in model.named_parameters()}))
    (values, gradients), (others, expected) = results
    with pytest.raises(InvalidInputError, match="second"):
        adapter.return_hidden_states(model)
    differences = [float((gradients[name] - expected[name]).abs().max()) for name in expected]
    return float((values - others).abs().max()), max(differences)


def _provided_by_slime(ranks: Ranks, tied: bool) -> Any:
    """Build the model by slime's own model provider.

    Two functions of Megatron-LM's training script, which no package has, return its arguments and config.
    """
    args = Namespace(
        transformer_impl="local",
        spec=("tests.integrations.megatron.test_slime", "slime_layers"),
        num_experts=None,
        fp8_param_gather=False,
        padded_vocab_size=PADDED_VOCAB,
        max_position_embeddings=128,
        fp16_lm_cross_entropy=False,
        untie_embeddings_and_output_weights=not tied,
        position_embedding_type="none",
        rotary_percent=1.0,
        rotary_base=10000,
        use_rope_scaling=False,
        mtp_num_layers=None,
        custom_model_provider_path="sglang_topp_integrations.megatron.slime.model_provider",
    )
    for name, function, answer in (
        ("megatron.training", "get_args", args),
        (
            "megatron.training.arguments",
            "core_transformer_config_from_args",
            make_config(ranks, torch.float32),
        ),
    ):
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], function, lambda *_, answer=answer: answer)
    provider = importlib.import_module("slime.backends.megatron_utils.model_provider")
    return provider.get_model_provider_func(args)()


def slime_layers(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    return make_layers(config)
