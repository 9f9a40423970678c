"""Exact top-p candidate sets: the value type, its formats, and the errors.

A candidate set holds the tokens that top-p sampling kept at one generated position, with their log-probs. The
package itself needs only NumPy and pybase64. The subpackages `nucleus`, `replay`, and `batch` need torch, so
`import sglang_topp` does not import them.
"""

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import SglangToppError

__all__ = ["CandidateSets", "SglangToppError"]
