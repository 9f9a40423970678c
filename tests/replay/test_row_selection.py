"""RowSelection finds the response tokens in every layout of a trainer."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_oracle import random_sets

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout

PAD = (-1, -1)


def pad(tokens: list, multiple: int) -> list:
    return tokens + [PAD] * (-len(tokens) % multiple)


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def padded_mask(lengths: list[int], width: int, before: list[int]) -> list[list[int]]:
    """Return a mask [B, width]: 1 on the tokens of each row, which begin after `before` columns."""
    rows = zip(lengths, before, strict=True)
    return [[0] * start + [1] * length + [0] * (width - start - length) for length, start in rows]


def zigzag(tokens: list, cp_size: int, cp_rank: int) -> list:
    chunks = np.array_split(np.arange(len(tokens)), 2 * cp_size)
    return [tokens[i] for c in (cp_rank, 2 * cp_size - 1 - cp_rank) for i in chunks[c]]


def tokens_of_rank(layout: Layout, lengths: list[int], attention_mask: list[list[int]] | None) -> list:
    """Return the (sample, position) names on one rank, in order."""
    sequences = [[(i, s) for s in range(length)] for i, length in enumerate(lengths)]
    cp, rank = layout.cp_size, layout.cp_rank
    if attention_mask is not None:
        names = [iter(sequence) for sequence in sequences]
        rows = [[next(names[i]) if one else PAD for one in row] for i, row in enumerate(attention_mask)]
        if cp == 1:
            return joined(rows)
        if layout.split == "zigzag":
            return joined(zigzag(row, cp, rank) for row in rows)
        return joined(row[len(row) // cp * rank : len(row) // cp * (rank + 1)] for row in rows)
    edges = layout.cu_seqlens
    if edges is None:
        multiple = 2 * cp if layout.split == "zigzag" and cp > 1 else 1
        sequences = [pad(sequence, multiple) for sequence in sequences]
        sequences.append([PAD] * (-len(joined(sequences)) % cp))
    else:
        spans = np.diff(edges).tolist()
        sequences += [[]] * (len(spans) - len(sequences))
        sequences = [one + [PAD] * (span - len(one)) for one, span in zip(sequences, spans, strict=True)]
    if layout.split == "zigzag" and cp > 1:
        return joined(zigzag(sequence, cp, rank) for sequence in sequences)
    stream = joined(sequences)
    part = len(stream) // cp
    return stream[part * rank : part * (rank + 1)]


batches = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5)
shapes = st.tuples(
    st.sampled_from(["packed", "padded"]),
    st.sampled_from(["zigzag", "contiguous"]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["left", "right", "both"]),
)


@settings(max_examples=300, deadline=None)
@given(batches, shapes, st.randoms(use_true_random=False))
def test_every_response_token_is_scored_once_by_the_token_before_it(batch, shape, random):
    format_, split, cp_size, multiple, pads_more, masks, side = shape
    prompts, responses = [p for p, _ in batch], [r for _, r in batch]
    lengths = [p + r for p, r in batch]
    names = [(i, p + j) for i, (p, r) in enumerate(batch) for j in range(r)]
    loss_mask = [random.random() < 0.5 for _ in names] if masks else None
    options, attention_mask = {}, None
    if format_ == "padded":
        width = pad_to(max(lengths, default=0), 24) + 24 * pads_more
        free = [width - length for length in lengths]
        before = {"left": free, "right": [0] * len(free), "both": [random.randint(0, n) for n in free]}[side]
        attention_mask = padded_mask(lengths, width, before)
        options["attention_mask"] = np.array(attention_mask, int).reshape(len(batch), width)
    elif multiple:  # padding after each sequence, and further sequences of padding
        spans = [pad_to(n, 24 * multiple) for n in lengths] + [24] * random.randint(0, 2)
        if spans and pads_more:
            spans[-1] += 48
        options["cu_seqlens"] = np.cumsum([0, *spans])

    expected = [at > 0 and (loss_mask is None or loss_mask[n]) for n, (_, at) in enumerate(names)]
    seen = np.zeros(len(names), int)
    for cp_rank in range(cp_size):
        layout = Layout(split, cp_size, cp_rank, **options)
        rows = layout.select_rows(np.array(prompts, int), np.array(responses, int), loss_mask=loss_mask)
        local = tokens_of_rank(layout, lengths, attention_mask)
        assert rows.num_hidden_rows == len(local)
        assert (np.diff(rows.positions) > 0).all()
        for row, position in zip(rows.hidden_rows, rows.positions, strict=True):
            sample, at = names[position]
            assert local[row] == (sample, at - 1)
        seen[rows.positions] += 1
        assert rows.scored.tolist() == expected
    assert seen.tolist() == [int(value) for value in expected]


def pad_to(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def test_everything_goes_through_the_same_rows():
    sizes = [2, 0, 3, 1, 4, 2, 5]
    sets = random_sets(sizes, 20)
    parts = [sets[:3], sets[3:3], sets[3:]]
    rows = Layout().select_rows([2, 5, 0], [3, 0, 4], loss_mask=[1, 0, 1, 1, 1, 0, 1])
    assert rows.positions.tolist() == [0, 2, 4, 6]  # 3 is the first token of a response without a prompt
    assert rows.hidden_rows.tolist() == [1, 3, 10, 12]
    assert len(rows) == 4

    taken = rows.take_sets(parts)
    assert taken == rows.take_sets(sets)
    assert taken == CandidateSets(taken.token_ids, taken.logprobs, taken.offsets, taken.sampled_ids)
    for n, position in enumerate(rows.positions):
        assert taken[n][0].tolist() == sets[int(position)][0].tolist()
        assert taken.sampled_ids[n] == sets.sampled_ids[position]
    assert rows.take(torch.arange(7)).tolist() == [0, 2, 4, 6]

    hidden = torch.arange(28.0).reshape(14, 2).requires_grad_()
    picked = rows.select(hidden)
    assert picked[:, 0].tolist() == [2.0, 6.0, 20.0, 24.0]
    picked.sum().backward()
    assert hidden.grad.any(dim=1).nonzero().squeeze(1).tolist() == rows.hidden_rows.tolist()

    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    spread = rows.scatter(values)
    assert spread.tolist() == [1, 0, 2, 0, 3, 0, 4]
    (spread * torch.arange(7.0)).sum().backward()
    assert values.grad.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_hidden_states_of_padded_rows_have_three_axes():
    rows = Layout(attention_mask=np.ones((2, 3))).select_rows([1, 2], [2, 1])
    hidden = torch.arange(12.0).reshape(2, 3, 2)
    assert rows.select(hidden)[:, 0].tolist() == [0.0, 2.0, 8.0]


def test_sequences_along_the_second_axis_are_refused():
    """[S, B, H] has as many rows as [B, S, H], in another order."""
    rows = Layout(attention_mask=np.ones((2, 3))).select_rows([1, 2], [2, 1])
    with pytest.raises(InvalidInputError, match=r"hidden: got shape \(3, 2, 4\); .* counts 2 sequences"):
        rows.select(torch.zeros(3, 2, 4))
    assert rows.select(torch.zeros(6, 4)).shape == (3, 4)
    packed = Layout().select_rows([1, 2], [2, 1])
    for shape in ((6, 4), (1, 6, 4), (6, 1, 4)):
        assert packed.select(torch.zeros(shape)).shape == (3, 4)
    with pytest.raises(InvalidInputError, match="counts 1 sequences"):
        packed.select(torch.zeros(2, 3, 4))


def test_nothing_to_score():
    for rows in (
        Layout().select_rows([], []),
        Layout().select_rows([3, 0], [0, 0]),
        Layout().select_rows([2], [2], loss_mask=[0, 0]),
    ):
        assert len(rows) == 0
        assert rows.select(torch.zeros(rows.num_hidden_rows, 4)).shape == (0, 4)
        assert not rows.scatter(torch.zeros(0)).any()


def test_errors_name_the_argument_and_the_problem():
    rows = Layout().select_rows([1, 1], [2, 2])
    cases = {
        "split: got 'ring'": lambda: Layout(split="ring"),
        "cp_size=2, cp_rank=2": lambda: Layout(cp_size=2, cp_rank=2),
        "response_lengths: got 1 for 2": lambda: Layout().select_rows([1, 1], [2]),
        "prompt_lengths: got -1": lambda: Layout().select_rows([-1], [2]),
        "prompt_lengths: expected integers": lambda: Layout().select_rows([[1], [2, 3]], [2]),
        "response_lengths: got float64 of shape": lambda: Layout().select_rows([1], [2.5]),
        "loss_mask: got shape \\(3,\\), expected \\[4\\]": lambda: Layout().select_rows(
            [1, 1], [2, 2], loss_mask=[1] * 3
        ),
        "cu_seqlens: its sequences have \\[2, 4\\] tokens, expected at least \\[3, 3\\]": lambda: Layout(
            cu_seqlens=(0, 2, 6)
        ).select_rows([1, 1], [2, 2]),
        "cu_seqlens: its sequences have \\[6\\] tokens, expected at least \\[3, 3\\]": lambda: Layout(
            cu_seqlens=torch.tensor([0, 6])
        ).select_rows([1, 1], [2, 2]),
        "samples of \\[3, 2\\] tokens, expected \\[2, 3\\], as in seq_lengths": lambda: Layout(
            cu_seqlens=(0, 4, 8), seq_lengths=(2, 3)
        ).select_rows([1, 1], [2, 1]),
        "cu_seqlens: got \\(0, 4, 10\\), expected multiples of 4": lambda: Layout(
            cp_size=2, cu_seqlens=[0, 4, 10]
        ),
        "that end in a multiple of 2": lambda: Layout(cp_size=2, split="contiguous", cu_seqlens=(0, 3)),
        "cu_seqlens: got \\(1, 3\\), expected to rise from 0": lambda: Layout(cu_seqlens=(1, 3)),
        "cu_seqlens: got \\(0, 3, 2\\), expected to rise from 0": lambda: Layout(cu_seqlens=(0, 3, 2)),
        "cu_seqlens: got \\(\\), expected to rise from 0": lambda: Layout(cu_seqlens=[]),
        "seq_lengths: got -1": lambda: Layout(seq_lengths=[-1]),
        "cu_seqlens: got float64 of shape \\(1,\\)": lambda: Layout(cu_seqlens=[0.0]),
        "attention_mask: row 1 marks 3 tokens, expected 4": lambda: Layout(
            attention_mask=[[0, 1, 1, 1], [0, 1, 1, 1]]
        ).select_rows([1, 2], [2, 2]),
        "attention_mask: row 0 has padding between its tokens": lambda: Layout(
            attention_mask=[[1, 0, 1, 1], [1, 1, 1, 1]]
        ).select_rows([1, 2], [2, 2]),
        "attention_mask: got int64 of shape \\(1, 3\\), expected numbers \\[2, columns\\]": lambda: Layout(
            attention_mask=[[1, 1, 1]]
        ).select_rows([1, 1], [2, 2]),
        "attention_mask: got <U1": lambda: Layout(attention_mask=[["1", "1"]]).select_rows([1], [1]),
        "attention_mask: got 6 columns, expected a multiple of 4": lambda: Layout(
            cp_size=2, attention_mask=[[1, 1, 1, 0, 0, 0]]
        ).select_rows([1], [2]),
        "cu_seqlens: got \\(0, 8\\) with an attention_mask": lambda: Layout(
            attention_mask=[[1]], cu_seqlens=(0, 8)
        ),
        "seq_lengths: got \\(3,\\) with an attention_mask": lambda: Layout(
            attention_mask=[[1]], seq_lengths=(3,)
        ),
        "hidden: got shape \\(5, 3\\), 5 rows; by the layout this rank holds 6": lambda: rows.select(
            torch.zeros(5, 3)
        ),
        "values: got 3, expected one per response position, 4": lambda: rows.take(torch.zeros(3)),
        "candidates: got 3, expected one": lambda: rows.take_sets(CandidateSets.empty(3)),
        # The total is the same, so only this check can notice.
        "candidates: got samples of \\[1, 3\\] positions, expected \\[2, 2\\]": lambda: rows.take_sets(
            [CandidateSets.empty(1), CandidateSets.empty(3)]
        ),
        "candidates: got samples of \\[4\\] positions, expected \\[2, 2\\]": lambda: rows.take_sets(
            [CandidateSets.empty(4)]
        ),
        "loss_mask: got dtype float64 or a NaN": lambda: Layout().select_rows(
            [1], [2], loss_mask=[1.0, np.nan]
        ),
        "loss_mask: got dtype <U1": lambda: Layout().select_rows([1], [2], loss_mask=["1", "0"]),
        "loss_mask: got dtype object": lambda: Layout().select_rows([1], [2], loss_mask=[None, 1]),
        "values: got shape \\(3,\\), expected \\[4\\]": lambda: rows.scatter(torch.zeros(3)),
    }
    for message, call in cases.items():
        with pytest.raises(InvalidInputError, match=message):
            call()
