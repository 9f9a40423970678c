"""Replay: score a policy over the recorded support, without ever building `[tokens, vocab]`."""

from sglang_topp.replay.distillation import DistillationLoss, distillation_loss
from sglang_topp.replay.full import head_logprobs
from sglang_topp.replay.head import candidate_logprobs
from sglang_topp.replay.layout import Layout, Rows
from sglang_topp.replay.masked import dense_mask, full_logprobs, mask_logits, masked_logprobs
from sglang_topp.replay.metrics import ReplayMetrics, replay_metrics
from sglang_topp.replay.old_logprobs import replayed_old_logprobs
from sglang_topp.replay.parallel import vocab_range
from sglang_topp.replay.scores import Scores

__all__ = [
    "DistillationLoss",
    "Layout",
    "ReplayMetrics",
    "Rows",
    "Scores",
    "candidate_logprobs",
    "dense_mask",
    "distillation_loss",
    "full_logprobs",
    "head_logprobs",
    "mask_logits",
    "masked_logprobs",
    "replay_metrics",
    "replayed_old_logprobs",
    "vocab_range",
]
