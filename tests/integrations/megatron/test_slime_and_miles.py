"""The adapters for slime and Miles against the frameworks' own functions, from sources on PYTHONPATH."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_cross_entropy
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
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

MODULES = {"slime": "slime.backends.megatron_utils", "miles": "miles.backends.training_utils"}
FOUND = [name for name in MODULES if importlib.util.find_spec(name)]
FRAMEWORKS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name not in FOUND, reason=f"{name} is not on PyPI; put its source on PYTHONPATH"
        ),
    )
    for name in MODULES
]
ADAPTERS = {name: importlib.import_module(f"sglang_topp_integrations.megatron.{name}") for name in FOUND}
DATA = {name: importlib.import_module(f"{MODULES[name]}.data") for name in FOUND}
SCORING = {
    name: adapter.loss if name == "slime" else adapter.logit_processors for name, adapter in ADAPTERS.items()
}
ORIGINALS = {name: module.get_log_probs_and_entropy for name, module in SCORING.items()}

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


def rollout(framework: str, allgather: bool = False) -> tuple[Namespace, dict[str, Any], list[Any]]:
    """Return a framework's arguments and batch, and the candidate sets of its samples.

    In slime's, every fifth token is a tool's, without a set. In Miles', each token has a set.
    """
    rng = np.random.default_rng(1)
    tokens = [torch.tensor(rng.integers(0, VOCAB, sum(lengths))) for lengths in SAMPLES]
    sets = [
        random_sets(
            rng,
            ids[len(ids) - n :].tolist(),
            [1, 2, 3, 50],
            [int(framework == "slime" and i % 5 == 4) for i in range(n)],
        )
        for ids, (_, n) in zip(tokens, SAMPLES, strict=True)
    ]
    # Any order within a set: the engine's is by log-prob.
    shuffled = [torch.tensor([token for ids, _ in each for token in ids[::-1].tolist()]) for each in sets]
    offsets = [torch.from_numpy(each.offsets.astype(np.int32)) for each in sets]
    batch: dict[str, Any] = {
        "unconcat_tokens": tokens,
        "total_lengths": [sum(lengths) for lengths in SAMPLES],
        "response_lengths": [n for _, n in SAMPLES],
    }
    if framework == "slime":
        batch |= {"top_p_token_ids": shuffled, "top_p_token_offsets": offsets}
    else:
        mask = importlib.import_module("miles.utils.sampling_mask").RolloutSamplingMask
        batch["rollout_sampling_mask"] = [
            mask(ids.tolist(), edges.tolist()) for ids, edges in zip(shuffled, offsets, strict=True)
        ]
        _start_miles()
    args = Namespace(
        rollout_temperature=0.7,
        allgather_cp=allgather,
        log_probs_chunk_size=-1,
        entropy_coef=0.1,
        qkv_format="thd",
        true_on_policy_mode=False,
        use_sampling_support_replay=True,
        debug_unified_grad_fused_logprob=False,
    )
    return args, batch, sets


def _start_miles() -> None:
    """Set what Miles' scoring reads of its own parallel state, as its Megatron actor does.

    Megatron's fused cross-entropy, which it calls, rounds the gradient to bfloat16. The other one doesn't.
    """
    fused_cross_entropy.fused_vocab_parallel_cross_entropy = lambda logits, target, group: (
        vocab_parallel_cross_entropy(logits, target, tp_group=group)
    )
    parallel = importlib.import_module("miles.backends.training_utils.parallel")
    info = importlib.import_module("miles.utils.ft_utils.process_group_utils").GroupInfo
    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
    }
    state = Namespace(**{name: info(group.rank(), group.size(), group) for name, group in groups.items()})
    parallel.set_parallel_state(state)


def scores(framework: str, function: Any, logits: Tensor, args: Namespace, batch: Any) -> dict[str, Any]:
    """Call a framework's function as its loss does."""
    if framework == "slime":
        empty, found = function(logits, args=args, with_entropy=True, **batch)
        assert empty.shape == (0,)
        return found
    return function(
        logits, args=args, with_entropy=True, entropy_requires_grad=args.entropy_coef != 0, **batch
    )


