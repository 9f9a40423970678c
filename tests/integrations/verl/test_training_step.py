"""From agent loops on a real SGLang, through TransferQueue, to a step of verl's trainer and FSDP engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, _agent_loop_registry
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.transferqueue_utils import _meta_to_realdata
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError
from sglang_topp_integrations import verl as adapter
from sglang_topp_integrations.verl import FIELD, ReplayEngine, packed_sets
from tests.integrations.verl.conftest import Run
from tests.integrations.verl.local_actors import LocalHandle, LocalWorkerGroup, RecordingServer
from tests.local_ray import run_local_ray
from tests.replay.replay_oracle import dense_mask

NUM_PROMPTS, NUM_SAMPLES, TURN = 3, 1, 80
DP_SIZE = 4  # 6 trajectories need 2 rows of padding


@ToolParser.register("calls_at_once")
class CallsAtOnce(ToolParser):
    """Every answer calls a tool. There is none, so verl answers with an error message."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        return "", [FunctionCall(name="tool", arguments="{}")]


@pytest.fixture(scope="module")
def queue(config: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VERL_USE_EXTERNAL_MODULES")  # the queue's actors import no verl
        with run_local_ray(num_cpus=8):
            config.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
            config.transfer_queue.enable = True
            tq.init(config.transfer_queue)
            patch.undo()  # every other process of the tests loads the adapter
            yield
            tq.close()


@pytest.fixture(scope="module")
def recorder(server: Any) -> RecordingServer:
    return RecordingServer(server)


@pytest.fixture(scope="module")
def worker_of_loops(config: Any, recorder: RecordingServer, queue: None) -> Callable[[], Any]:
    """Make the worker that runs agent loops."""
    worker_class = AgentLoopWorkerTQ.__ray_metadata__.modified_class

    def make() -> Any:
        balancer = GlobalRequestLoadBalancer({"server": LocalHandle(recorder)})
        balancer.require_acquire_fields = balancer.require_release_fields = lambda: ["request_id"]
        return worker_class(config, FullyAsyncLLMServerClient(config, LocalHandle(balancer)))

    return make


@pytest.fixture(scope="module")
def batch(
    config: Any, run: Run, server: Any, recorder: RecordingServer, worker_of_loops: Callable[[], Any]
) -> Any:
    """Trajectories of one and of two turns in TransferQueue, all generated across interruptions."""

    async def roll_out() -> None:
        worker = worker_of_loops()
        sampler = {name: config.actor_rollout_ref.rollout[name] for name in ("temperature", "top_p", "top_k")}
        sampler |= {"repetition_penalty": 1.0, "logprobs": True, "ignore_eos": True, "max_tokens": TURN}
        prompts = [
            worker._run_prompt(
                {
                    "uid": f"{agent}-{i}",
                    "agent_name": f"{agent}_agent",
                    "raw_prompt": [{"role": "user", "content": f"{agent} {'long ' * i}"}],
                    "index": i,
                    "global_steps": 1,
                    "__rollout_n__": NUM_SAMPLES,
                },
                sampler,
                {"step": 1, "sample_index": i, "rollout_n": 0, "validate": False},
            )
            for agent in ("tool", "single_turn")
            for i in range(NUM_PROMPTS)
        ]
        rollouts = asyncio.gather(*prompts)
        for _ in range(20):
            await asyncio.sleep(0.1)
            await server.abort_all_requests()
            await server.resume_generation()
            if any(output.stop_reason == "abort" and output.token_ids for _, output, _ in recorder.answers):
                break
        await rollouts

    run(roll_out())
    tags = tq.kv_list("train")["train"]
    keys = [key for key, tag in tags.items() if tag["status"] == "success"]
    assert len(keys) == 2 * NUM_PROMPTS * NUM_SAMPLES, tags
    return tq.KVBatchMeta(partition_id="train", keys=keys, tags=[tags[key] for key in keys])


class Trainer(PPOTrainer):
    on_step_end = on_sample_end = lambda self: None


@pytest.fixture(scope="module")
def worker(config: Any) -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WORLD_SIZE", 1), ("RANK", 0), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 0)):
            patch.setenv(name, str(value))
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        worker.init_model()
    yield worker
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trainer(config: Any, worker: Any) -> Any:
    """verl's trainer without its `init`, which reserves GPUs."""
    trainer = Trainer.__new__(Trainer)
    trainer.config, trainer.use_critic, trainer.global_steps = config, False, 1
    trainer.distillation_config = None
    trainer.actor_rollout_wg = LocalWorkerGroup(worker, DP_SIZE)
    trainer.tokenizer = worker.actor.model_config.tokenizer
    return trainer


@pytest.fixture(scope="module")
def balanced(trainer: Any, batch: Any) -> Any:
    """The batch with verl's padding rows, in the order of its balancing."""
    for i, key in enumerate(batch.keys):
        rewards = tq.kv_batch_get(keys=[key], partition_id="train", select_fields=["response_mask"])
        rm_scores = torch.zeros_like(rewards["response_mask"].values()[None], dtype=torch.float32)
        rm_scores[0, -1] = i % 7 / 3
        rewards = tu.get_tensordict(
            {"rm_scores": torch.nested.as_nested_tensor(list(rm_scores), layout=torch.jagged)}
        )
        tq.kv_batch_put(keys=[key], partition_id="train", fields=rewards)
    result = trainer._balance_batch(batch, {})
    assert len(result) == 2 * DP_SIZE
    result.extra_info["temperature"] = 1.0
    return result


@pytest.fixture
def data(balanced: Any) -> Any:
    """What a training process gets from the queue."""
    return _meta_to_realdata(balanced)


def expected_sets(
    recorder: RecordingServer, prompt: list[int], response: list[int], mask: list[int]
) -> CandidateSets:
    """Join the sets that the server answered along one trajectory, by the prompts that it was asked."""
    sets, ids, at = [], prompt + response, 0
    while at < len(response):
        if not mask[at]:
            sets.append(CandidateSets.empty(1))
            at += 1
            continue
        before, after = ids[: len(prompt) + at], ids[len(prompt) + at :]
        (found,) = [
            of[: len(after)]  # verl cuts a response that is too long
            for asked, output, of in recorder.answers
            if asked == before and output.token_ids and after[: len(of)] == output.token_ids[: len(after)]
        ]
        sets.append(found)
        at += len(found)
    return CandidateSets.concat(sets)


def test_the_rollouts_have_two_turns_and_an_interruption(recorder: RecordingServer, data: Any) -> None:
    interrupted = [
        output for _, output, _ in recorder.answers if output.stop_reason == "abort" and output.token_ids
    ]
    assert interrupted
    assert all(0 < len(output.token_ids) < TURN for output in interrupted)
    masks = [mask.tolist() for mask in data["response_mask"].unbind()]
    turns = sorted("".join(map(str, mask)).strip("0").count("01") + 1 for mask in masks if any(mask))
    assert turns == [1] * NUM_PROMPTS + [2] * NUM_PROMPTS
    assert sum(not any(mask) for mask in masks) == 2


def test_sets_are_bit_for_bit_those_of_the_server(recorder: RecordingServer, data: Any) -> None:
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=512)
    num_rows = 0
    micro_batches, _ = prepare_micro_batches(data, same_micro_num_in_dp=False)
    assert len(micro_batches) > 2
    for micro_batch in micro_batches:
        packed = packed_sets(micro_batch)
        ends = micro_batch["input_ids"].offsets()[1:].tolist()
        rows = zip(
            *(micro_batch[name].unbind() for name in ("prompts", "responses", "response_mask")),
            ends,
            strict=True,
        )
        for prompt, response, mask, end in rows:
            row = packed[end - len(response) - 1 : end - 1]
            if mask.any():
                num_rows += 1
                expected = expected_sets(recorder, prompt.tolist(), response.tolist(), mask.tolist())
                assert row == expected
            else:
                assert row == CandidateSets.empty(len(response))
        is_scored = np.concatenate(
            [
                np.r_[np.zeros(len(p) - 1, int), m, 0]
                for p, m in zip(
                    micro_batch["prompts"].unbind(),
                    (m.numpy() for m in micro_batch["response_mask"].unbind()),
                    strict=True,
                )
            ]
        )
        np.testing.assert_array_equal(packed.sizes > 0, is_scored)
    assert num_rows == 2 * NUM_PROMPTS


