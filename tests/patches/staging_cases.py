"""A pass on a GPU: its sets are those of the CPU whatever fits, and nothing waits before it is consumed.

`test_staging` runs this file, on a GPU or interpreted. What a pass goes through is the hooks themselves
around SGLang's own functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sglang_topp import nucleus
from sglang_topp.nucleus import reference
from sglang_topp_patches import extract as cpu
from sglang_topp_patches import prefill, sampler, staging, support
from sglang_topp_patches.budget import Budget
from sglang_topp_patches.extract import extract
from sglang_topp_patches.lifecycle import Committed
from sglang_topp_patches.payload import KEY, PROMPT_KEY
from sglang_topp_patches.pipeline import PassSets
from sglang_topp_patches.releases import internals
from sglang_topp_patches.row_sets import RowSets
from sglang_topp_patches.rows import Rows, _TopLogprobsNums
from tests.gpu import gpu, no_waits

VOCAB = 300
PROCESSOR = SimpleNamespace(enable_fast_input_logprobs=False)
BOTH = pytest.mark.parametrize("staged_per_row", [256, 1], ids=["all fit", "few fit"])


def logprobs_of(rows: int, *, std: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(rows, VOCAB, generator=generator) * std, -1)


def on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", non_blocking=True)


@pytest.fixture(autouse=True)
def no_word_of_the_model() -> Iterator[None]:
    with mock.patch.object(type(internals()), "sanitizes_logits", return_value=False):
        yield


@pytest.fixture
def room(staged_per_row: int) -> Iterator[None]:
    with (
        mock.patch.object(staging, "budget", return_value=Budget(1 << 20, 1 << 20, staged_per_row)),
        mock.patch.object(staging, "_LEAST_ROWS", 1),
    ):
        yield


def by_the_cpu(logprobs: Tensor, p: float, sampled: int) -> list[tuple[bytes, bytes]]:
    ids, values, _ = reference.top_p_candidates(logprobs[None], p, [sampled])
    return [(ids.numpy().tobytes(), values.numpy().tobytes())]


@BOTH
@pytest.mark.usefixtures("room")
def test_sets_are_those_of_the_cpu() -> None:
    logprobs = logprobs_of(5, std=4)
    logprobs[2, 7] = torch.nan
    logprobs[4, 9] = -torch.inf
    thresholds, sampled = [0.9, 0.0, 0.9, 1.0, 0.99], torch.tensor([1, 2, 3, 4, 9])
    with gpu():
        there = logprobs.to("cuda")
        drawn = sampled.to("cuda")
        with no_waits():
            sets = extract(there, thresholds, drawn).map(on_host)
        # What SGLang does before the pass is consumed.
        there.clamp_(min=torch.finfo(torch.float32).min)
        drawn.zero_()
        got = sets.on_host()
    assert list(got.problems) == [2]
    assert "row 2 holds NaN" in got.problems[2]
    spans = got.spans()
    assert spans[1] == spans[2] == (b"", b"")
    for row in (0, 3, 4):
        assert spans[row : row + 1] == by_the_cpu(logprobs[row], thresholds[row], int(sampled[row]))


@BOTH
@pytest.mark.usefixtures("room")
def test_settled_sets_are_whole_and_on_the_device() -> None:
    logprobs, sampled = logprobs_of(3), torch.tensor([5, 6, 7])
    with gpu():
        settled = extract(logprobs.to("cuda"), [0.9, 0.5, 1.0], sampled.to("cuda")).settled()
        assert isinstance(settled, RowSets)
        assert settled.token_ids.device.type == "cuda"
        spans = settled.map(lambda tensor: tensor.cpu()).spans()
    for row, p in enumerate([0.9, 0.5, 1.0]):
        assert spans[row : row + 1] == by_the_cpu(logprobs[row], p, int(sampled[row]))


def request(rid: str) -> Any:
    return SimpleNamespace(
        rid=rid, customized_info=None, is_retracted=False, sampling_params=SimpleNamespace()
    )


def committed(token: int) -> Committed:
    return Committed(output_index=0, token_ids=(token,))


@BOTH
@pytest.mark.usefixtures("room")
def test_a_decode_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ask by threshold, from the sampler, and not at all, from the hook to the request."""
    monkeypatch.setattr(sampler, "charge", lambda *args: None)
    monkeypatch.setattr(sampler, "is_refused", lambda req: False)
    logprobs, sampled = logprobs_of(4), torch.tensor([3, 1, 4, 1])
    weights = torch.where(logprobs > -6.0, logprobs.exp(), 0)
    rows = Rows(tuple("abcd"), (0.9, 0.0, 0.0, 0.0), drawn=(1, 2), greedy=frozenset({2}))
    counts = staging.Counts()
    monkeypatch.setattr(staging, "counts", counts)
    with gpu():
        there, drawn, weights_there = logprobs.to("cuda"), sampled.to("cuda"), weights.to("cuda")
        drawing = support.Drawing(rows.drawn, rows.greedy)
        captured = SimpleNamespace(weights=weights_there[1:3], token_ids=None)
        info = SimpleNamespace(sampling_mask_batch_indices=None)
        monkeypatch.setattr(sampler, "_active", capture := sampler._Capture(rows, drawing))
        with no_waits():
            with support.capture(drawing):
                support.sample_from_probs(lambda *_: (drawn, captured), None, weights_there, info)
            # SGLang reads its own tensors there; it asks for no more than they are.
            sampler.compute_logprobs(
                lambda self, logprobs, *_: logprobs.clamp_(min=torch.finfo(torch.float32).min),
                None,
                there,
                [0] * 4,
                [None] * 4,
                drawn,
            )
            output = PassSets((sampler.GeneratedSets(rows, capture.sets, "w", capture.drawn),))
            output = output.copy_to_host(on_host)
        # A CUDA graph's next step writes where the weights are.
        weights_there.zero_()
        requests = [request(rid) for rid in "abcd"]
        output.consume(SimpleNamespace(reqs=requests), [committed(token) for token in sampled.tolist()])
    entries = [req.customized_info and req.customized_info[KEY][0] for req in requests]
    assert entries[3] is None
    assert not any(entry.problem for entry in entries[:3])
    assert [entries[0].candidates] == by_the_cpu(logprobs[0], 0.9, 3)
    ids, values, _ = reference.support_candidates(logprobs[1:2], weights[1:2], sampled_ids=[1])
    assert entries[1].candidates == (ids.numpy().tobytes(), values.numpy().tobytes())
    assert len(entries[2].candidates[0]) == 4
    assert counts.rows_staged == 3
    assert (counts.rows_taken_again > 0) == (staging.budget().staged_candidates_per_row == 1)


