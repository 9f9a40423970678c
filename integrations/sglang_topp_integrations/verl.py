"""Adapter for verl: train with PPO or GRPO on SGLang's rollouts, and score over their candidate sets.

Set `VERL_USE_EXTERNAL_MODULES=sglang_topp_integrations.verl`, so that every process that imports verl also
imports this module. Importing this module installs the adapter. If the import fails, the verl process stops.

A trajectory has one request for each turn, and one more for each continuation of an interrupted turn. Agent
loops may ask several at once, and return several outputs. On their way from SGLang to the trainer, the
candidate sets pass through the classes and methods listed below.
The classes are this module's. The two other entries are methods of verl, which this module wraps::

    ReplayHttpServer.generate     requests tokens and sets from SGLang, and returns both
    LLMServerClient.generate      keeps each request's sets until the trajectory ends
    AgentLoopOutput.as_dict       joins an output's sets into the field `candidate_sets`
    ReplayEngine                  scores each micro-batch over the sets of the micro-batch's rows (FSDP)
    ReplayMegatronEngine          the same with Megatron-core

TransferQueue, verl's store for training data, carries the field `candidate_sets` to the trainer.

Shape legend: B is the number of rows in a micro-batch, and T the number of tokens in all rows.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import verl
from omegaconf import OmegaConf
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.trainer import constants_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ, PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_vendor
from verl.workers.engine import BaseEngine, EngineRegistry, MegatronEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry, _load_sglang

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError
from sglang_topp.replay import replayed_old_logprobs, score_logits
from sglang_topp_integrations import check_options, check_release

__all__ = [
    "FIELD",
    "SUPPORTED_VERL",
    "ReplayEngine",
    "ReplayHttpServer",
    "ReplayMegatronEngine",
    "packed_sets",
]

SUPPORTED_VERL = ("0.9.1",)
"""The verl releases that the tests cover. The adapter wraps verl's internal functions, and these functions
may change between releases."""

FIELD = "candidate_sets"
"""The key of the candidate sets in the `extra_fields` of verl's `TokenOutput`, and in TransferQueue.

The sets are stored as the bytes that `sglang_topp.formats.pack` returns. If a trajectory has no sets,
TransferQueue carries a text that says why the sets are absent.
"""

_STRATEGIES = ("fsdp", "fsdp2", "megatron")
_MODULES = "VERL_USE_EXTERNAL_MODULES"
# A request gets no sets if it has a sampling parameter that is in neither `_SAMPLER` nor `_OTHERS`. Such a
# parameter may change log-probs, and a rollout does not record the change.
_SAMPLER = ("temperature", "top_p", "top_k")
_OTHERS = (
    "ignore_eos",
    "logprobs",
    "max_new_tokens",
    "max_tokens",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
)


class _Request(NamedTuple):
    """A request of an agent loop: the ids of its prompt and of its answer, and the packed sets of the answer.

    `packed` is None if the request got no sets."""

    prompt_ids: list[int]
    token_ids: list[int]
    packed: bytes | None


_requests: ContextVar[list[_Request] | None] = ContextVar("requests", default=None)
"""The requests of the current trajectory, in the order in which they ended."""

# `_Next` is a placeholder for verl's `SGLangHttpServer`, which only serving processes import.
_Next: Any = object


class ReplayHttpServer(_Next):  # type: ignore[misc]  # `Any` as a base class
    """Mixin for verl's `SGLangHttpServer` that returns tokens with their candidate sets.

    A request gets sets only if its `temperature`, `top_p`, and `top_k` equal the config's values. A request
    with another parameter that may change log-probs gets no sets.
    """

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Launch SGLang, and send one request to check that SGLang returns sets.

        Raises:
            SglangToppError: SGLang's answer to the first request has no sets. The error ends the launch, so
                no rollout starts.
        """
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            sampler = {name: getattr(self.config, name) for name in _SAMPLER}
            output = await self.generate([0, 0], {**sampler, "max_tokens": 1}, "sglang-topp-check")
            if not output.token_ids:
                raise MissingCandidateSetsError(FIELD, "SGLang answered the first request without a token")

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> Any:
        """Return verl's `TokenOutput`, with log-probs that are renormalized over the candidate sets.

        Raises:
            SglangToppError: SGLang's answer has no candidate sets, or the sets are invalid.
        """
        params = {name: value for name, value in sampling_params.items() if value is not None}
        is_rollout = all(params.get(name) == getattr(self.config, name) for name in _SAMPLER)
        if (
            not is_rollout
            or params.get("repetition_penalty", 1) != 1
            or params.keys() - {*_SAMPLER, *_OTHERS}
        ):
            return await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        asked = {"top_logprobs_p": self.config.top_p, "return_logprobs_in_base64": True}
        # verl's own `generate` drops the `meta_info` of SGLang's answer, which holds the sets. Call verl's
        # `generate` on a copy of this object. In the copy, an `_AnswerRecorder` replaces the tokenizer
        # manager and keeps the answer.
        call = copy.copy(self)
        call.tokenizer_manager = answers = _AnswerRecorder(self.tokenizer_manager)
        output = await super(ReplayHttpServer, call).generate(
            prompt_ids, {**params, "logprobs": True, "custom_params": asked}, request_id, **kwargs
        )
        sets = CandidateSets.empty(0)  # an aborted request without tokens has no sets
        if output.token_ids:
            sets = formats.decode_top_p(answers.last["meta_info"], output.token_ids)
            sets.check_kept_mass(self.config.top_p)
        output.log_probs = sets.masked_logprobs.tolist()
        output.extra_fields[FIELD] = formats.pack(sets)
        return output


