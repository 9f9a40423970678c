"""`CandidateSets`: an immutable, validated value type for candidate sets, stored as CSR arrays."""

from sglang_topp.candidates.sets import CandidateSets
from sglang_topp.candidates.validation import NO_TOKEN

__all__ = ["NO_TOKEN", "CandidateSets"]
