"""Scores of a padded batch through a real model equal those of each sample alone, unpadded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_oracle import random_sets
from transformers import Qwen2Config, Qwen2ForCausalLM

from sglang_topp import CandidateSets
from sglang_topp.batch import collate_rl
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout, score

VOCAB, PAD = 61, 3
PROMPTS, RESPONSES = [4, 1, 7, 2], [3, 6, 1, 5]
NUM_COLUMNS = 16  # a multiple of 4, for zigzag over two ranks


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def samples() -> list[tuple[np.ndarray, np.ndarray, CandidateSets]]:
    rng = np.random.default_rng(0)
    made = []
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        sets = random_sets(rng.integers(2, 9, response).tolist(), VOCAB, seed=i)
        made.append((rng.integers(0, VOCAB, prompt), sets.sampled_ids, sets))
    return made


@torch.no_grad()
def scored_alone(model, samples) -> torch.Tensor:
    """Score each sample alone: the state before each response token, and the log-softmax over its set."""
    scores = []
    for prompt, response, sets in samples:
        ids = torch.tensor(np.concatenate([prompt, response]))[None]
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        for t, (candidates, _) in enumerate(sets):
            at = candidates.tolist().index(response[t])
            scores.append(torch.log_softmax(logits[t, torch.tensor(candidates).long()], 0)[at])
    return torch.stack(scores)


def padded(samples, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(sequences, attention_mask)`. The side "both" pads prompts left and responses right."""
    sequences = torch.full((len(samples), NUM_COLUMNS), PAD)
    mask = torch.zeros_like(sequences)
    for i, (prompt, response, _) in enumerate(samples):
        length = len(prompt) + len(response)
        before = {"left": NUM_COLUMNS - length, "right": 0, "both": max(PROMPTS) - len(prompt)}[side]
        sequences[i, before : before + length] = torch.tensor(np.concatenate([prompt, response]))
        mask[i, before : before + length] = 1
    return sequences, mask


@torch.no_grad()
def hidden_states(model, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model.model(sequences, attention_mask=mask, position_ids=positions).last_hidden_state


def scored_by_layout(model, samples, hidden, rows) -> torch.Tensor:
    sampled = torch.tensor(np.concatenate([response for _, response, _ in samples]))
    sets = rows.take_sets([sets for _, _, sets in samples])
    scores = score(rows.select(hidden), model.lm_head.weight, rows.take(sampled), sets)
    return scores.logprobs.detach()


def test_collate_rl(model, samples):
    """Return the collator's batch, with its own mask."""
    batch = collate_rl(
        [prompt for prompt, _, _ in samples],
        [response for _, response, _ in samples],
        [np.zeros(n) for n in RESPONSES],
        [np.ones(n, np.int8) for n in RESPONSES],
        candidates=[sets for _, _, sets in samples],
        pad_token_id=PAD,
    )
    mask = batch["attention_mask"]
    assert (mask[:, 0] == 0).any()  # or nothing is tested
    rows = Layout(attention_mask=mask).select_rows(PROMPTS, RESPONSES)
    hidden = hidden_states(model, batch["sequences"], mask)
    got = scored_by_layout(model, samples, hidden, rows)
    torch.testing.assert_close(got, scored_alone(model, samples), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize(("split", "cp_size"), [("zigzag", 1), ("zigzag", 2), ("contiguous", 2)])
def test_every_side_and_split(model, samples, side, split, cp_size):
    sequences, mask = padded(samples, side)
    hidden = hidden_states(model, sequences, mask)
    got = torch.zeros(sum(RESPONSES))
    for rank in range(cp_size):
        rows = Layout(split, cp_size, rank, mask).select_rows(PROMPTS, RESPONSES)
        chunks = hidden.chunk(2 * cp_size if split == "zigzag" else cp_size, dim=1)
        mine = [chunks[rank], chunks[-1 - rank]] if split == "zigzag" else [chunks[rank]]
        got += rows.scatter(scored_by_layout(model, samples, torch.cat(mine, dim=1), rows))
    torch.testing.assert_close(got, scored_alone(model, samples), rtol=1e-4, atol=1e-5)


def test_no_side_is_assumed(model, samples):
    sequences, mask = padded(samples, "left")
    rows = Layout().select_rows(PROMPTS, RESPONSES)
    with pytest.raises(InvalidInputError, match="by the layout this rank holds"):
        rows.select(hidden_states(model, sequences, mask))