def test_rollout_log_probs_are_those_within_the_sets(data: Any) -> None:
    for logprobs, value, mask in zip(
        data["rollout_log_probs"].unbind(), tu.get(data, FIELD), data["response_mask"].unbind(), strict=True
    ):
        if mask.any():
            np.testing.assert_array_equal(logprobs.numpy(), formats.unpack(value).masked_logprobs)


class AsksAtOnce(AgentLoopBase):
    """Asks three times at once, and returns two answers and a second turn in a shorter history.

    The answers end in another order than that of the requests and of the outputs.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))

        async def ask(prompt: list[int], max_tokens: int, **changed: Any) -> list[int]:
            params = {**sampling_params, "max_tokens": max_tokens, **changed}
            output = await self.server_manager.generate(
                uuid4().hex, prompt_ids=prompt, sampling_params=params
            )
            return output.token_ids

        long, short, judged = await asyncio.gather(
            ask(prompt, 40), ask(prompt, 9), ask([*prompt, 7], 5, temperature=0.0)
        )
        history = prompt[:-1] + short + judged
        last = await ask(history, 6)
        return [
            AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids), metrics={})
            for prompt_ids, ids in ((prompt, short), (history, last), (prompt, long))
        ]


_agent_loop_registry["asks_at_once"] = {"_target_": f"{__name__}.{AsksAtOnce.__name__}"}


def test_a_loop_that_asks_at_once_and_returns_several_outputs(
    config: Any, run: Run, recorder: RecordingServer, worker_of_loops: Callable[[], Any]
) -> None:
    sampler = {name: config.actor_rollout_ref.rollout[name] for name in ("temperature", "top_p", "top_k")}
    sampler |= {"repetition_penalty": 1.0, "logprobs": True, "ignore_eos": True}
    prompt = {
        "uid": "several",
        "agent_name": "asks_at_once",
        "raw_prompt": [{"role": "user", "content": "several"}],
        "index": 0,
        "global_steps": 1,
        "__rollout_n__": 2,
    }
    run(
        worker_of_loops()._run_prompt(
            prompt, sampler, {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": True}
        )
    )
    tags = tq.kv_list("val")["val"]
    keys = [key for key, tag in tags.items() if tag["status"] == "success"]
    assert len(keys) == 2 * 3, tags
    data = tq.kv_batch_get(keys=keys, partition_id="val")
    rows = zip(*(data[name].unbind() for name in ("prompts", "responses", "response_mask")), strict=True)
    for value, row in zip(tu.get(data, FIELD), rows, strict=True):
        assert isinstance(value, bytes), value
        assert formats.unpack(value) == expected_sets(recorder, *(field.tolist() for field in row))
    assert sorted(len(row) for row in data["responses"].unbind()) == [6, 6, 9, 9, 40, 40]


def test_scores_are_padded_to_the_longest_row(data: Any) -> None:
    tokens = data["input_ids"].values()
    output = ReplayEngine.prepare_model_outputs(
        None,
        SimpleNamespace(logits=torch.zeros(1, len(tokens), 512)),
        {"input_ids_rmpad_rolled": tokens.roll(-1), "temperature_rmpad": torch.ones(len(tokens))},
        data,
        None,
    )
    longest = max(len(row) for row in data["input_ids"].unbind())
    padded = torch.nested.to_padded_tensor(output["log_probs"], 0)
    assert padded.shape == (len(data), longest)


def dense_outputs(
    engine: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> Any:
    """verl's own scores of logits that a dense mask has set to a number whose probability is 0."""
    mask = dense_mask(packed_sets(micro_batch), output.logits.shape[-1]).to(output.logits.device)
    output.logits = output.logits.masked_fill(~mask, -1e30)
    return FSDPEngineWithLMHead.prepare_model_outputs(
        engine, output, output_args, micro_batch, logits_processor_func
    )


