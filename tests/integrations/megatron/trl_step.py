"""Repeat a step of TRL's on a `GPTModel`: `trl_step.py STEP`, where `tests/integrations/trl` wrote `STEP`.

It prints as JSON, for each layout of ranks, what differs from the engine and from TRL.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn.functional import silu

from sglang_topp.batch import PackedCollator
from tests.integrations.megatron.cpu_ranks import Ranks, make_config, make_layers, run
from tests.integrations.megatron.test_scores import by_adapter, make_context, run_schedule

LAYOUTS = [Ranks(), Ranks(tp=2, sequence_parallel=True), Ranks(cp=2)]


def main(path: str) -> None:
    step = torch.load(path, weights_only=False)
    print(json.dumps({str(ranks): run(ranks, repeat, step) for ranks in LAYOUTS}))


def repeat(ranks: Ranks, step: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's ratios to the engine, with the sets and without, and how far its gradient is off."""
    asked = {"replay": True, "full": True, "temperature": step["temperature"]}
    batch = PackedCollator(
        max_tokens=64, pad_token_id=0, tp_size=ranks.tp, cp_size=ranks.cp
    ).collate_rollouts(
        step["rollouts"],
        [0.0] * len(step["rollouts"]),
        fields={
            "advantages": [
                np.full(len(rollout.output_ids), advantage, np.float32)
                for rollout, advantage in zip(step["rollouts"], step["advantages"], strict=True)
            ]
        },
    )

    def local(name: str, row: int) -> Tensor:
        """Return a field's values of the positions that this rank scores."""
        scored = batch["response_mask"][row].bool()
        return make_context(batch, row, asked).rows.take(batch[name][row][scored])

    def loss(scores: dict[str, Tensor], row: int) -> Tensor:
        advantages, ratios = local("advantages", row), (scores["logprobs"] - local("logprobs", row)).exp()
        objective = torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
        return -objective.sum() * len(batch["sequences"]) / step["normalizer"]

    def scores_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, weight in model.module.named_parameters():
            weight.data.copy_(as_megatron(weights, step["config"])[name])
        model.zero_grad_buffer()
        return run_schedule(ranks, model, batch, by_adapter(ranks, asked), loss)

    module = make_qwen2(ranks, step["config"])
    model = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module)
    module.config.finalize_model_grads_func = finalize_model_grads
    found = scores_of(step["start"])
    old = torch.cat([local("logprobs", row) for row in range(len(batch["sequences"]))])

    def ratios(name: str) -> list[float]:
        scores = [values for key, values in found.items() if key.startswith(f"{name} ")]
        return (torch.cat(scores) - old).exp().tolist()

    answer = {"ratios": ratios("logprobs"), "full_ratios": ratios("full_logprobs")}
    found = scores_of(step["end"])
    expected = as_megatron(step["gradient"], step["config"])
    gradient = {name: weight.main_grad for name, weight in module.named_parameters()}
    assert gradient.keys() == expected.keys()
    worst = max(
        float((gradient[name] - each).abs().max() / each.abs().max()) for name, each in expected.items()
    )
    return answer | {"later_ratios": ratios("logprobs"), "gradient": worst}


def make_qwen2(ranks: Ranks, config: dict[str, Any]) -> GPTModel:
    """Make the `GPTModel` of a Qwen2 config of transformers."""
    megatron_config = make_config(
        ranks,
        torch.float32,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        ffn_hidden_size=config["intermediate_size"],
        layernorm_epsilon=config["rms_norm_eps"],
        add_qkv_bias=True,
        gated_linear_unit=True,
        activation_func=silu,
    )
    return GPTModel(
        megatron_config,
        make_layers(megatron_config),
        config["vocab_size"],
        config["max_position_embeddings"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=config["rope_parameters"]["rope_theta"],
    )


def as_megatron(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return this rank's part of a Qwen2 model's weights, or of their gradients, under `GPTModel`'s names."""
    group = parallel_state.get_tensor_model_parallel_group()

    def rows(*names: str, groups: int) -> Tensor:
        parts = [tensors[name].unflatten(0, (groups, -1)) for name in names]
        return torch.cat(parts, 1).flatten(0, 1).chunk(group.size())[group.rank()]

    def columns(name: str) -> Tensor:
        return tensors[name].chunk(group.size(), 1)[group.rank()]

    found = {
        "embedding.word_embeddings.weight": rows("model.embed_tokens.weight", groups=1),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
        "output_layer.weight": rows("lm_head.weight", groups=1),
    }
    for i in range(config["num_hidden_layers"]):
        mine, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        for kind in ("weight", "bias"):
            names = [f"{attention}.{name}_proj.{kind}" for name in "qkv"]
            qkv = rows(*names, groups=config["num_key_value_heads"])
            found[f"{mine}.self_attention.linear_qkv.{kind}"] = qkv
        found |= {
            f"{mine}.self_attention.linear_proj.weight": columns(f"{attention}.o_proj.weight"),
            f"{mine}.input_layernorm.weight": tensors[f"{theirs}.input_layernorm.weight"],
            f"{mine}.pre_mlp_layernorm.weight": tensors[f"{theirs}.post_attention_layernorm.weight"],
            f"{mine}.mlp.linear_fc1.weight": rows(
                f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight", groups=group.size()
            ),
            f"{mine}.mlp.linear_fc2.weight": columns(f"{mlp}.down_proj.weight"),
        }
    return found


if __name__ == "__main__":
    main(sys.argv[1])
