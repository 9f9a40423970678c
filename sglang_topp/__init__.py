"""Exact top-p candidate sets: values, wire format and errors.

This package needs NumPy and pybase64 only. What needs torch lives in its subpackages and is imported
by name: `sglang_topp.nucleus`, `sglang_topp.replay`, `sglang_topp.batch`.
"""

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import SglangToppError

__all__ = ["CandidateSets", "SglangToppError"]
