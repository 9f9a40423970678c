"""Server modes in which candidate sets cannot be exact: there the feature is refused, with the reason."""

from __future__ import annotations

from typing import Any

__all__ = ["note_server_args", "refusals"]

_refusals: tuple[str, ...] = ()


def refusals() -> tuple[str, ...]:
    """Why this server's mode rules candidate sets out; empty where it does not."""
    return _refusals


def note_server_args(result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `TokenizerManager.__init__`."""
    global _refusals
    reasons = {
        "speculative decoding (--speculative-algorithm): an accepted token is not drawn from one nucleus": (
            getattr(server_args, "speculative_algorithm", None)
        ),
        "diffusion decoding (--dllm-algorithm): tokens are not drawn one by one": (
            getattr(server_args, "dllm_algorithm", None)
        ),
        "pipeline parallelism (--pp-size > 1): the sets do not travel between its stages": (
            getattr(server_args, "pp_size", 1) > 1
        ),
        "disaggregated prefill and decode (--disaggregation-mode): the first token's set stays behind": (
            getattr(server_args, "disaggregation_mode", "null") not in (None, "null")
        ),
    }
    _refusals = tuple(reason for reason, applies in reasons.items() if applies)