def prompt_pass(
    logits: Tensor, next_ids: Tensor, counts: list[int], thresholds: tuple[float, ...], *, chunk: int
) -> prefill.PromptSets:
    """SGLang's scoring of prompts, `chunk` rows at a time, with the hook around it."""
    rows = Rows(tuple("ab"[: len(counts)]), thresholds)
    nums = _TopLogprobsNums([0] * len(counts))
    nums.rows = rows
    indices = torch.arange(len(logits), device=logits.device)

    def score(self: Any, *, get_logits_fn: Any, **kwargs: Any) -> None:
        for start in range(0, len(logits), chunk):
            get_logits_fn(logits[start : start + chunk])

    prefill.forward(
        score,
        PROCESSOR,
        logits_metadata=SimpleNamespace(
            top_logprobs_nums=nums,
            extend_logprob_pruned_lens_cpu=counts,
            input_logprob_indices_cpu=list(range(len(logits))),
            extend_input_logprob_token_ids_gpu=next_ids,
        ),
        input_logprob_indices=indices,
        get_logits_fn=lambda states: states,
    )
    assert isinstance(rows.prompt, prefill.PromptSets)
    return rows.prompt


@BOTH
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("chunk", [9, 5, 2])
def test_prompts(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Up to two chunks wait for nothing; of more, two at most keep their log-probs."""
    monkeypatch.setattr(prefill, "charge", lambda *args: None)
    monkeypatch.setattr(prefill, "is_refused", lambda req: False)
    monkeypatch.setattr(type(internals()), "weight_version", lambda self: "7")
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(3))
    next_ids = torch.arange(9) * 7
    with gpu():
        there, ids = logits.to("cuda"), next_ids.to("cuda")
        expected = internals().input_logprobs(PROCESSOR, there).cpu()
        if chunk >= 5:
            with no_waits():
                output = prompt_pass(there, ids, [4, 5], (0.9, 0.7), chunk=chunk).copy_to_host(on_host)
        else:
            output = prompt_pass(there, ids, [4, 5], (0.9, 0.7), chunk=chunk).copy_to_host(on_host)
        under_way = [each for each in output.chunks if isinstance(each, staging.StagedSets)]
        assert len(under_way) == min(2, -(-9 // chunk))
        requests = [request(rid) for rid in "ab"]
        output.consume(SimpleNamespace(reqs=requests), [None, None])
    found = [span for req in requests for span in list(req.customized_info[PROMPT_KEY])[1:]]
    assert len(found) == 9
    for row, got in enumerate(found):
        assert [got] == by_the_cpu(expected[row], 0.9 if row < 4 else 0.7, 7 * row)


def test_what_ran_in_each_step_before_fails_here() -> None:
    with gpu():
        if torch.cuda.is_available():
            return
        there = logprobs_of(2).to("cuda")
        before = mock.patch.object(staging, "is_staged", return_value=False)
        without_kernels = mock.patch.object(nucleus, "_has_kernels", return_value=False)
        with before, without_kernels, no_waits(), pytest.raises(AssertionError, match="the host would wait"):
            cpu.extract(there, [0.9, 0.5], torch.tensor([1, 2]).to("cuda"))
