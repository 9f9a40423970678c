"""Adapter for TRL: train with GRPO on SGLang's rollouts, and score the policy over their candidate sets.

::

    class Trainer(ReplayMixin, GRPOTrainer):
        pass

    trainer = Trainer(model=path, rollout_func=SGLangRollouts(client), ...)

Shape legend: B is the number of rows in a batch, C the width of the padded completions, and T the number of
scored completion tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import trl
from accelerate.utils import broadcast_object_list, is_peft_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, WireError, describe
from sglang_topp.replay import replay_metrics, replayed_old_logprobs, score
from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_client.weight_push.tensors_to_push import tensors_as_saved
from sglang_topp_integrations import check_options, check_release

__all__ = ["SUPPORTED_TRL", "ReplayMixin", "SGLangRollouts", "rollout_fields"]

SUPPORTED_TRL = ("1.16.0",)
"""The TRL releases that the tests cover. `ReplayMixin` overrides private methods of `GRPOTrainer`. TRL may
change these methods between releases."""

# The sampling parameters that a caller of `SGLangRollouts` may set. `GRPOConfig` sets the sampler's
# parameters, such as `top_p`. Each parameter in `_SAMPLING` either decides when a sample ends or forbids
# tokens. A candidate set leaves out forbidden tokens, and therefore stays exact. Other parameters, such as
# penalties, would change the log-probs, and replay would not apply the change to the policy.
_SAMPLING = ("ebnf", "ignore_eos", "json_schema", "min_new_tokens", "regex", "stop", "stop_regex")


def rollout_fields(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Convert rollouts to the dict that a `rollout_func` returns to TRL: lists with one entry per rollout.

    Tokens that `Rollout.extend` appended get `env_mask` 0, so they have no loss.

    Raises:
        InvalidInputError: a rollout has no candidate sets.
    """
    return {
        "prompt_ids": [rollout.prompt_ids.tolist() for rollout in rollouts],
        "completion_ids": [rollout.output_ids.tolist() for rollout in rollouts],
        "logprobs": [rollout.masked_logprobs.tolist() for rollout in rollouts],
        "env_mask": [rollout.loss_mask.tolist() for rollout in rollouts],
        "candidate_sets": [rollout.candidates for rollout in rollouts],
    }