def num_local_rows(ranks: Ranks, allgather: bool) -> int:
    totals = [sum(lengths) for lengths in SAMPLES]
    multiple = 1 if allgather or ranks.cp == 1 else 2 * ranks.cp
    padded = sum(-(-total // multiple) * multiple for total in totals)
    return -(-padded // (8 * ranks.cp)) * 8


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("ranks", "allgather"), LAYOUTS, ids=IDS)
def test_log_probs_and_gradients_equal_those_of_the_framework(
    framework: str, ranks: Ranks, allgather: bool
) -> None:
    for values, gradient in run(ranks, _compare_log_probs, framework, allgather):
        assert values < 1e-6
        assert gradient < 1e-6


def _compare_log_probs(ranks: Ranks, framework: str, allgather: bool) -> tuple[float, float]:
    args, batch, _ = rollout(framework, allgather)
    ADAPTERS[framework].install(args)
    replaced = SCORING[framework].get_log_probs_and_entropy
    assert replaced is not ORIGINALS[framework]
    seed = 10 * torch.distributed.get_rank()
    shape = (1, num_local_rows(ranks, allgather), PADDED_VOCAB // ranks.tp)
    logits = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    results = []
    for function in (replaced, ORIGINALS[framework]):
        leaf = logits.clone().requires_grad_()
        found = scores(framework, function, leaf, args, batch)
        log_probs = found["log_probs"]
        assert [len(each) for each in log_probs] == [len(each) for each in found["entropy"]]
        torch.cat([(i + 1) * each.sum()[None] for i, each in enumerate(log_probs)]).sum().backward()
        results.append((torch.cat(log_probs), leaf.grad))
    # Relative to the largest value: both round float32 of up to 10.
    return tuple(
        float((mine - other).abs().max() / other.abs().max()) for mine, other in zip(*results, strict=True)
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_entropies_are_those_of_the_sets(framework: str) -> None:
    ((entropies, gradient, has_gradient),) = run(Ranks(), _entropies, framework)
    assert entropies < 1e-6
    assert gradient < 1e-6
    assert not has_gradient


def _entropies(ranks: Ranks, framework: str) -> tuple[float, float, bool]:
    args, batch, sets = rollout(framework)
    ADAPTERS[framework].install(args)
    function = SCORING[framework].get_log_probs_and_entropy
    logits = torch.randn(
        1, num_local_rows(ranks, False), PADDED_VOCAB, generator=torch.Generator().manual_seed(3)
    )
    mine, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = scores(framework, function, mine, args, batch)
    torch.cat(found["entropy"]).sum().backward()
    expected, start = [], 0
    for (prompt, response), each in zip(SAMPLES, sets, strict=True):
        for t, (ids, _) in enumerate(each):
            kept = torch.tensor(ids, dtype=torch.int64)
            logprobs = (other[0, start + prompt + t - 1, kept] / 0.7).log_softmax(-1)
            expected.append(-(logprobs.exp() * logprobs).sum())
        start += prompt + response
    torch.stack(expected).sum().backward()
    args.entropy_coef = 0
    metric = scores(framework, function, mine, args, batch)
    return (
        float((torch.cat(found["entropy"]) - torch.stack(expected)).abs().max()),
        float((mine.grad - other.grad).abs().max()),
        metric["entropy"][0].requires_grad,
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_other_calls_and_other_releases(framework: str) -> None:
    run(Ranks(), _others, framework)


def _others(ranks: Ranks, framework: str) -> None:
    args, batch, _ = rollout(framework)
    loss, install, original = SCORING[framework], ADAPTERS[framework].install, ORIGINALS[framework]
    importer = importlib.import_module("tests.integrations.megatron.test_slime_and_miles")
    importer.get_log_probs_and_entropy = original
    if framework == "miles":
        for name in ("use_sampling_support_replay", "qkv_format", "true_on_policy_mode"):
            with pytest.raises(InvalidInputError, match=name):
                install(Namespace(**vars(args) | {name: None}))
    install(args)
    assert importer.get_log_probs_and_entropy is loss.get_log_probs_and_entropy is not original
    plain = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    logits = torch.randn(1, num_local_rows(ranks, False), PADDED_VOCAB)
    pairs = [
        torch.cat(scores(framework, function, logits.clone(), args, plain)["log_probs"])
        for function in (original, loss.get_log_probs_and_entropy)
    ]
    assert torch.equal(*pairs)
    *_, last = batch  # slime's offsets, or Miles' masks
    wrong: list[Any] = [[each[:-1] if framework == "slime" else batch[last][0] for each in batch[last]]]
    for value in wrong + ([None, batch[last][:-1]] if framework == "slime" else []):
        with pytest.raises(InvalidInputError, match="offsets"):
            scores(framework, loss.get_log_probs_and_entropy, logits, args, batch | {last: value})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_function_with_other_parameters_is_refused(framework: str, monkeypatch: Any) -> None:
    module = importlib.import_module(ORIGINALS[framework].__module__)
    monkeypatch.setattr(module, "get_log_probs_and_entropy", lambda logits, *, args: None)
    args = Namespace(use_sampling_support_replay=True, qkv_format="thd", true_on_policy_mode=False)
    with pytest.raises(InvalidInputError, match="other parameters"):
        ADAPTERS[framework].install(args)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [Ranks(), Ranks(tp=2, sequence_parallel=True), Ranks(tp=2, cp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_without_logits_has_the_same_gradients(framework: str, ranks: Ranks, tied: bool) -> None:
    for values, gradients in run(ranks, _compare_models, framework, tied):
        assert values < 1e-5
        assert gradients < 1e-5


def _compare_models(ranks: Ranks, framework: str, tied: bool) -> tuple[float, float]:
    args, batch, _ = rollout(framework)
    adapter, data, original = ADAPTERS[framework], DATA[framework], ORIGINALS[framework]
    iterator = data.DataIterator(
        {
            "tokens": batch["unconcat_tokens"],
            "loss_masks": [torch.ones(n) for _, n in SAMPLES],
            "total_lengths": batch["total_lengths"],
            "response_lengths": batch["response_lengths"],
        },
        micro_batch_indices=[[*range(len(SAMPLES))]] * 2,
    )
    if framework == "slime":
        data.accelerator.device = lambda: torch.device("cpu")
    adapter.install(args)
    provided = _provided_model(framework, ranks, tied)
    model = make_model(ranks, torch.float32, tied)
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for is_hidden in (False, True):
        if is_hidden:
            provided.load_state_dict(model.state_dict())
            model = provided
        inputs = data.get_batch(iterator, ["tokens", "loss_masks", "total_lengths", "response_lengths"], 8)
        packed = inputs.get("packed_seq_params") or PackedSeqParams("thd", cu_seqlens_q=inputs["cu_seqlens"])
        output = model(inputs["tokens"], None, None, packed_seq_params=packed)
        function = SCORING[framework].get_log_probs_and_entropy if is_hidden else original
        found = scores(framework, function, output, args, batch)
        model.zero_grad()
        (torch.cat(found["log_probs"]).sum() + 0 * output.sum()).backward()
        results.append((torch.cat(found["log_probs"]), {n: p.grad for n, p in model.named_parameters()}))
    (values, gradients), (others, expected) = results
    with pytest.raises(InvalidInputError, match="second"):
        adapter.return_hidden_states(model)
    differences = [float((gradients[name] - expected[name]).abs().max()) for name in expected]
    return float((values - others).abs().max()), max(differences)


def _provided_model(framework: str, ranks: Ranks, tied: bool) -> Any:
    """Build the model by the framework's own model provider.

    Two functions of Megatron-LM's training script, which no package has, return its arguments and config.
    """
    args = Namespace(
        transformer_impl="local",
        spec=("tests.integrations.megatron.test_slime_and_miles", "provided_layers"),
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
        custom_model_provider_path=f"sglang_topp_integrations.megatron.{framework}.model_provider",
        megatron_to_hf_mode="raw",
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
    provider = importlib.import_module(f"{framework}.backends.megatron_utils.model_provider")
    return provider.get_model_provider_func(args)()


def provided_layers(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    return make_layers(config)
