"""`CandidateSets`: an immutable, validated value type for candidate sets, stored as CSR arrays."""

from sglang_topp.candidates.sets import NO_TOKEN, CandidateSets

__all__ = ["NO_TOKEN", "CandidateSets"]