def full_outputs(
    engine: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
) -> Any:
    return FSDPEngineWithLMHead.prepare_model_outputs(
        engine, output, output_args, micro_batch, logits_processor_func
    )


def scores_of(worker: Any, data: Any, temperature: float = 1.0) -> dict[str, np.ndarray]:
    """Return verl's log-probs and entropies of the tokens with a loss, row after row."""
    data = data.clone()
    tu.assign_non_tensor(data, temperature=temperature, calculate_entropy=True, compute_loss=False)
    output = worker.actor.infer_batch(data)
    values = {}
    for name in ("log_probs", "entropy"):
        rows = zip(output[name].unbind(), data["response_mask"].unbind(), strict=True)
        values[name] = np.concatenate([row[-len(mask) - 1 : -1][mask.bool()].numpy() for row, mask in rows])
    return values


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_a_dense_mask(
    worker: Any, data: Any, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(worker.actor.engine) is ReplayEngine
    got = scores_of(worker, data, temperature)
    monkeypatch.setattr(ReplayEngine, "prepare_model_outputs", dense_outputs)
    dense = scores_of(worker, data, temperature)
    monkeypatch.setattr(ReplayEngine, "prepare_model_outputs", full_outputs)
    full = scores_of(worker, data, temperature)

    for name, values in got.items():
        difference = np.abs(values - dense[name]).max()
        print(f"{name}, temperature {temperature}: {difference:.2g} from a dense mask, {len(values)} tokens")
        assert difference < 5e-6
        assert np.abs(values - full[name]).max() > 0.01


def test_a_step_of_the_trainer(
    trainer: Any, worker: Any, balanced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics: dict[str, Any] = {}
    trainer._compute_old_log_prob(balanced, metrics)
    data = tq.kv_batch_get(keys=balanced.keys, partition_id="train")
    rows = zip(
        *(data[name].unbind() for name in ("old_log_probs", "rollout_log_probs", "response_mask")),
        strict=True,
    )
    ratios = torch.cat([(old - rollout)[mask.bool()].exp() for old, rollout, mask in rows])
    print(f"ratios of {len(ratios)} tokens: mean {ratios.mean():.7f}, largest {ratios.max():.7f}")
    assert (ratios - 1).abs().max() < 1e-4
    assert metrics["training/rollout_probs_diff_max"] < 1e-4

    trainer._compute_advantage(balanced, metrics)
    gradients = {}
    for name, outputs in (("replay", ReplayEngine.prepare_model_outputs), ("dense", dense_outputs)):
        monkeypatch.setattr(ReplayEngine, "prepare_model_outputs", outputs)
        gradients[name] = gradient_of(worker, _meta_to_realdata(balanced))
    monkeypatch.undo()
    errors = [
        ((got - dense).abs().max() / dense.abs().max()).item()
        for got, dense in zip(gradients["replay"], gradients["dense"], strict=True)
        if dense.abs().max() > 0
    ]
    print(f"gradient: at most {max(errors):.2g} of a parameter's largest from that of a dense mask")
    assert len(errors) > 10
    assert max(errors) < 1e-5

    before = [parameter.full_tensor().clone() for parameter in worker.actor.engine.module.parameters()]
    trainer._update_actor(balanced, metrics)
    assert np.isfinite(metrics["actor/grad_norm"])
    after = [parameter.full_tensor() for parameter in worker.actor.engine.module.parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def gradient_of(worker: Any, data: Any) -> list[torch.Tensor]:
    """Return the gradient of verl's PPO loss, with its entropy bonus, for each parameter."""
    engine = worker.actor.engine
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=True,
        global_batch_size=len(data),
        use_remove_padding=True,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=512,
        use_fused_kernels=False,
    )
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, worker.loss_fn)
        gradients = [parameter.grad.full_tensor().clone() for parameter in engine.module.parameters()]
        engine.optimizer_zero_grad()
    return gradients


def test_rows_without_their_sets_are_errors(data: Any) -> None:
    values = tu.get(data, FIELD)
    rows = [i for i, mask in enumerate(data["response_mask"].unbind()) if mask.any()]

    def check(changed: list[Any], error: type[Exception], message: str) -> None:
        batch = data.clone()
        batch.pop(FIELD)
        if changed:
            tu.assign_non_tensor_stack(batch, FIELD, changed)
        with pytest.raises(error, match=message):
            packed_sets(batch)

    check(
        [],
        MissingCandidateSetsError,
        "candidate_sets: missing in the batch; was VERL_USE_EXTERNAL_MODULES set",
    )
    changed = list(values)
    changed[rows[0]] = "a request had none"
    check(changed, MissingCandidateSetsError, rf"candidate_sets\[{rows[0]}\]: a request had none")
    changed = list(values)
    changed[rows[0]], changed[rows[1]] = changed[rows[1]], changed[rows[0]]
    check(changed, InvalidInputError, "output_ids: got ")
    changed = list(values)
    sets = formats.unpack(values[rows[0]])
    changed[rows[0]] = formats.pack(CandidateSets.concat([sets[1:], sets[:1]]))
    check(changed, InvalidInputError, "they are of another response, or shifted")
    changed = list(values)
    changed[rows[0]] = formats.pack(CandidateSets.empty(len(sets)))
    check(changed, MissingCandidateSetsError, "no candidates at 0, which has a loss")


def test_the_trainer_asks_its_processes(queue: None) -> None:
    """A real actor, which has no engine, and whose process has not loaded the adapter."""

    class Process:
        def is_loaded(self) -> bool:
            import sys

            return "sglang_topp_integrations.verl" in sys.modules

    process = ray.remote(Process).remote()
    assert not ray.get(process.is_loaded.remote())
    group = SimpleNamespace(workers=[process])
    trainer = SimpleNamespace(actor_rollout_wg=group, use_reference_policy=False)
    with pytest.raises(InvalidInputError, match=r"engine: got NoneType, expected one of .*; set VERL_USE"):
        adapter._check_processes(lambda *_: None, trainer, SimpleNamespace(agent_loop_workers=[]))
    assert ray.get(process.is_loaded.remote())  # asking an agent loop's process loads it in time
