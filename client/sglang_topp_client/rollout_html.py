"""Render one rollout as HTML for notebooks, without scripts.

The color of a token shows its kept mass, which is the total probability of the token's candidate set. A
tooltip lists the token's candidates.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sglang_topp_client.rollout import Rollout

_MAX_TOKENS = 400
_MAX_CANDIDATES = 12
_MAX_TEXT_CHARS = 2000
_SURE, _CUT = 0.999, 0.5
"""The ends of the color scale. A kept mass of 0.999 or more has no color. A mass of 0.5 or less has the full
color."""


def rollout_to_html(rollout: Rollout) -> str:
    """Return the HTML of a rollout, with the rollout's text and its first 400 tokens.

    The HTML shows tokens as ids, because a rollout does not hold the text of single tokens.
    """
    num_tokens = len(rollout.output_ids)
    tokens = "".join(_token(rollout, t) for t in range(min(num_tokens, _MAX_TOKENS)))
    if num_tokens > _MAX_TOKENS:
        tokens += f" … {num_tokens - _MAX_TOKENS:,} more"
    text = rollout.text[:_MAX_TEXT_CHARS] + ("…" if len(rollout.text) > _MAX_TEXT_CHARS else "")
    return (
        f"<div><div><b>Rollout</b> {escape(_facts(rollout))}</div>"
        f'<pre style="white-space:pre-wrap;max-height:12em;overflow:auto">{escape(text)}</pre>'
        f'<div style="font-family:monospace;line-height:1.8;max-height:24em;overflow:auto">{tokens}</div>'
        "</div>"
    )


def _facts(rollout: Rollout) -> str:
    facts = [f"prompt {rollout.prompt_index}, sample {rollout.sample_index}"]
    facts += [f"{len(rollout.output_ids):,} tokens", f"finish {rollout.finish_reason}"]
    sets = rollout.candidates
    if sets is None:
        facts.append("no candidate sets")
    elif (sizes := sets.sizes[sets.sizes > 0]).size:
        facts.append(f"sets of {sizes.mean():.1f} on average, {sizes.max():,} at most")
        if sets.has_logprobs:
            mass = np.exp(sets.log_kept_mass[sets.sizes > 0].astype(np.float64))
            facts.append(f"kept mass {mass.mean():.4f} on average, {mass.min():.4f} at least")
    if rollout.weight_version is not None:
        facts.append(f"weights {rollout.weight_version}")
    return " · ".join(facts)


def _token(rollout: Rollout, t: int) -> str:
    sets, token_id = rollout.candidates, int(rollout.output_ids[t])
    if sets is None or not sets.sizes[t]:
        return f'<span title="position {t}: no set" style="opacity:.55">{token_id}</span> '
    token_ids, logprobs = sets[t]
    size = int(sets.sizes[t])
    title = f"position {t}: {size:,} candidate{'s' if size > 1 else ''}"
    color = 0.0
    shares = [""] * len(token_ids[:_MAX_CANDIDATES])
    if logprobs is not None:
        mass = float(np.exp(np.float64(sets.log_kept_mass[t])))
        title += f", kept mass {mass:.4f}"
        color = float(np.clip((_SURE - mass) / (_SURE - _CUT), 0, 1)) ** 0.5
        shares = [f" {share:.4f}" for share in np.exp(logprobs[:_MAX_CANDIDATES].astype(np.float64))]
    for candidate, share in zip(token_ids.tolist(), shares, strict=False):
        title += f"\n{candidate}{share}{' ← sampled' if candidate == token_id else ''}"
    if (more := size - _MAX_CANDIDATES) > 0:
        title += f"\n… {more:,} more"
    style = f"background:rgba(229,127,22,{color:.2f});border-radius:3px"
    return f'<span title="{escape(title)}" style="{style}">{token_id}</span> '
