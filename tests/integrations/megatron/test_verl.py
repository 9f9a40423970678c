"""The adapter's engine in verl's own pass over a batch, against verl's engine on densely masked logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from verl.models.mcore.util import preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreEngineConfig
from verl.workers.engine import EngineRegistry, MegatronEngineWithLMHead

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import InvalidInputError
from sglang_topp_integrations.verl import FIELD, ReplayMegatronEngine
from tests.integrations.megatron.cpu_ranks import PADDED_VOCAB, VOCAB, Ranks, make_model, run
from tests.integrations.megatron.packed_rollouts import LENGTHS, SIZES, random_sets, weighted_sum
from tests.integrations.megatron.test_scores import deviation, gradients

LAYOUTS = [
    Ranks(),
    Ranks(tp=2, sequence_parallel=True),
    Ranks(cp=2),
    Ranks(pp=2),
    Ranks(tp=2, cp=2, sequence_parallel=True),
]
# verl packs a row's prompt and response. The last row is padding: a copy without a loss.
ROWS = [(prompt, response) for prompt, response in LENGTHS if response]


def make_batch() -> Any:
    """Return verl's batch of rollouts with candidate sets."""
    rng = np.random.default_rng(2)
    tokens = [torch.tensor(rng.integers(0, VOCAB, prompt + response)) for prompt, response in ROWS]
    tools = [[int(i % 4 == 2) for i in range(response)] for _, response in ROWS]
    responses = [ids[prompt:] for ids, (prompt, _) in zip(tokens, ROWS, strict=True)]
    masks = [1 - torch.tensor(tool) for tool in tools]
    masks[-1] = torch.zeros_like(masks[-1])
    nested = {"input_ids": tokens, "responses": responses, "response_mask": masks, "loss_mask": masks}
    packed = []
    for ids, tool in zip(responses, tools, strict=True):
        sets = random_sets(rng, ids.tolist(), SIZES["mixed"], tool)
        logprobs = np.zeros(len(sets.token_ids))  # verl's sets have them
        packed.append(formats.pack(CandidateSets(sets.token_ids, logprobs, sets.offsets, sets.sampled_ids)))
    return tu.get_tensordict(
        {
            **{
                name: torch.nested.as_nested_tensor(each, layout=torch.jagged)
                for name, each in nested.items()
            },
            "temperature": torch.tensor([0.7, 1.0, 1.3, 0.9]),
            FIELD: packed,
        },
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "calculate_entropy": True},
    )


class DenseMask(MegatronEngineWithLMHead):
    """verl's own engine. Outside of the sets, the logits are too low to count."""

    def _lm_head_logits_processor(self, logits: Tensor, *args: Any, batch: Any, **options: Any) -> Any:
        masks = []
        for ids, response, packed in zip(
            batch["input_ids"].unbind(), batch["responses"].unbind(), batch[FIELD], strict=True
        ):
            mask = torch.ones(len(ids), PADDED_VOCAB)
            for i, (kept, _) in enumerate(formats.unpack(packed)):
                if len(kept):
                    mask[len(ids) - len(response) - 1 + i] = 0
                    mask[len(ids) - len(response) - 1 + i, torch.tensor(kept).long()] = 1
            masks.append(mask)
        mask, *_ = preprocess_thd_engine(
            torch.nested.as_nested_tensor(masks, layout=torch.jagged),
            pad_to_length_bucket=self.engine_config.pad_to_length_bucket
            if self.engine_config.pad_to_length
            else None,
        )
        start = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        is_kept = mask[..., start : start + logits.shape[-1]] != 0
        return super()._lm_head_logits_processor(
            logits.masked_fill(~is_kept, -1e30), *args, batch=batch, **options
        )


@pytest.mark.parametrize("ranks", LAYOUTS, ids=str)
@pytest.mark.parametrize("pad_to_length", [False, True], ids=["", "padded"])
def test_scores_and_gradients_equal_those_of_a_dense_mask(ranks: Ranks, pad_to_length: bool) -> None:
    for rank, (values, grads) in enumerate(run(ranks, _compare, pad_to_length)):
        assert values < 1e-5, rank
        assert grads < 1e-5, rank


def _compare(ranks: Ranks, pad_to_length: bool) -> tuple[float, float]:
    model = make_model(
        ranks, torch.float32, tied=False, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall"
    )
    results: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for engine_class in (ReplayMegatronEngine, DenseMask):
        engine = make_engine(engine_class, pad_to_length=pad_to_length, pad_to_length_bucket=40)
        engine.module, engine.tf_config = [model], model.config
        model.zero_grad()
        batch = make_batch()
        output = engine.forward_backward_batch(batch, weighted_loss).get("model_output", {})
        scores = {name: scored(rows, batch) for name, rows in output.items()}
        results.append((scores, gradients(model)))
    return tuple(deviation(mine, theirs) for mine, theirs in zip(*results, strict=True))


def scored(rows: Tensor, batch: Any) -> Tensor:
    """Return the values of the positions with a loss, which predict their tokens."""
    return torch.cat(
        [
            row[-len(mask) - 1 : -1][mask.bool()]
            for row, mask in zip(rows.unbind(), batch["response_mask"].unbind(), strict=True)
        ]
    )


def weighted_loss(model_output: Any, data: Any, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return a loss in which every score of every position has another weight."""
    scores = {name: scored(model_output[name], data) for name in sorted(model_output)}
    return weighted_sum(scores, torch.linspace(-1, 2, len(scores["log_probs"]))), {}


def make_engine(engine_class: Any, **options: Any) -> Any:
    """Make an engine. Its `initialize`, which loads a model through Megatron-Bridge, is not called."""
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        lora=options.pop("lora", {}),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    settings: dict[str, Any] = {"use_remove_padding": True, "use_fused_kernels": False}
    return engine_class(model_config, McoreEngineConfig(**(settings | options)), None, None)


def test_verl_makes_the_engine() -> None:
    assert EngineRegistry.get_engine_cls("language_model", "megatron") is ReplayMegatronEngine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_fused_kernels": True}, "use_fused_kernels: got True, .* they return no logits"),
        ({"use_remove_padding": False}, "use_remove_padding: got False, .* the sets are packed"),
        (
            {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 8},
            "dynamic_context_parallel: got True",
        ),
        ({"lora": {"rank": 8}}, r"model\.lora\.rank: got 8, expected 0"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_engine(ReplayMegatronEngine, **options)
