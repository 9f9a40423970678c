"""A pass on a GPU: its sets equal those of the CPU, and nothing waits before the pass is consumed.

`test_staging` runs this file, on a GPU or interpreted. A pass runs SGLang's own functions with the hooks
around them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_topp import nucleus
from sglang_topp_patches.memory import Budget
from sglang_topp_patches.releases import internals
from sglang_topp_patches.request import SetsRequest, attach
from sglang_topp_patches.scheduler import prompts, requests, sets, step, verification
from sglang_topp_patches.scheduler.host_copy_before_0_5_19 import Committed
from sglang_topp_patches.scheduler.requests import SchedulerProcess, Weights
from sglang_topp_patches.scheduler.sets import ExtractedSets, extract, extract_support, staging_counts
from sglang_topp_patches.scheduler.step import ForwardPass, RequestedRows, TopLogprobsNums
from sglang_topp_patches.set_buffer import KEY
from tests.fake_gpu import forbid_waits, gpu
from tests.nucleus import reference

PROCESS = SchedulerProcess()
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


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    staging_counts.update(dict.fromkeys(staging_counts, 0))


@pytest.fixture
def room(staged_per_row: int) -> Iterator[None]:
    with (
        mock.patch.object(sets, "budget", return_value=Budget(1 << 20, 1 << 20, staged_per_row)),
        mock.patch.object(sets, "_LEAST_ROWS", 1),
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
        with forbid_waits():
            found = extract(there, thresholds, drawn.clone()).map(on_host)
        # Do what SGLang does before it consumes the pass.
        there.clamp_(min=torch.finfo(torch.float32).min)
        drawn.zero_()
        packed = found.on_host()
    assert packed[1] == (b"", b"")
    assert "holds NaN" in packed[2]
    for row in (0, 3, 4):
        assert packed[row : row + 1] == by_the_cpu(logprobs[row], thresholds[row], int(sampled[row]))


@BOTH
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sampled_token_of_probability_0_has_the_log_prob_of_0(dtype: torch.dtype) -> None:
    logprobs, sampled = logprobs_of(2, std=4).to(dtype), torch.tensor([9, 3])
    logprobs[0, 9] = logprobs[1, 3] = -torch.inf
    with gpu():
        there = logprobs.to("cuda")
        found = extract(there, [0.9, 0.9], sampled.to("cuda")).map(on_host)
        # SGLang does this before it consumes the pass. Every row asks, so the pass kept this tensor.
        there.clamp_(min=torch.finfo(dtype).min)
        packed = found.on_host()
    for row in (0, 1):
        assert packed[row : row + 1] == by_the_cpu(logprobs[row], 0.9, int(sampled[row]))


@BOTH
@pytest.mark.usefixtures("room")
def test_settled_sets_are_whole_and_on_the_device() -> None:
    logprobs, sampled = logprobs_of(3), torch.tensor([5, 6, 7])
    with gpu():
        settled = extract(logprobs.to("cuda"), [0.9, 0.5, 1.0], sampled.to("cuda")).settled()
        assert isinstance(settled, ExtractedSets)
        assert settled.token_ids.device.type == "cuda"
        packed = settled.map(lambda tensor: tensor.cpu()).on_host()
    for row, p in enumerate([0.9, 0.5, 1.0]):
        assert packed[row : row + 1] == by_the_cpu(logprobs[row], p, int(sampled[row]))


@BOTH
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("rule", ["threshold", "sampler"])
def test_only_the_rows_that_ask_are_kept(rule: str) -> None:
    logprobs, sampled = logprobs_of(5), torch.tensor([1, 2, 3, 4, 5])
    with gpu():
        there, drawn = logprobs.to("cuda"), sampled.to("cuda")
        is_drawn = torch.ones((2, VOCAB), dtype=torch.bool, device="cuda")
        with forbid_waits():
            if rule == "threshold":
                found = extract(there, [0.0, 1.0, 0.0, 1.0, 0.0], drawn)
            else:
                found = extract_support(there, [1, 3], is_drawn, None, drawn, is_drawn[:, 0])
        whole = weakref.ref(there)
        del there
        assert whole() is None
        copied = found.map(on_host)
        del found
        packed = copied.on_host()
    if rule == "threshold":
        assert packed[0] == packed[2] == packed[4] == (b"", b"")
        packed = [packed[1], packed[3]]
    assert packed == [*by_the_cpu(logprobs[1], 1.0, 2), *by_the_cpu(logprobs[3], 1.0, 4)]


def request(rid: str) -> Any:
    return SimpleNamespace(
        rid=rid,
        customized_info=None,
        is_retracted=False,
        input_embeds=None,
        origin_input_ids=[],
        logprob_start_len=0,
        sampling_params=SimpleNamespace(),
        sglang_topp_weights=Weights(0, "7"),
    )


def committed(token: int) -> Committed:
    return Committed(output_index=0, token_ids=(token,))


@BOTH
@pytest.mark.usefixtures("room")
def test_a_decode_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by threshold, rows from the sampler, and rows without sets, from the hook to the request."""
    monkeypatch.setattr(requests, "refuse_too_many", lambda req: None)
    monkeypatch.setattr(step, "is_refused", lambda req: False)
    monkeypatch.setattr(type(internals()), "weight_version", lambda self: "7")
    logprobs, sampled = logprobs_of(4), torch.tensor([3, 1, 4, 1])
    weights = torch.where(logprobs > -6.0, logprobs.exp(), 0)
    rows = RequestedRows(tuple("abcd"), (0.9, 0.0, 0.0, 0.0), drawn=(1, 2), greedy=frozenset({2}))
    with gpu():
        there, drawn, weights_there = logprobs.to("cuda"), sampled.to("cuda"), weights.to("cuda")
        captured = SimpleNamespace(weights=weights_there[1:3], token_ids=None)
        info = SimpleNamespace(sampling_mask_batch_indices=None)
        forward_pass = ForwardPass(rows)
        with forbid_waits():
            with monkeypatch.context() as patch:
                patch.setattr(step, "_sampled_pass", SimpleNamespace(get=lambda: forward_pass))
                step.sample_from_probs(lambda *_: (drawn, captured), None, weights_there, info)
                step.compute_logprobs(None, there, [0] * 4, [None] * 4, drawn)
            there.clamp_(min=torch.finfo(torch.float32).min)  # as SGLang does
            assert forward_pass.generated is not None
            output = forward_pass.generated.copy_to_host(on_host)
        # The next step of a CUDA graph overwrites the weights.
        weights_there.zero_()
        reqs = [request(rid) for rid in "abcd"]
        output.consume(SimpleNamespace(reqs=reqs), [committed(token) for token in sampled.tolist()])
    assert reqs[3].customized_info is None
    found = [req.customized_info[KEY].generated.sets()[0] for req in reqs[:3]]
    assert [found[0]] == by_the_cpu(logprobs[0], 0.9, 3)
    ids, values, _ = reference.support_candidates(logprobs[1:2], weights[1:2], sampled_ids=[1])
    assert found[1] == (ids.numpy().tobytes(), values.numpy().tobytes())
    assert len(found[2][0]) == 4
    assert staging_counts["rows_staged"] == 3
    assert (staging_counts["rows_taken_again"] > 0) == (sets.budget().staged_candidates_per_row == 1)