class SGLangRollouts:
    """TRL's `rollout_func`: push the policy's weights to every engine, and sample from the engines.

    The sampling parameters come from `GRPOConfig`: `temperature`, `top_p`, `top_k`, `min_p`, and
    `max_completion_length`. TRL's tokenizer renders the prompts. The main process pushes the weights before
    each generation, or once for all batches of an evaluation. Every process samples completions for its own
    prompts.

    Args:
        client: a client. Its `engine_url` must list every engine behind its `base_url`.
        via: the transport of the weights; see `RolloutClient.push_weights`.
        folder: with `via="disk"`, a folder that this machine and every engine can reach. Each push saves the
            model there, and removes it afterwards. The default is the machine's folder for temporary files.
        sampling_params: any of these SGLang sampling parameters: `ignore_eos`, `min_new_tokens`, `stop`,
            `stop_regex`, `json_schema`, `regex`, and `ebnf`. The last three are grammars. The constructor
            refuses every other parameter.

    Raises:
        InvalidInputError: `sampling_params` has a parameter that `GRPOConfig` sets, or one that replay does
            not support; `via` is not a transport; or `folder` is not a folder, or not used by `via`.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        via: Literal["disk", "tensor", "distributed"] = "disk",
        folder: str | os.PathLike[str] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> None:
        self.client = client
        if via not in ("disk", "tensor", "distributed"):
            raise InvalidInputError(f"via: got {describe(via)}, expected disk, tensor, or distributed")
        if folder is not None and (via != "disk" or not os.path.isdir(folder)):
            raise InvalidInputError(
                f"folder: got {os.fspath(folder)!r} with via={via!r}, expected a folder that exists, and"
                " via='disk'"
            )
        self._via: Literal["disk", "tensor", "distributed"] = via
        self._folder = folder
        self.sampling_params = dict(sampling_params or {})
        if others := self.sampling_params.keys() - set(_SAMPLING):
            raise InvalidInputError(
                f"sampling_params: got {describe(min(others))}, expected only {', '.join(_SAMPLING)};"
                " GRPOConfig sets the sampler, and a policy cannot be scored under penalties or a bias"
            )
        self._pushed_evaluation: object | None = None
        self._version, self._num_pushes = "", 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Sample one rollout for each prompt, and return `rollout_fields` of the rollouts in prompt order.

        Raises:
            InvalidInputError: a prompt contains an image.
            WireError: an engine sampled with weights other than the last pushed ones.
            SglangToppError: the weight push or the client's `generate` failed.
        """
        version = self._push_weights(trainer)
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise InvalidInputError("prompts: got an image, expected text; the client sends none")
        config = trainer.args
        rollouts = self.generate(
            prompt_ids,
            {
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k or -1,
                "min_p": config.min_p or 0.0,
                "max_new_tokens": config.max_completion_length,
                "stop_token_ids": list(trainer.eos_token_ids),
                **self.sampling_params,
            },
        )
        for rollout in rollouts:
            names = {name for name, _ in rollout.weight_spans or ((None, 0),)}
            if others := names - {version, ""}:
                raise WireError(
                    "weight_versions",
                    f"got tokens of the weights {describe(others.pop())}, expected {version!r}, the last"
                    " push; name every engine in the client's engine_url, and let nothing else push to them",
                )
        return rollout_fields(rollouts)

    def generate(self, prompt_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[Rollout]:
        """Return a rollout with candidate sets for each prompt, in the order of `prompt_ids`.

        Override this method to call tools. For example, your method may append a tool's output to each
        rollout with `Rollout.extend`, and then continue the rollouts with
        `client.resume(rollouts)`.
        """
        groups = [(ids, len(list(same))) for ids, same in itertools.groupby(prompt_ids)]
        return self.client.generate(
            [ids for ids, _ in groups],
            [sampling_params | {"n": count} for _, count in groups],
            top_logprobs_source="sampler",
        )

    def _push_weights(self, trainer: Any) -> str:
        """Push the weights from the main process, and return their version on every process."""
        accelerator, step, failure = trainer.accelerator, trainer.state.global_step, None
        # In training, every generation pushes the weights. All batches of an evaluation share one push.
        # A trainer without `ReplayMixin` does not identify its evaluations, so every batch pushes.
        evaluation = None if trainer.model.training else getattr(trainer, "evaluation", None)
        if evaluation is not None and evaluation is self._pushed_evaluation:
            return self._version
        # FSDP gathers the weights from all processes, so every process must call `get_state_dict`.
        model, weights = accelerator.unwrap_model(trainer.model), accelerator.get_state_dict(trainer.model)
        if accelerator.is_main_process:
            self._num_pushes += 1
            self._version = f"step-{step}-push-{self._num_pushes}"
            try:
                if is_peft_model(model):
                    # In place, merging and unmerging would round the weights at every push.
                    model = copy.deepcopy(model).merge_and_unload()
                    weights = model.state_dict()
                self._push(model, weights)
            except Exception as error:
                # Every process must call `broadcast_object_list` below, so raise the push's error only after
                # that call.
                failure = error
        failure, self._version = broadcast_object_list([failure, self._version])
        if failure is not None:
            raise failure
        self._pushed_evaluation = evaluation
        return self._version

    def _push(self, model: Any, state_dict: dict[str, Tensor]) -> None:
        if self._via != "disk":
            tensors = tensors_as_saved(model, state_dict)
            self.client.push_weights(tensors, version=self._version, via=self._via)
            return
        with tempfile.TemporaryDirectory(prefix="sglang-topp-weights-", dir=self._folder) as folder:
            # A wrapper gathers tied weights as copies, which `save_pretrained` would write twice.
            tied = getattr(model, "all_tied_weights_keys", {})
            weights = {name: tensor for name, tensor in state_dict.items() if name not in tied}
            model.save_pretrained(folder, state_dict=weights)
            self.client.push_weights(folder, version=self._version)


# `_Next` stands for `GRPOTrainer`, which follows the mixin in the method resolution order. The annotation
# `Any` makes the type checker accept every attribute of `super()`.
_Next: Any = object


class ReplayMixin(_Next):  # type: ignore[misc]  # `Any` as a base class
    """Mixin for `trl.GRPOTrainer` that scores over candidate sets.

    Put the mixin before `GRPOTrainer` in the list of base classes.

    - The policy's and the reference's log-probs, the entropy, and the KL are computed over the rollout's
      candidate sets.
    - The old log-probs come from the rollout (`Rollout.masked_logprobs`). Importance ratios therefore compare
      the trainer with the engine, even in the first step.
    - The trainer logs `replay/ratio_mean` and the other metrics of `sglang_topp.replay.ReplayMetrics`.

    The trainer's `rollout_func` is an `SGLangRollouts` object, or a function that returns
    `rollout_fields(rollouts)`.

    Raises:
        InvalidInputError: the installed release of TRL is not in `SUPPORTED_TRL`, or replay does not support
            an option of the trainer. The constructor raises this InvalidInputError before training starts.
            The error message names the unsupported option and the reason.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if trl.GRPOTrainer in order and order.index(trl.GRPOTrainer) < order.index(ReplayMixin):
            raise InvalidInputError(
                f"{cls.__name__}: GRPOTrainer comes before ReplayMixin, so nothing would be replayed;"
                " expected class Trainer(ReplayMixin, GRPOTrainer)"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_arguments(inspect.signature(trl.GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments)
        super().__init__(*args, **kwargs)
        _check_trainer(self)
        for model in (self.model, self.ref_model):
            if model is not None:
                base = model.get_base_model() if is_peft_model(model) else model
                _add_candidate_head(base, self.temperature)
        self._sets: list[CandidateSets] = []
        self._rows: _ScoredRows | None = None
        self.evaluation = object()
        """Identifies the last evaluation, so that its batches share one weight push."""

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluation = object()
        return super().evaluation_loop(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin and plugin.fsdp_version == 2 and plugin.mixed_precision_policy:
            # With an `output_dtype`, FSDP would round the log-probs that the model returns.
            policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
            plugin.mixed_precision_policy = policy

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        answer = super()._generate(prompts)
        prompt_ids, completion_ids, env_mask, completions, _, extra_fields, *images = answer
        self._sets = _checked_sets(extra_fields.pop("candidate_sets", None), completion_ids, env_mask)
        old_logprobs = [sets.masked_logprobs.tolist() for sets in self._sets]
        return prompt_ids, completion_ids, env_mask, completions, old_logprobs, extra_fields, *images

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # TRL calls `_get_per_token_logps_and_entropies` to score the completions under the reference model.
        # While `_rows` is None, the method scores over `_sets`, the candidate sets of all rows.
        self._rows = None
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        # TRL shuffles and splits lists together with tensor rows, so each row keeps its candidate sets.
        output["candidate_sets"] = self._sets
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if (rows := inputs.get("candidate_rows")) is None:
            rows = _ScoredRows(inputs["candidate_sets"], inputs["completion_ids"], inputs["completion_mask"])
        if self.num_iterations > 1:
            # Keep the `_ScoredRows`, because TRL scores each micro-batch again in every iteration.
            inputs["candidate_rows"] = rows
        self._rows = rows
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Score completions over candidate sets.

        Return three values: the log-probs [B, C], the entropies [B, C], and None. If `compute_entropy` is
        False, the entropies are None. If TRL asks for the old log-probs, all three values are None.
        """
        if model is self.model and not compute_entropy and (self.beta == 0 or self.ref_model is not None):
            # TRL asks for the old log-probs, which the rollout already supplies. With a PEFT adapter and
            # `beta`, it also asks for the reference model's in this way, so then both are computed.
            return None, None, None
        step = batch_size or len(input_ids)
        scores = []
        for start in range(0, len(input_ids), step):
            part = slice(start, start + step)
            rows = self._rows or _ScoredRows(
                self._sets[part],
                input_ids[part, -logits_to_keep:],
                attention_mask[part, -logits_to_keep:],
            )
            inputs = {"input_ids": input_ids[part], "attention_mask": attention_mask[part]}
            with self.accelerator.autocast():
                scores.append(model(**inputs, candidate_rows=rows, compute_entropy=compute_entropy))
        logprobs = torch.cat([each["logprobs"] for each in scores])
        if logprobs.itemsize < 4:
            raise InvalidInputError(
                f"model: it returned log-probs in {logprobs.dtype}, expected float32; if you wrap the model"
                " in FSDP yourself, use a MixedPrecisionPolicy without output_dtype"
            )
        if not compute_entropy:
            return logprobs, None, None
        self._log_replay(rows, logprobs)
        return logprobs, torch.cat([each["entropy"] for each in scores]), None

    def _log_replay(self, rows: _ScoredRows, logprobs: Tensor) -> None:
        metrics = replay_metrics(logprobs[rows.is_scored], rows.old_logprobs, rows.sets)
        world = dist.group.WORLD if dist.is_initialized() else None
        summary = metrics.all_reduce(world, self.accelerator.device).summary()
        for name, value in summary.items():
            if not math.isnan(value):
                self._metrics["train" if self.model.training else "eval"][name].append(value)


class _ScoredRows:
    """A batch's scored completion tokens, and their candidate sets.

    The class is not a dataclass. In mixed precision, FSDP rebuilds each dataclass argument of a forward pass,
    and casts the argument's float tensors to the precision of the parameters.
    """

    def __init__(
        self, sets: Sequence[CandidateSets], completion_ids: Tensor, completion_mask: Tensor
    ) -> None:
        self.is_scored = completion_mask.bool()
        """bool [B, C]: true at completion tokens, except in completions that TRL masks as truncated."""
        self.targets = completion_ids[self.is_scored]
        """int64 [T]: the scored token ids."""
        kept = self.is_scored.any(1).tolist()
        self.sets = CandidateSets.concat([each for each, is_kept in zip(sets, kept, strict=True) if is_kept])
        # `replayed_old_logprobs` raises an error if the set at a position does not belong to the position's
        # target token.
        self.old_logprobs = replayed_old_logprobs(self.sets, output_ids=self.targets)
        """float32 [T] on the CPU: the targets' log-probs at rollout, over the targets' candidate sets."""
        self.tensors = self.sets.to_torch(completion_ids.device)


def _add_candidate_head(model: Any, temperature: float) -> None:
    """Make `model(..., candidate_rows=rows)` return log-probs and entropies over the candidate sets.

    The new code is a branch of the model's own `forward`, because DDP and FSDP run their hooks only around
    `forward`.
    """
    other_forward = model.forward
    config = model.config.get_text_config()

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        candidate_rows: _ScoredRows | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> Any:
        if candidate_rows is None:
            return other_forward(*args, **kwargs)
        rows = candidate_rows
        states = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state
        head = self.get_output_embeddings()
        if isinstance(head, FSDPModule):
            # If the head is an FSDP group of its own, FSDP gathers its weight only before its own `forward`,
            # and this branch does not call `forward`.
            head.unshard()
        scores = score(
            states[:, -rows.is_scored.shape[1] - 1 : -1][rows.is_scored],
            head.weight,
            rows.targets,
            rows.tensors,
            bias=head.bias,
            temperature=temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            logit_scale=_logit_scale(config),
            entropy=compute_entropy,
        )

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(rows.is_scored.shape).masked_scatter(rows.is_scored, values)

        answer = {"logprobs": spread(scores.logprobs)}
        if scores.entropy is not None:
            answer["entropy"] = spread(scores.entropy)
        return answer

    model.forward = MethodType(forward, model)


def _logit_scale(config: Any) -> float:
    """Return the factor by which a transformers model multiplies its logits, before any soft cap."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(config, name, None)) is not None:
            return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is None:
        return 1.0
    return float(scaling if config.model_type == "hyperclovax" else 1 / scaling)


def _checked_sets(
    sets: Any, completion_ids: Sequence[Sequence[int]], env_mask: Sequence[Sequence[int]] | None
) -> list[CandidateSets]:
    """Check the candidate sets that a `rollout_func` returned, and return one CandidateSets per completion.

    Raises:
        MissingCandidateSetsError: the `rollout_func` returned no sets.
        InvalidInputError: the sets do not belong to the completions, or a token that counts in the loss has
            an empty set.
    """
    if sets is None or any(each is None for each in sets):
        raise MissingCandidateSetsError(
            "candidate_sets", "missing in the rollout_func's answer; return rollout_fields(rollouts)"
        )
    if len(sets) != len(completion_ids):
        raise InvalidInputError(f"candidate_sets: got {len(sets)}, expected {len(completion_ids)}")
    for i, (each, ids) in enumerate(zip(sets, completion_ids, strict=True)):
        replayed_old_logprobs(each, output_ids=list(ids))
        has_loss = np.ones(len(ids)) if env_mask is None else np.asarray(env_mask[i])
        if (lacking := np.flatnonzero((each.sizes == 0) & (has_loss != 0))).size:
            raise InvalidInputError(
                f"candidate_sets[{i}]: no candidates at position {lacking[0]}, expected some, or env_mask 0"
            )
    return list(sets)


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if replay does not support one of the `arguments` of `GRPOTrainer`."""
    check_release("trl", trl.__version__, SUPPORTED_TRL)
    if arguments.get("rollout_func") is None:
        raise InvalidInputError("rollout_func: got None, expected SGLangRollouts(client)")
    config = arguments.get("args") or trl.GRPOConfig()
    if config.max_completion_length is None:
        raise InvalidInputError("max_completion_length: got None, expected a number of tokens for SGLang")
    grammars = {"ebnf", "json_schema", "regex"} & set(
        getattr(arguments["rollout_func"], "sampling_params", ())
    )
    if config.top_p >= 1 and (config.top_k or 0) <= 0 and not config.min_p and not grammars:
        raise InvalidInputError(
            f"top_p: got {config.top_p} with top_k {config.top_k} and min_p {config.min_p}, expected one that"
            " filters: every candidate set would be the whole vocabulary, and TRL's own loss is the same"
        )
    turns = "transformers would generate the turns after a tool's answer; override SGLangRollouts.generate"
    others = "they are transformers' options; use SGLangRollouts(client, sampling_params=...)"
    check_options(
        ("use_vllm", config.use_vllm, (False,), "SGLang generates"),
        ("tools", arguments.get("tools"), (None, []), turns),
        ("environment_factory", arguments.get("environment_factory"), (None,), turns),
        ("repetition_penalty", config.repetition_penalty, (None, 1.0), "penalties are not replayed"),
        ("generation_kwargs", config.generation_kwargs, (None, {}), others),
        ("torch_compile", config.torch_compile, (False,), "the compiler cannot trace the candidate head"),
    )


def _check_trainer(trainer: Any) -> None:
    """Raise InvalidInputError if replay does not support the trainer's model or dataset."""
    state = trainer.accelerator.state
    parallelism, fsdp = (getattr(state, name, None) for name in ("parallelism_config", "fsdp_plugin"))
    aux_loss, has_adapter = trainer.router_aux_loss_coef, is_peft_model(trainer.model)
    for problem, is_met in (
        (
            "peft_config: got an adapter that does not merge into the weights, expected one that does, such"
            " as LoRA: SGLang gets merged weights",
            has_adapter and not hasattr(trainer.model.base_model, "merge_and_unload"),
        ),
        (
            "peft_config: got an adapter of a quantized model, expected one in full precision: merging would"
            " round the adapter away",
            has_adapter and getattr(trainer.model.get_base_model(), "hf_quantizer", None) is not None,
        ),
        ("peft_config: got an adapter and FSDP, expected DDP: not tested", has_adapter and fsdp),
        ("deepspeed: got a config, expected DDP or FSDP2: not tested", trainer.is_deepspeed_enabled),
        ("fsdp_config: got version 1, expected 2: not tested", fsdp and fsdp.fsdp_version != 2),
        (
            "fsdp_config: got cpu_ram_efficient_loading and a reference model (beta), expected one of them:"
            " TRL loads the reference model's weights in one process only",
            fsdp and fsdp.cpu_ram_efficient_loading and trainer.ref_model is not None,
        ),
        (
            "model: got one that transformers shards while it loads, expected a whole model for DDP or FSDP2:"
            " a weight push would need all processes",
            trainer.is_distributed_loading_by_transformers,
        ),
        (
            "parallelism_config: got tensor, context, or sequence parallelism, expected data parallelism:"
            " each process samples its own completions",
            parallelism and (parallelism.tp_enabled or parallelism.cp_enabled or parallelism.sp_enabled),
        ),
        (
            f"router_aux_loss_coef: got {aux_loss}, expected 0: the candidate head returns no router logits",
            trainer.aux_loss_enabled,
        ),
        (
            "processing_class: got a processor, expected a tokenizer: the client sends no images",
            trainer._is_vlm,
        ),
    ):
        if is_met:
            raise InvalidInputError(problem)
    evals = trainer.eval_dataset
    for dataset in (trainer.train_dataset, *(evals.values() if isinstance(evals, dict) else [evals])):
        if columns := {"image", "images"} & set(getattr(dataset, "column_names", None) or ()):
            raise InvalidInputError(
                f"dataset: got a column {min(columns)!r}, expected none: the client sends no images"
            )