class _AnswerRecorder:
    """Wraps SGLang's tokenizer manager, and keeps the last output of one request."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.last: Mapping[str, Any] = {}

    def generate_request(self, *args: Any) -> _AnswerRecorder:
        self._answers = self._manager.generate_request(*args)
        return self

    async def __anext__(self) -> Any:
        self.last = await anext(self._answers)
        return self.last


class ReplayEngine(FSDPEngineWithLMHead):  # type: ignore[misc]  # verl ships no types
    """verl's FSDP engine for the policy and the reference, with log-probs and entropies over the sets.

    Raises:
        InvalidInputError: replay does not support an option of the engine or the model. The error message
            gives the reason.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        model, ulysses = model_config, engine_config.ulysses_sequence_parallel_size
        check_options(
            ("model.use_fused_kernels", model.use_fused_kernels, (False,), "they return no logits"),
            ("model.use_remove_padding", model.use_remove_padding, (True,), "the sets are packed"),
            ("model.lora_rank", model.lora_rank, (0,), "not tested"),
            ("ulysses_sequence_parallel_size", ulysses, (1,), "each rank would need its part of the sets"),
        )
        super().__init__(model_config, engine_config, *args, **kwargs)

    def prepare_model_outputs(
        self, output: Any, output_args: Mapping[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return the tensor `log_probs`, and the tensor `entropy` if the micro-batch asks for entropies.

        Both tensors are jagged [B, *], with 0 at prompt positions.

        Raises:
            MissingCandidateSetsError: a token that counts in the loss has no candidate set.
            InvalidInputError: a row's candidate sets do not belong to the row's response tokens.
        """
        offsets = micro_batch["input_ids"].offsets()
        # Leave out the padding that verl's `pad_to_length` appends after the packed tokens.
        part = slice(0, len(micro_batch["input_ids"].values()))
        wants_entropy = bool(tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False))
        scores = score_logits(
            output.logits.squeeze(0)[part],
            output_args["input_ids_rmpad_rolled"][part],
            packed_sets(micro_batch).to_torch(output.logits.device),
            temperature=output_args["temperature_rmpad"][part],
            entropy=wants_entropy,
        )
        answer = {"log_probs": scores.logprobs}
        if scores.entropy is not None:
            answer["entropy"] = scores.entropy
        # Without the lengths of the shortest and longest row, `torch.nested.to_padded_tensor` pads too wide.
        lengths = offsets.diff()
        shortest, longest = int(lengths.min()), int(lengths.max())
        return {
            name: torch.nested.nested_tensor_from_jagged(
                each, offsets, min_seqlen=shortest, max_seqlen=longest
            )
            for name, each in answer.items()
        }


_MegatronEngine: Any = MegatronEngineWithLMHead or object  # verl has None where Megatron-core is missing


class ReplayMegatronEngine(_MegatronEngine):  # type: ignore[misc]  # `Any` as a base class
    """verl's Megatron engine for the policy and the reference, with log-probs and entropies over the sets.

    Raises:
        InvalidInputError: replay does not support an option of the engine or the model. The error message
            gives the reason.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        lora_rank = (model_config.lora or {}).get("rank", 0)
        check_options(
            ("use_fused_kernels", engine_config.use_fused_kernels, (False,), "they return no logits"),
            ("use_remove_padding", engine_config.use_remove_padding, (True,), "the sets are packed"),
            ("dynamic_context_parallel", engine_config.dynamic_context_parallel, (False,), "not tested"),
            ("model.mtp.enable", model_config.mtp.enable, (False,), "not tested"),
            ("model.lora.rank", lora_rank, (0,), "not tested"),
        )
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _lm_head_logits_processor(
        self,
        logits: Tensor,
        label: Tensor,
        temperature: Tensor,
        *,
        calculate_entropy: bool,
        batch: Any,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Return the tensor [1, S] `log_probs`, and `entropy` if asked for, of this rank's logits [1, S, V].

        Both are 0 at prompt positions and at padding. The errors are those of `packed_sets`.
        """
        from megatron.core import parallel_state
        from megatron.core.utils import unwrap_model
        from verl.models.mcore.util import preprocess_thd_engine

        sets = packed_sets(batch)
        # verl's own function pads each row's tokens and cuts out this rank's. On padding, it returns 0.
        numbers, *_others = preprocess_thd_engine(
            torch.nested.nested_tensor_from_jagged(
                torch.arange(1, len(sets) + 1), batch["input_ids"].offsets().cpu()
            ),
            use_fp8_padding=self.tf_config.fp8 in ("e4m3", "hybrid"),
            pad_to_length_bucket=self.engine_config.pad_to_length_bucket
            if self.engine_config.pad_to_length
            else None,
            cp_layout=self._get_context_parallel_layout(unwrap_model(self.module[0])),
        )
        group = parallel_state.get_tensor_model_parallel_group()
        scores = score_logits(
            logits.squeeze(0),
            label.squeeze(0),
            CandidateSets.concat([CandidateSets.empty(1), sets])
            .take(numbers.squeeze(0).numpy())
            .to_torch(logits.device),
            temperature=torch.where(temperature > 0, temperature, 1.0).squeeze(0),  # verl's is 0 on padding
            entropy=calculate_entropy,
            tp_group=group if group.size() > 1 else None,
            vocab_start=group.rank() * logits.shape[-1],
        )
        answer = {"log_probs": scores.logprobs[None]}
        if scores.entropy is not None:
            answer["entropy"] = scores.entropy[None]
        return answer


def packed_sets(micro_batch: Any) -> CandidateSets:
    """Return the candidate sets of a micro-batch's T packed tokens.

    Each token's set is at the position before the token, because the logits at that position score the token.

    A row gets empty sets if its `response_mask` is 0 everywhere. verl's padding rows have such a mask, and
    hold copies of another row's fields.

    Raises:
        MissingCandidateSetsError: a token that counts in the loss has no candidate set.
        InvalidInputError: a row's candidate sets do not belong to the row's response tokens.
    """
    packed = tu.get(micro_batch, FIELD)
    if packed is None:
        raise MissingCandidateSetsError(FIELD, f"missing in the batch; was {_MODULES} set in every process?")
    values = packed if isinstance(packed, list) else [packed] * len(micro_batch)
    responses = [ids.cpu().numpy() for ids in micro_batch["responses"].unbind()]
    masks = [mask.cpu().numpy() for mask in micro_batch["response_mask"].unbind()]
    rows = []
    for i, (value, ids, mask) in enumerate(zip(values, responses, masks, strict=True)):
        if not mask.any():
            rows.append(CandidateSets.empty(len(ids)))
            continue
        if isinstance(value, str):
            raise MissingCandidateSetsError(f"{FIELD}[{i}]", value)
        sets = formats.unpack(value, field=f"{FIELD}[{i}]")
        replayed_old_logprobs(sets, output_ids=ids)
        if (lacking := np.flatnonzero((sets.sizes == 0) & (mask != 0))).size:
            raise MissingCandidateSetsError(
                f"{FIELD}[{i}]", f"no candidates at {lacking[0]}, which has a loss"
            )
        rows.append(sets)
    ends = micro_batch["input_ids"].offsets()[1:].cpu().numpy()
    starts = ends - [len(ids) + 1 for ids in responses]  # the logits at a position score the next token
    is_scored = np.zeros(int(ends[-1]), np.bool_)
    for start, ids in zip(starts.tolist(), responses, strict=True):
        is_scored[start : start + len(ids)] = True
    return CandidateSets.concat(rows).place(is_scored)


def _response_sets(requests: Sequence[_Request], output: Any) -> bytes | str:
    """Return the candidate sets of an agent loop's output, packed, or the reason why sets are missing.

    A set depends on the tokens before it. A request's sets therefore belong to an output as far as the
    request's prompt and tokens equal the output's, in whatever order the agent loop asks, and however many
    outputs it returns. A token that no request generated gets an empty set.
    """
    ids, start = np.asarray([*output.prompt_ids, *output.response_ids]), len(output.prompt_ids)
    joined = [CandidateSets.empty(1)]
    source = np.where(output.response_mask, -1, 0)  # each token's index in `joined`, or -1: not found yet

    def num_equal(request: _Request) -> int:
        own = np.asarray([*request.prompt_ids, *request.token_ids][: len(ids)])
        return int(np.argmin(np.append(own == ids[: len(own)], False))) - len(request.prompt_ids)

    # Requests of one prompt may begin alike, and the one that stays equal for longest is the output's own.
    for request in sorted(requests, key=num_equal, reverse=True):
        first = len(request.prompt_ids) - start
        tokens = np.arange(max(first, 0), max(first + num_equal(request), 0))
        tokens = tokens[source[tokens] < 0]
        if not len(tokens):
            continue
        if request.packed is None:
            return "a request had none: its sampling parameters were not those of actor_rollout_ref.rollout"
        source[tokens] = sum(map(len, joined)) + tokens - first
        joined.append(formats.unpack(request.packed))
    if (missing := np.flatnonzero(source < 0)).size:
        return (
            f"no request generated the response's token {missing[0]} after the tokens before it; the agent"
            " loop changed the tokens of a request or of its prompt"
        )
    return formats.pack(CandidateSets.concat(joined).take(source))


# If the docstring of a function below begins with "Wrap", the function wraps the verl function that the
# docstring names. The argument `original` is the wrapped verl function.


async def _keep_sets(original: Callable[..., Any], client: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `LLMServerClient.generate`: keep the sets of one request until the trajectory ends."""
    output = await original(client, *args, **kwargs)
    if (requests := _requests.get()) is not None:
        packed = output.extra_fields.pop(FIELD, None)
        requests.append(_Request(list(kwargs["prompt_ids"]), output.token_ids, packed))
    return output


async def _run_trajectory(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `AgentLoopWorker._run_agent_loop`: collect the candidate sets of one trajectory's requests."""
    token = _requests.set([])
    try:
        return await original(worker, *args, **kwargs)
    finally:
        _requests.reset(token)


def _add_sets(original: Callable[..., dict[str, Any]], output: Any) -> dict[str, Any]:
    """Wrap `AgentLoopOutput.as_dict`: add the sets to the fields that go to TransferQueue."""
    fields = original(output)
    if (requests := _requests.get()) is not None:
        fields[FIELD] = _response_sets(requests, output)
    return fields


def _forward_modules(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Wrap `get_ppo_ray_runtime_env`: let the processes on other machines load the adapter as well."""
    environment = original(*args, **kwargs)
    environment["env_vars"][_MODULES] = os.environ.get(_MODULES, __name__)
    return environment


def _check_config(original: Callable[..., None], trainer: Any, config: Any) -> None:
    """Wrap `PPOTrainer.__init__`: raise InvalidInputError for an option that replay does not support."""
    top_p, temperature = (config.actor_rollout_ref.rollout[name] for name in ("top_p", "temperature"))
    if not 0 < top_p < 1:
        raise InvalidInputError(
            f"rollout.top_p: got {top_p}, expected a number between 0 and 1; at 1 nothing is cut away, so"
            " train without the adapter"
        )
    if not temperature > 0:
        raise InvalidInputError(f"rollout.temperature: got {temperature}, expected more than 0")
    for name, accepted, reason in (
        ("rollout.name", ("sglang",), "only SGLang returns the sets"),
        ("rollout.top_k", (-1,), "SGLang 0.5.12 returns the sets of top_p alone"),
        ("rollout.calculate_log_probs", (True,), "the sets come with the log-probs"),
        ("rollout.disaggregation.enabled", (False, None), "not tested"),
        ("rollout.mtp.enable_rollout", (False, None), "not tested"),
        ("actor.strategy", _STRATEGIES, "other engines score over the whole vocabulary"),
        ("ref.strategy", (*_STRATEGIES, None), "other engines score over the whole vocabulary"),
        ("actor.calculate_sum_pi_squared", (False, None), "it is not computed over the sets"),
    ):
        check_options((name, OmegaConf.select(config.actor_rollout_ref, name), accepted, reason))
    distills = OmegaConf.select(config, "distillation.enabled")
    check_options(("distillation.enabled", distills, (False, None), "its teacher has no sets"))
    original(trainer, config)


def _check_processes(original: Callable[..., Any], trainer: Any, agent_loop_manager: Any) -> Any:
    """Wrap `PPOTrainer.fit`: raise an error if a training process or a rollout process lacks the adapter."""
    groups = [trainer.actor_rollout_wg, *([trainer.ref_policy_wg] if trainer.use_reference_policy else [])]
    workers = [worker.__ray_call__.remote(_check_engines) for group in groups for worker in group.workers]
    loops = [worker.__ray_call__.remote(_is_loaded) for worker in agent_loop_manager.agent_loop_workers]
    ray.get([*workers, *loops])
    return original(trainer, agent_loop_manager)


def _check_engines(worker: Any) -> None:
    """Raise InvalidInputError unless each model of this training process runs in an engine of this module.

    The training process runs the policy model, the reference model, or both.
    """
    workers = getattr(worker, "worker_dict", {None: worker}).values()
    models = [getattr(each, role, None) for each in workers for role in ("actor", "ref")]
    engines = [model.engine for model in models if model is not None]
    for engine in engines or [None]:
        if not isinstance(engine, ReplayEngine | ReplayMegatronEngine):
            raise InvalidInputError(
                f"engine: got {type(engine).__name__}, expected one of {__name__}; set"
                f" {_MODULES}={__name__} in every process, and leave VERL_ENGINE_VENDOR unset"
            )


def _is_loaded(worker: Any) -> bool:
    """Return True. A worker must import this module to run this function. The import loads the adapter."""
    return True


def _refuse_v0(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `RayPPOTrainer.__init__`: refuse to train with verl's older trainer."""
    raise InvalidInputError("trainer.use_v1: got False, expected True: the sets travel through TransferQueue")


def _load_replica() -> type[Any]:
    """Return a subclass of verl's SGLang replica, with servers that return candidate sets.

    The replicas of reward models and teachers keep verl's own server class.
    """
    plain: Any = _load_sglang()
    module = importlib.import_module(plain.__module__)
    server_class = type("SGLangHttpServer", (ReplayHttpServer, module.SGLangHttpServer), {})

    class ReplayReplica(plain):  # type: ignore[misc]  # verl ships no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not (self.is_reward_model or self.is_teacher_model):
                self.server_class = ray.remote(server_class)

    return ReplayReplica


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _install() -> None:
    check_release("verl", verl.__version__, SUPPORTED_VERL)
    for owner, name, around in (
        (LLMServerClient, "generate", _keep_sets),
        (AgentLoopWorker, "_run_agent_loop", _run_trajectory),
        # Ray's decorator copied the inherited `_run_agent_loop` into the actor's class, so wrap the copy too.
        (AgentLoopWorkerTQ.__ray_metadata__.modified_class, "_run_agent_loop", _run_trajectory),
        (AgentLoopOutput, "as_dict", _add_sets),
        (PPOTrainer, "__init__", _check_config),
        (PPOTrainer, "fit", _check_processes),
        (RayPPOTrainer, "__init__", _refuse_v0),
        (constants_ppo, "get_ppo_ray_runtime_env", _forward_modules),
    ):
        _wrap(owner, name, around)
    RolloutReplicaRegistry.register("sglang", _load_replica)
    # verl prefers an engine class that is registered for the device's vendor, so name the vendor here.
    for backends, engine_class in ((["fsdp", "fsdp2"], ReplayEngine), (["megatron"], ReplayMegatronEngine)):
        if issubclass(engine_class, BaseEngine):
            EngineRegistry.register("language_model", backends, get_device_name(), get_vendor())(engine_class)


_install()
