"""Score a policy over recorded candidate sets (replay), without building a `[tokens, vocab]` tensor."""

from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.replay.candidate_head import candidate_logprobs
from sglang_topp.replay.distillation import DistillationLoss, distillation_loss
from sglang_topp.replay.full_vocab_head import head_logprobs
from sglang_topp.replay.logprobs_from_logits import dense_mask, full_logprobs, mask_logits, masked_logprobs
from sglang_topp.replay.metrics import ReplayMetrics, replay_metrics
from sglang_topp.replay.old_logprobs import replayed_old_logprobs
from sglang_topp.replay.row_selection import Layout, RowSelection
from sglang_topp.replay.scores_from_candidate_logits import Scores
from sglang_topp.replay.vocab_shard_reductions import vocab_range

__all__ = [
    "CandidateTensors",
    "DistillationLoss",
    "Layout",
    "ReplayMetrics",
    "RowSelection",
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
