"""Native sampling masks, which need no plugin, and SGLang's fixed-k log-probs in the plugin's arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_topp import formats
from sglang_topp.batch import collate_rl, nest_batch, unnest_batch
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError
from sglang_topp.replay import replay_metrics, replayed_old_logprobs, score, score_logits
from tests.engine.candidate_set_checks import distributions
from tests.engine.conftest import VOCAB_SIZE
from tests.engine.start_servers import Engine
from tests.skip_missing_features import needs_native_masks

PROMPTS = ["The quick brown fox", "a", "0123456789" * 8]
SAMPLING = {"max_new_tokens": 24, "temperature": 0.8, "ignore_eos": True}


def whole_distribution(entries: list[Any]) -> np.ndarray:
    """Return float32 [V], by token id: a row of `top_logprobs_num` over the whole vocabulary."""
    logprobs = np.full(VOCAB_SIZE, np.nan, np.float32)
    logprobs[[token_id for _, token_id, _ in entries]] = [logprob for logprob, _, _ in entries]
    assert not np.isnan(logprobs).any()
    return logprobs


def test_fixed_k_arrays_hold_what_the_lists_hold(engine: Engine) -> None:
    request = {"text": PROMPTS, "sampling_params": {**SAMPLING, "temperature": 0}}
    request |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
    listed = engine.generate(**request)
    packed = engine.generate(**request, return_logprobs_in_base64=True)
    for one, other in zip(listed, packed, strict=True):
        assert "output_top_logprobs" not in other["meta_info"]
        for side, count in (("input", one["meta_info"]["prompt_tokens"]), ("output", 24)):
            rows = distributions(one["meta_info"], side, count)
            assert len(rows) == count
            for row, same in zip(rows, distributions(other["meta_info"], side, count), strict=True):
                assert row[0].tolist() == same[0].tolist()
                np.testing.assert_allclose(row[1], same[1], atol=1e-5)


def test_streamed_and_empty_answers_have_fixed_k_arrays(engine: Engine) -> None:
    request = {"return_logprob": True, "top_logprobs_num": 3, "return_logprobs_in_base64": True}
    for chunk in engine.stream(text="hello", **request, sampling_params=SAMPLING):
        rows = distributions(chunk["meta_info"], "output", len(chunk["output_ids"]))
        assert [len(ids) for ids, _ in rows] == [3] * len(chunk["output_ids"])
    nothing = engine.generate(text="hello", **request, sampling_params={"max_new_tokens": 0})
    assert len(distributions(nothing["meta_info"], "output", 1)) <= 1


@needs_native_masks("sampling_logprobs_mode")
@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 20},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": VOCAB_SIZE},
        {"top_k": 1},
        {"top_k": 30, "min_p": 0.05},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_support_logprobs_become_those_of_the_whole_distribution(
    engine: Engine, sampling: dict[str, Any]
) -> None:
    answers = engine.generate(
        text=PROMPTS,
        sampling_params={**SAMPLING, **sampling},
        return_logprob=True,
        top_logprobs_num=VOCAB_SIZE,
        return_sampling_mask=True,
        sampling_logprobs_mode="support",
    )
    for answer in answers:
        meta_info, output_ids = answer["meta_info"], answer["output_ids"]
        sets = formats.decode_sampling_mask(meta_info, output_ids, vocab_size=VOCAB_SIZE)
        assert len(sets) == len(output_ids) == 24
        reported = np.array([entry[0] for entry in meta_info["output_token_logprobs"]], np.float32)
        np.testing.assert_array_equal(sets.sampled_logprobs, reported)
        for t, (ids, logprobs) in enumerate(sets):
            assert sorted(ids.tolist()) == sorted(meta_info["output_token_sampling_mask"][t])
            q = whole_distribution(meta_info["output_top_logprobs"][t])
            np.testing.assert_allclose(logprobs, q[ids], atol=3e-6)
            np.testing.assert_allclose(
                sets.log_kept_mass[t], np.log(np.exp(q[ids].astype(float)).sum()), atol=3e-6
            )


@needs_native_masks()
def test_a_native_mask_is_replayed_and_batched(engine: Engine, model_path: Path) -> None:
    """The whole cycle without the plugin: mask, batch, trainer, and importance ratios of 1."""
    answers = engine.generate(
        # Not with `n`: SGLang 0.5.23 first sends a request with `max_new_tokens` 0 for it, which has no mask.
        text=PROMPTS * 2,
        sampling_params={**SAMPLING, "top_k": 20},
        return_prompt_token_ids=True,
        return_sampling_mask=True,
    )
    metas, outputs = [answer["meta_info"] for answer in answers], [answer["output_ids"] for answer in answers]
    samples = [
        formats.decode_sampling_mask(meta_info, output_ids, vocab_size=VOCAB_SIZE)
        for meta_info, output_ids in zip(metas, outputs, strict=True)
    ]
    old = torch.tensor(
        [logprob for meta_info in metas for logprob in meta_info["output_token_sampling_logprobs"]]
    )
    assert set(np.concatenate([sets.sizes for sets in samples]).tolist()) == {20}

    ones = [[1] * len(output_ids) for output_ids in outputs]
    prompts = [answer["prompt_token_ids"] for answer in answers]
    batch = collate_rl(prompts, outputs, ones, ones, candidates=samples, pad_token_id=0)
    batch = unnest_batch(nest_batch(batch, {"response_mask": "response_mask"}))
    assert list(batch["candidates"]) == samples
    sets = batch["candidates"].sets
    assert not sets.has_logprobs

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    weight = model.get_output_embeddings().weight.detach().requires_grad_()
    hidden = []
    for prompt_ids, output_ids in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt_ids + output_ids])).last_hidden_state[0]
        hidden.append(states[len(prompt_ids) - 1 : -1])
    hidden_TH = torch.cat(hidden)
    targets = torch.tensor([token_id for output_ids in outputs for token_id in output_ids])

    from_states = score(hidden_TH, weight, targets, sets, temperature=0.8).logprobs
    from_logits = score_logits(hidden_TH @ weight.detach().T, targets, sets, temperature=0.8).logprobs
    for new in (from_states.detach(), from_logits):
        assert ((new - old).exp() - 1).abs().max() < 1e-4
    assert abs(replay_metrics(from_states.detach(), old, sets).summary()["replay/ratio_mean"] - 1) < 1e-5
    from_states.sum().backward()
    assert torch.isfinite(weight.grad).all()
    with pytest.raises(InvalidInputError, match="logprobs: these candidate sets have none"):
        replayed_old_logprobs(sets)


@needs_native_masks()
def test_streamed_answers_have_masks(engine: Engine) -> None:
    request = {"text": "hello", "return_sampling_mask": True}
    chunks = engine.stream(**request, sampling_params={**SAMPLING, "top_k": 20})
    for chunk in chunks:
        sets = formats.decode_sampling_mask(chunk["meta_info"], chunk["output_ids"])
        assert len(sets) == len(chunk["output_ids"])
    without = engine.generate(text="hello", sampling_params=SAMPLING)
    with pytest.raises(MissingCandidateSetsError):
        formats.decode_sampling_mask(without["meta_info"], without["output_ids"])
