"""The keys that carry the sets from the scheduler to the answer."""

from __future__ import annotations

__all__ = ["KEY", "SETS"]

KEY = "sglang_topp"
"""The key of `customized_info` under which a request has its `SetBuffer` (`set_buffer`)."""

SETS = "sglang_topp_sets"
"""The key of `meta_info` for the sets and tokens of a request to an OpenAI route.

The value of this `meta_info` key is None if the request did not ask for sets."""
