"""The weights of SGLang's sampler are captured for the rows that ask, and its own mask stays correct."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler

from sglang_topp_patches.releases import Feature
from sglang_topp_patches.scheduler import step
from sglang_topp_patches.scheduler.sets import ExtractedSets
from sglang_topp_patches.scheduler.step import (
    ForwardPass,
    RequestedRows,
    rank_only_top_k,
    sample_from_probs,
)
from tests.skip_missing_features import is_hook_here, skip_without

skip_without(Feature.SAMPLER_SOURCE)

VOCAB = 40
RANKS_ONLY_TOP_K = is_hook_here(rank_only_top_k)
TOP_KS, TOP_PS, MIN_PS = [5, 40, 1, 9], [0.9, 0.5, 1.0, 0.95], [0.0, 0.1, 0.0, 0.3]


@pytest.fixture
def probs() -> torch.Tensor:
    return torch.softmax(torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 3, -1)


def by_definition(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the filtered tokens of one row without ties, token by token."""
    order = row.argsort(descending=True).tolist()
    kept, above = set(), 0.0
    for rank, token in enumerate(order):
        if rank < top_k and above <= top_p and float(row[token]) >= min_p * float(row[order[0]]):
            kept.add(token)
        above += float(row[token])
    return kept


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, probs: torch.Tensor) -> Any:
    """Sample as SGLang does, with the release's hooks in place."""
    monkeypatch.setattr(
        sglang_sampler,
        "get_exec",
        lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch")),
    )
    original = sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch
    widths: list[int] = []

    def watched(probs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(probs.shape[1])
        return original(probs, *args, **kwargs)

    monkeypatch.setattr(
        sglang_sampler,
        "top_k_top_p_min_p_sampling_from_probs_torch",
        partial(rank_only_top_k, watched) if RANKS_ONLY_TOP_K else watched,
    )

    def run(
        drawing: ForwardPass | None,
        native: list[int] | None = None,
        top_ks: list[int] = TOP_KS,
        top_ps: list[float] = TOP_PS,
        simple: bool = False,
        seed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any, int]:
        info = SimpleNamespace(
            sampling_mask_batch_indices=None if native is None else torch.tensor(native),
            sampling_seed=seed,
            top_ks=torch.tensor(top_ks),
            top_ps=torch.tensor(top_ps),
            min_ps=torch.tensor(MIN_PS),
            need_min_p_sampling=True,
            need_top_k_sampling=True,
            need_top_p_sampling=True,
            max_top_k=max(top_ks) if max(top_ks) < VOCAB else None,
        )
        with monkeypatch.context() as patch:
            patch.setattr(step, "_sampled_pass", SimpleNamespace(get=lambda: drawing))
            sampled, captured = sample_from_probs(
                sglang_sampler.Sampler._sample_from_probs,
                SimpleNamespace(),
                probs.clone(),
                info,
                torch.arange(4),
                simple,
            )
        assert (info.sampling_mask_batch_indices is None) is (native is None)
        return sampled, captured, widths[-1] if widths else 0

    return run


def drawing_of(rows: tuple[int, ...], greedy: frozenset[int] = frozenset()) -> ForwardPass:
    """Return a pass of four rows, of which some ask for what the sampler could draw."""
    return ForwardPass(RequestedRows(tuple("abcd"), (0.0,) * 4, rows, greedy))


def extracted(drawing: ForwardPass, logprobs: torch.Tensor, sampled: torch.Tensor) -> ExtractedSets:
    sets = drawing.extract(logprobs, sampled, "7").drawn
    assert isinstance(sets, ExtractedSets)
    return sets


def sets_of(drawing: ForwardPass, probs: torch.Tensor, sampled: torch.Tensor) -> list[set[int]]:
    found = extracted(drawing, probs.log(), sampled)
    assert not found.problems
    bounds = found.offsets.tolist()
    return [set(found.token_ids[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("top_ks", [TOP_KS, [5, 12, 1, 9]], ids=["all of a row", "the highest alone"])
def test_sets_are_the_filters_of_the_rows_that_ask(draw: Any, probs: torch.Tensor, top_ks: list[int]) -> None:
    drawing = drawing_of((0, 1, 3))
    sampled, captured, width = draw(drawing, top_ks=top_ks)
    assert captured is None  # SGLang did not ask for a mask
    assert width == (12 if top_ks is not TOP_KS and RANKS_ONLY_TOP_K else VOCAB)
    expected = [by_definition(probs[row], top_ks[row], TOP_PS[row], MIN_PS[row]) for row in (0, 1, 3)]
    assert sets_of(drawing, probs, sampled) == expected


def test_the_token_is_that_of_sglang_alone(draw: Any, probs: torch.Tensor) -> None:
    """Each rank draws by itself, so a request for sets must not change the drawn token."""
    for top_ks in (TOP_KS, [5, 12, 1, 9]):
        drawn = []
        for drawing in (None, drawing_of((0, 1, 2, 3)), drawing_of((2,), frozenset({2}))):
            torch.manual_seed(7)
            drawn.append(torch.stack([draw(drawing, top_ks=top_ks)[0] for _ in range(50)]))
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("top_ks", [TOP_KS, [5, 12, 1, 9]])
def test_sglangs_own_mask_is_what_it_would_have_been(draw: Any, top_ks: list[int]) -> None:
    _, alone, _ = draw(None, native=[1, 3], top_ks=top_ks)
    sampled, beside, width = draw(drawing_of((0, 1)), native=[1, 3], top_ks=top_ks)
    assert beside.batch_rows.tolist() == [1, 3]
    assert torch.equal(alone.weights[:, :width], beside.weights)
    assert torch.equal(alone.token_ids[:, :width], beside.token_ids)
    is_sampled = beside.token_ids == sampled[[1, 3], None]
    assert torch.equal(beside.weights[is_sampled], beside.selected_weight)


def test_without_filters_every_token_can_be_drawn(draw: Any, probs: torch.Tensor) -> None:
    drawing = drawing_of((2,))
    sampled, _, _ = draw(drawing, simple=True)
    assert sets_of(drawing, probs, sampled) == [set(range(VOCAB))]


def test_a_greedy_rows_set_is_its_token(draw: Any, probs: torch.Tensor) -> None:
    drawing = drawing_of((1, 2), frozenset({2}))
    sampled, _, _ = draw(drawing)
    assert sets_of(drawing, probs, sampled)[1] == {int(probs[2].argmax())}
    # The whole batch is greedy, so SGLang takes the highest logits and computes no probabilities.
    alone = drawing_of((0, 2), frozenset({0, 2}))
    assert sets_of(alone, probs, probs.argmax(1)) == [{int(probs[0].argmax())}, {int(probs[2].argmax())}]


def test_a_way_of_sampling_that_shows_no_weights_is_told(probs: torch.Tensor) -> None:
    found = drawing_of((0, 2), frozenset({2})).extract(probs.log(), probs.argmax(1), "7")
    assert list(found.problems) == [0]
    assert "does not show what it could have drawn" in found.problems[0]


def test_ties_fall_as_the_sampler_cuts_them(draw: Any, probs: torch.Tensor) -> None:
    """SGLang's torch sampler keeps exactly top_k tokens, so only some of a tie. The set has only those."""
    probs[:] = torch.full((VOCAB,), 1 / VOCAB)
    drawing = drawing_of((0, 3))
    tokens = torch.stack([draw(drawing, top_ks=[5, 12, 1, 9], top_ps=[1.0] * 4)[0] for _ in range(400)])
    first, last = sets_of(drawing, probs, tokens[-1])
    assert (len(first), len(last)) == (5, 9)
    assert set(tokens[:, 0].tolist()) == first
    assert set(tokens[:, 3].tolist()) == last


def test_a_row_that_cannot_be_exact_fails_alone(draw: Any, probs: torch.Tensor) -> None:
    drawing = drawing_of((0, 1))
    sampled, _, _ = draw(drawing)
    logprobs = probs.log()
    logprobs[0] = torch.nan
    found = extracted(drawing, logprobs, sampled)
    assert list(found.problems) == [0]
    sizes = found.offsets.diff().tolist()
    assert sizes[0] == 0
    assert sizes[1] == len(by_definition(probs[1], TOP_KS[1], TOP_PS[1], MIN_PS[1]))
