"""Options that cannot be replayed, and processes without the adapter, end a run before a rollout."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from verl.trainer import constants_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import InvalidInputError
from sglang_topp_integrations import verl as adapter
from tests.integrations.verl.conftest import ROOT


class Trainer(PPOTrainer):
    on_step_end = on_sample_end = lambda self: None


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("actor_rollout_ref.rollout.name", "vllm", "rollout.name: got 'vllm', expected sglang"),
        ("actor_rollout_ref.rollout.top_p", 1.0, "rollout.top_p: got 1.0, expected a number between 0 and 1"),
        ("actor_rollout_ref.rollout.top_k", 50, "rollout.top_k: got 50, expected -1: SGLang 0.5.12 returns"),
        ("actor_rollout_ref.rollout.temperature", 0, "rollout.temperature: got 0, expected more than 0"),
        (
            "actor_rollout_ref.rollout.calculate_log_probs",
            False,
            "calculate_log_probs: got False, expected True",
        ),
        (
            "actor_rollout_ref.rollout.disaggregation.enabled",
            True,
            "disaggregation.enabled: got True, expected False",
        ),
        (
            "actor_rollout_ref.rollout.mtp.enable_rollout",
            True,
            "mtp.enable_rollout: got True, expected False",
        ),
        ("actor_rollout_ref.actor.strategy", "veomni", "actor.strategy: got 'veomni', expected fsdp"),
        ("actor_rollout_ref.ref.strategy", "veomni", "ref.strategy: got 'veomni', expected fsdp"),
        ("actor_rollout_ref.actor.calculate_sum_pi_squared", True, "calculate_sum_pi_squared: got True"),
        ("distillation.enabled", True, "distillation.enabled: got True, expected False"),
    ],
)
def test_options_of_the_trainer(config: Any, option: str, value: Any, message: str) -> None:
    changed = OmegaConf.create(OmegaConf.to_container(config))
    OmegaConf.update(changed, option, value, force_add=True)
    with pytest.raises(InvalidInputError, match=message):
        Trainer(changed)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        (
            {"use_fused_kernels": True},
            {},
            "model.use_fused_kernels: got True, expected False: they return no logits",
        ),
        ({"use_remove_padding": False}, {}, "model.use_remove_padding: got False, expected True"),
        ({"lora_rank": 8}, {}, "model.lora_rank: got 8, expected 0"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size: got 2, expected 1"),
    ],
)
def test_options_of_the_engine(
    config: Any, model: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    accepted = {"use_fused_kernels": False, "use_remove_padding": True, "lora_rank": 0}
    one_rank = {"ulysses_sequence_parallel_size": 1}
    with pytest.raises(InvalidInputError, match=message):
        EngineRegistry.new(
            "language_model",
            "fsdp",
            model_config=SimpleNamespace(**{**accepted, **model}),
            engine_config=SimpleNamespace(**{**one_rank, **engine}),
            optimizer_config=None,
            checkpoint_config=None,
        )


def test_the_old_trainer() -> None:
    with pytest.raises(InvalidInputError, match="use_v1: got False, expected True"):
        RayPPOTrainer(config=None)


def test_processes_on_other_machines_load_the_adapter(config: Any) -> None:
    environment = constants_ppo.get_ppo_ray_runtime_env(config)
    assert environment["env_vars"]["VERL_USE_EXTERNAL_MODULES"] == os.environ["VERL_USE_EXTERNAL_MODULES"]


def test_a_training_process_with_verls_own_engine() -> None:
    plain = FSDPEngineWithLMHead.__new__(FSDPEngineWithLMHead)
    role = SimpleNamespace(actor=SimpleNamespace(engine=plain), ref=None)
    for worker in (role, SimpleNamespace(worker_dict={"actor_rollout": role}), SimpleNamespace()):
        with pytest.raises(InvalidInputError, match=r"expected one of .*; set VERL_USE_EXTERNAL_MODULES="):
            adapter._check_engines(worker)
    for engine_class in (adapter.ReplayEngine, adapter.ReplayMegatronEngine):
        role.actor.engine = engine_class.__new__(engine_class)
        adapter._check_engines(SimpleNamespace(worker_dict={"actor_rollout": role}))


def sets_of(ids: list[int]) -> CandidateSets:
    """Return a set of its own size and log-prob for each token."""
    rng = np.random.default_rng(ids)
    sizes = rng.integers(1, 4, len(ids))
    others = [np.r_[token, 100 + np.arange(size - 1)] for token, size in zip(ids, sizes, strict=True)]
    logprobs = np.sort(np.log(rng.dirichlet(np.ones(sizes.sum()))))[::-1].astype(np.float32)
    return CandidateSets(np.concatenate(others), logprobs, np.r_[0, np.cumsum(sizes)], ids)


def joined(requests: list[tuple[list[int], list[int], bytes | None]], *output: list[int]) -> bytes | str:
    prompt_ids, response_ids, response_mask = output
    return adapter._response_sets(
        [adapter._Request(*request) for request in requests],
        SimpleNamespace(prompt_ids=prompt_ids, response_ids=response_ids, response_mask=response_mask),
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_each_output_gets_the_sets_of_its_own_requests(order: tuple[int, ...]) -> None:
    """Requests that end in any order: two of one prompt that begin alike, a continuation, a second turn."""
    first, other, continued, second = (sets_of(ids) for ids in ([3, 7, 5], [3, 8], [6, 4], [3, 7]))
    requests = [
        ([1, 2], [3, 7, 5], formats.pack(first)),
        ([1, 2], [3, 8], formats.pack(other)),
        ([1, 2, 3, 7, 5], [6, 4], formats.pack(continued)),
        ([1, 2, 3, 8, 9], [3, 7], formats.pack(second)),
    ]
    requests = [requests[i] for i in order]
    tool = CandidateSets.empty(1)
    for output, expected in {
        ((1, 2), (3, 7, 5, 6, 4), (1, 1, 1, 1, 1)): [first, continued],
        ((1, 2), (3, 7, 5, 6), (1, 1, 1, 1)): [first, continued[:1]],  # verl cuts a response that is too long
        ((1, 2), (3, 8), (1, 1)): [other],
        ((1, 2), (3, 8, 9, 3, 7), (1, 1, 0, 1, 1)): [other, tool, second],
        ((1, 2, 3, 8, 9), (3, 7), (1, 1)): [second],  # the history is now the prompt
        ((1, 2), (3, 7, 0, 0), (1, 1, 0, 0)): [first[:2], tool, tool],  # the loop cuts off the last token
        ((1, 2), (3, 7, 5), (1, 0, 1)): [first[:1], tool, first[2:]],  # the loop masks a token
        ((1, 2), (), ()): [],
    }.items():
        assert joined(requests, *map(list, output)) == formats.pack(CandidateSets.concat(expected))


def test_outputs_without_their_sets() -> None:
    """The reason travels in place of the sets, and the engine raises it."""
    requests = [([1, 2], [3, 7], formats.pack(sets_of([3, 7]))), ([1, 5], [4, 4], None)]
    assert isinstance(joined(requests, [1, 2], [3, 7], [1, 1]), bytes)
    assert "its sampling parameters were not those of" in str(joined(requests, [1, 5], [4, 4], [1, 1]))
    for prompt, ids, mask, at in (
        ([1, 2], [7, 3], [1, 1], 0),
        ([1, 2], [3, 9, 7], [1, 0, 1], 2),
        ([1, 2], [3, 7, 4], [1, 1, 1], 2),
        ([1, 3], [3, 7], [1, 1], 0),
    ):
        assert f"no request generated the response's token {at} after" in str(
            joined(requests, prompt, ids, mask)
        )


def test_servers_of_rewards_and_teachers_stay_verls_own(config: Any) -> None:
    from sglang.srt.platforms import current_platform

    assert current_platform.device_name == "cpu"
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    arguments = [omega_conf_to_dataclass(config.actor_rollout_ref[name]) for name in ("rollout", "model")]
    for options in ({"is_reward_model": True}, {"is_teacher_model": True}, {}):
        replica = RolloutReplicaRegistry.get("sglang")(0, *arguments, gpus_per_node=1, **options)
        is_ours = issubclass(replica.server_class.__ray_metadata__.modified_class, adapter.ReplayHttpServer)
        assert is_ours == (not options)


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (
            "version('verl', '0.9.2')",
            "verl: got release 0.9.2, expected 0.9.1; the adapter wraps internal functions",
        ),
        ("sys.modules['sglang_topp.formats'] = None", "sglang_topp.formats"),
    ],
)
def test_an_adapter_that_fails_to_load_stops_the_process(tmp_path: Path, setup: str, message: str) -> None:
    """As the entry point of a training run does: import verl, then train."""
    script = tmp_path / "run.py"
    script.write_text(
        "import builtins, io, sys\n"
        "def version(name, value):\n"
        "    real = builtins.open\n"
        "    def changed(path, *args, **kwargs):\n"
        "        if str(path).endswith('version/version'):\n"
        "            return io.StringIO(value)\n"
        "        return real(path, *args, **kwargs)\n"
        "    builtins.open = changed\n"
        f"{setup}\n"
        "import verl\n"
        "print('trains without sets')\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1
    assert "trains" not in done.stdout
    assert message in done.stderr
