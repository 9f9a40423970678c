"""What cannot be replayed is refused at construction, or before a loss, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from datasets import Dataset, IterableDataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError
from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_integrations import trl as adapter
from sglang_topp_integrations.trl import ReplayMixin, SGLangRollouts, rollout_fields
from tests.integrations.trl.candidate_rows import random_rows
from tests.integrations.trl.recording_trainer import make_trainer

Make = Callable[..., Any]


def no_rollouts(prompts: Any, trainer: Any) -> Any:
    raise AssertionError("a rollout began")


@pytest.fixture
def make(model_path: Path, tmp_path: Path) -> Make:
    def made(rollout_func: Any = no_rollouts, **kwargs: Any) -> Any:
        return make_trainer(model_path, rollout_func, tmp_path, **kwargs)

    return made


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use_vllm": True}, "use_vllm: got True, expected False: SGLang generates"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: got 1.1, .* penalties are not replayed"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs: got .* transformers' options"),
        ({"max_completion_length": None}, "max_completion_length: got None"),
        ({"top_p": 1.0}, "top_p: got 1.0 with top_k 0 and min_p None, expected one that filters"),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0}, "top_p: got 1.0 with top_k -1"),
    ],
)
def test_options(make: Make, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        make(**config)


def test_the_compiler(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # restored after the test; the config sets it
    with pytest.raises(InvalidInputError, match="torch_compile: got True, expected False: the compiler"):
        make(torch_compile=True)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("tools", [len], "override SGLangRollouts.generate"),
        ("environment_factory", dict, "override SGLangRollouts.generate"),
        ("rollout_func", None, "got None, expected SGLangRollouts"),
    ],
)
def test_arguments(make: Make, name: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: .*{problem}"):
        make(arguments={name: value})


@pytest.mark.parametrize("kind", ["map", "iterable", "evaluation"])
def test_images(make: Make, kind: str) -> None:
    images = Dataset.from_dict({"prompt": ["a"], "image": ["b"]})
    arguments: dict[str, Any] = {"train_dataset": images}
    if kind == "iterable":
        arguments = {"train_dataset": images.to_iterable_dataset()}
        assert isinstance(arguments["train_dataset"], IterableDataset)
    if kind == "evaluation":
        arguments = {"eval_dataset": {"some": images}}
    with pytest.raises(InvalidInputError, match="got a column 'image'"):
        make(arguments=arguments)


def test_the_loss_of_a_mixture_of_experts(make: Make) -> None:
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
    )
    model = Qwen3MoeForCausalLM(config)
    with pytest.raises(InvalidInputError, match=r"router_aux_loss_coef: got 0\.001, expected 0"):
        make(arguments={"model": model})
    make(arguments={"model": model}, router_aux_loss_coef=0.0)


def test_deepspeed(make: Make) -> None:
    trainer = make()
    trainer.is_deepspeed_enabled = True
    with pytest.raises(InvalidInputError, match=r"deepspeed: .* not tested"):
        adapter._check_trainer(trainer)


@pytest.mark.parametrize(
    ("plugin", "config", "problem"),
    [
        ({"fsdp_version": 1}, {}, "fsdp_config: got version 1, expected 2"),
        (
            {"fsdp_version": 2, "cpu_ram_efficient_loading": True},
            {"beta": 0.1},
            r"got cpu_ram_efficient_loading and a reference model .* in one process only",
        ),
    ],
)
def test_options_of_fsdp(
    make: Make, monkeypatch: pytest.MonkeyPatch, plugin: Any, config: Any, problem: str
) -> None:
    trainer = make(**config)
    state = trainer.accelerator.state
    monkeypatch.setenv(
        "FSDP_CPU_RAM_EFFICIENT_LOADING", "false"
    )  # restored after the test; the plugin sets it
    monkeypatch.setattr(state, "fsdp_plugin", FullyShardedDataParallelPlugin(**plugin), raising=False)
    with pytest.raises(InvalidInputError, match=problem):
        adapter._check_trainer(trainer)


def test_parallelism_within_a_sequence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", ParallelismConfig(tp_size=2))
    with pytest.raises(InvalidInputError, match="parallelism_config: got tensor, context, or sequence"):
        adapter._check_trainer(trainer)


def test_a_model_that_is_sharded_while_it_loads(make: Make) -> None:
    trainer = make()
    trainer.is_distributed_loading_by_transformers = True
    with pytest.raises(InvalidInputError, match=r"transformers shards while it loads, .* need all processes"):
        adapter._check_trainer(trainer)


def test_log_probs_that_fsdp_rounds(make: Make) -> None:
    trainer = make()
    forward = trainer.model.forward

    def rounded(*args: Any, **kwargs: Any) -> Any:
        return {name: values.bfloat16() for name, values in forward(*args, **kwargs).items()}

    trainer.model.forward = rounded
    trainer._rows, ids = random_rows(512)
    with pytest.raises(InvalidInputError, match=r"log-probs in torch\.bfloat16, expected float32"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), 6, compute_entropy=True
        )


def test_a_release_that_is_not_listed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trl.__version__ in adapter.SUPPORTED_TRL
    monkeypatch.setattr(trl, "__version__", "1.4.0")
    with pytest.raises(InvalidInputError, match=r"trl: got release 1\.4\.0, expected 1\.16\.0"):
        make()


def test_the_wrong_order_of_bases() -> None:
    with pytest.raises(InvalidInputError, match="GRPOTrainer comes before ReplayMixin"):
        type("Trainer", (trl.GRPOTrainer, ReplayMixin), {})


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "logit_bias", "n"])
def test_sampling_parameters(name: str) -> None:
    client = RolloutClient("http://127.0.0.1:1")  # nothing is sent
    with pytest.raises(InvalidInputError, match=f"sampling_params: got '{name}', expected only ebnf"):
        SGLangRollouts(client, sampling_params={name: 1})


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"via": "pigeon"}, "via: got 'pigeon', expected disk"),
        ({"folder": "/missing"}, "folder: got '/missing' with via='disk', expected a folder that exists"),
        ({"via": "tensor", "folder": "/tmp"}, "folder: got '/tmp' with via='tensor'"),
    ],
)
def test_transports(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        SGLangRollouts(RolloutClient("http://127.0.0.1:1"), **arguments)


# -- answers of a rollout_func -------------------------------------------------------------------------


def rollout(ids: list[int], appended: tuple[tuple[int, int], ...] = ()) -> Rollout:
    sets = CandidateSets(ids, np.zeros(len(ids), np.float32), np.arange(len(ids) + 1), ids)
    for start, end in appended:
        empty = CandidateSets([], None, np.zeros(end - start + 1, np.int64), ids[start:end])
        sets = CandidateSets.concat([sets[:start], empty, sets[end:]])
    return Rollout(
        0,
        0,
        "r",
        np.array([7], np.int32),
        np.array(ids, np.int32),
        "",
        np.zeros(len(ids), np.float32),
        sets,
        "length",
        None,
        0,
        0.1,
        appended_spans=appended,
    )


ROLLOUTS = [rollout([5, 6, 8]), rollout([9, 4]), rollout([1, 2, 3], ((1, 2),))]


def generate(make: Make, **changes: Any) -> Any:
    fields = rollout_fields(ROLLOUTS) | changes
    answer = {name: value for name, value in fields.items() if value is not ...}
    return make(lambda prompts, trainer: answer)._generate(["a"] * 3)


def test_an_answer_with_sets(make: Make) -> None:
    _, completion_ids, env_mask, _, logprobs, extra_fields, _, _ = generate(make, reward=[1, 2, 3])
    assert completion_ids == [[5, 6, 8], [9, 4], [1, 2, 3]]
    assert env_mask == [[1, 1, 1], [1, 1], [1, 0, 1]]
    assert logprobs == [[0.0] * 3, [0.0] * 2, [0.0] * 3]
    assert extra_fields == {"reward": [1, 2, 3]}


SETS = [each.candidates for each in ROLLOUTS]


@pytest.mark.parametrize("sets", [..., None, [None, *SETS[1:]]])
def test_answers_without_sets(make: Make, sets: Any) -> None:
    with pytest.raises(MissingCandidateSetsError, match="candidate_sets: missing in the rollout_func"):
        generate(make, candidate_sets=sets)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"candidate_sets": SETS[:2]}, r"candidate_sets: got 2, expected 3"),
        ({"candidate_sets": [SETS[2], SETS[1], SETS[0]]}, "of another response, or shifted"),
        ({"candidate_sets": [SETS[1], SETS[0], SETS[2]]}, r"got shape \(3,\), expected \[2\]"),
        (
            {"candidate_sets": [rollout([6, 8, 8]).candidates, *SETS[1:]]},
            "got 5 at position 0, and the sets say that 6 was sampled",
        ),
        ({"env_mask": ...}, r"candidate_sets\[2\]: no candidates at position 1, expected some, or env_mask"),
        ({"env_mask": [[1] * 3, [1] * 2, [1] * 3]}, r"candidate_sets\[2\]: no candidates at position 1"),
    ],
)
def test_answers_with_wrong_sets(make: Make, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        generate(make, **changes)


def test_a_rollout_without_sets() -> None:
    without = rollout([5])
    object.__setattr__(without, "candidates", None)
    with pytest.raises(InvalidInputError, match="has no candidate sets"):
        rollout_fields([without])
