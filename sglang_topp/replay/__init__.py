"""Score a policy over recorded candidate sets (replay), over the whole vocabulary, or both."""

from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.replay.candidate_index import dense_mask, mask_logits, vocab_range
from sglang_topp.replay.distillation import DistillationLoss, distillation_loss
from sglang_topp.replay.importance_ratios import ReplayMetrics, replay_metrics, replayed_old_logprobs
from sglang_topp.replay.row_selection import Layout, RowSelection
from sglang_topp.replay.scores import Scores, score, score_logits

__all__ = [
    "CandidateTensors",
    "DistillationLoss",
    "Layout",
    "ReplayMetrics",
    "RowSelection",
    "Scores",
    "dense_mask",
    "distillation_loss",
    "mask_logits",
    "replay_metrics",
    "replayed_old_logprobs",
    "score",
    "score_logits",
    "vocab_range",
]
