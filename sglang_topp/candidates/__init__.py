"""`CandidateSets`: the validated value type, in CSR arrays."""

from sglang_topp.candidates.sets import NO_TOKEN, CandidateSets

__all__ = ["NO_TOKEN", "CandidateSets"]