@BOTH
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("is_greedy", [False, True], ids=["sampled", "greedy"])
def test_a_verification_waits_for_nothing(monkeypatch: pytest.MonkeyPatch, is_greedy: bool) -> None:
    """Five requests, from SGLang's verification to their sets.

    Only the device knows how many tokens each request accepted. One request does not ask.
    """
    monkeypatch.setattr(requests, "refuse_too_many", lambda req: None)
    monkeypatch.setattr(type(internals()), "weight_version", lambda self: "7")
    monkeypatch.setattr(type(internals()), "answers_requests", lambda self: True)
    fields: list[dict[str, Any]] = [
        {"top_logprobs_p": 0.9},
        {"top_logprobs_source": "sampler"},
        {},
        {"top_logprobs_source": "sampler"},
        {"top_logprobs_p": 0.4},
    ]
    width, lens = 3, [1, 3, 2, 2, 3]
    logprobs = logprobs_of(5 * width, std=3)
    probs = torch.where(logprobs > -6.0, logprobs.exp(), 0)
    tokens = logprobs.argmax(-1).int()
    index = torch.arange(5 * width, dtype=torch.int32).view(5, width)
    index = torch.where(torch.arange(width) < torch.tensor(lens)[:, None], index, -1).int()
    reqs = [
        verified_request(rid, each, top_k=1 if is_greedy else 9)
        for rid, each in zip("abcde", fields, strict=True)
    ]
    kernels = SimpleNamespace(draw=lambda **kwargs: None)
    monkeypatch.setattr(type(internals()), "verification_kernels", lambda self: [(kernels, "draw")])
    attached: list[Any] = []  # each release keeps it elsewhere
    monkeypatch.setattr(type(internals()), "attach", lambda self, output, sets: attached.append(sets))
    with gpu():
        there = {name: each.to("cuda") for name, each in {"p": probs, "t": tokens, "i": index}.items()}
        batch = SimpleNamespace(
            reqs=reqs,
            return_logprob=True,
            forward_mode=SimpleNamespace(is_idle=lambda: False),
            sampling_info=SimpleNamespace(is_all_greedy=is_greedy, temperatures=torch.ones(5, 1).to("cuda")),
        )
        output = SimpleNamespace(next_token_logits=logprobs.to("cuda"), auxiliary_device_output=None)
        accept_lens = torch.tensor(lens, dtype=torch.int32).to("cuda")

        def eagle_sample(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
            if not is_greedy:
                target = there["p"].view(5, width, -1)
                kernels.draw(predicts=there["t"], accept_index=there["i"], target_probs=target)
            return there["t"], accept_lens, there["i"]

        with forbid_waits():
            result = verification.sample(eagle_sample, None, batch, output)
            verification.compute_logprobs(lambda *args, **kwargs: None, batch, output, result[0])
            copied = attached[-1].copy_to_host(on_host)
        there["p"].zero_()
        commits = [
            Committed(0, tuple(tokens.view(5, width)[row, :count].tolist())) for row, count in enumerate(lens)
        ]
        copied.consume(SimpleNamespace(reqs=reqs), commits)
    assert staging_counts["rows_staged"] <= 4 * width, "only the requests that ask are staged"
    for row, (req, each) in enumerate(zip(reqs, fields, strict=True)):
        if not each:
            assert req.customized_info is None
            continue
        found = req.customized_info[KEY].generated.sets()
        assert len(found) == lens[row]
        for (token_ids, _), at in zip(found, range(row * width, row * width + lens[row]), strict=True):
            token = int(tokens[at])
            if p := each.get("top_logprobs_p"):
                expected = by_the_cpu(torch.log_softmax(logprobs[at], -1), p, token)
                assert np.frombuffer(token_ids, np.int32).tolist() == (
                    np.frombuffer(expected[0][0], np.int32).tolist()
                )
            else:
                support = {token} if is_greedy else set(probs[at].nonzero().flatten().tolist())
                assert set(np.frombuffer(token_ids, np.int32).tolist()) == support


def verified_request(rid: str, custom: dict[str, Any], top_k: int) -> Any:
    req = request(rid)
    req.sampling_params = SimpleNamespace(custom_params=None, top_k=top_k)
    threshold, is_from_sampler = custom.get("top_logprobs_p", 0.0), "top_logprobs_source" in custom
    attach(req, SetsRequest(threshold=threshold, is_from_sampler=is_from_sampler))
    return req


def prompt_pass(
    logits: Tensor, next_ids: Tensor, counts: list[int], thresholds: tuple[float, ...], *, chunk: int
) -> prompts.PromptSets:
    """Score prompts as SGLang does, `chunk` rows at a time, with the hook around it."""
    rows = RequestedRows(tuple("ab"[: len(counts)]), thresholds)
    nums = TopLogprobsNums([0] * len(counts))
    nums.forward_pass = ForwardPass(rows)
    indices = torch.arange(len(logits), device=logits.device)

    def score(self: Any, *, get_logits_fn: Any, **kwargs: Any) -> None:
        for start in range(0, len(logits), chunk):
            get_logits_fn(logits[start : start + chunk])

    prompts.forward(
        PROCESS,
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
    prompt = nums.forward_pass.prompt
    assert isinstance(prompt, prompts.PromptSets)
    return prompt


@BOTH
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("chunk", [9, 5, 2])
def test_prompts(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Two chunks do not wait for the device. At most two chunks keep their log-probs."""
    monkeypatch.setattr(prompts, "refuse_too_many", lambda req: None)
    monkeypatch.setattr(prompts, "is_refused", lambda req: False)
    monkeypatch.setattr(type(internals()), "weight_version", lambda self: "7")
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(3))
    next_ids = torch.arange(9) * 7
    with gpu():
        there, ids = logits.to("cuda"), next_ids.to("cuda")
        expected = internals().input_logprobs(PROCESSOR, there).cpu()
        if chunk >= 5:
            with forbid_waits():
                output = prompt_pass(there, ids, [4, 5], (0.9, 0.7), chunk=chunk).copy_to_host(on_host)
        else:
            output = prompt_pass(there, ids, [4, 5], (0.9, 0.7), chunk=chunk).copy_to_host(on_host)
        under_way = [each for each in output.chunks if isinstance(each, sets.StagedSets)]
        assert len(under_way) == min(2, -(-9 // chunk))
        reqs = [request(rid) for rid in "ab"]
        output.consume(SimpleNamespace(reqs=reqs), [None, None])
    found = [packed_set for req in reqs for packed_set in req.customized_info[KEY].prompt.sets()]
    assert len(found) == 9
    for row, got in enumerate(found):
        assert [got] == by_the_cpu(expected[row], 0.9 if row < 4 else 0.7, 7 * row)


def test_what_ran_in_each_step_before_fails_here() -> None:
    with gpu():
        if torch.cuda.is_available():
            return
        there = logprobs_of(2).to("cuda")
        before = mock.patch.object(sets, "is_staged", return_value=False)
        without_kernels = mock.patch.object(nucleus, "_has_kernels", return_value=False)
        with (
            before,
            without_kernels,
            forbid_waits(),
            pytest.raises(AssertionError, match="the host would wait"),
        ):
            extract(there, [0.9, 0.5], torch.tensor([1, 2]).to("cuda"))
