"""Skip tests of features that the installed SGLang lacks, or that `releases` refuses on it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_topp_patches.hooks import Hook
from sglang_topp_patches.plugin import all_seams
from sglang_topp_patches.releases import Feature, installed, refused

__all__ = [
    "can_flush_while_paused",
    "can_refuse_a_flush",
    "grammar_problem",
    "has_argument",
    "hooks_here",
    "is_hook_here",
    "needs",
    "needs_grammars",
    "needs_native_masks",
    "skip_without",
    "takes",
]


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Skip a test where a feature is refused."""
    reason = refused(feature)
    return pytest.mark.skipif(bool(reason), reason=f"{feature} is refused on this SGLang: {reason}")


def hooks_here() -> list[Hook]:
    """Return the hooks on the installed SGLang."""
    return [seam for seam in all_seams() if isinstance(seam, Hook) and seam.is_in(installed()[0])]


def is_hook_here(function: Callable[..., Any]) -> bool:
    """Return whether a function hooks the installed SGLang."""
    return any(hook.function is function for hook in hooks_here())


def takes(field: str) -> bool:
    """Return whether SGLang's own `/generate` has a field."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers.io_struct import GenerateReqInput

    return field in GenerateReqInput.__dataclass_fields__


def has_argument(name: str) -> bool:
    """Return whether `ServerArgs` has a field of this name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.server_args import ServerArgs

    return hasattr(ServerArgs, name)


def can_flush_while_paused() -> bool:
    """Return whether SGLang flushes the cache while retracted requests wait, as it does from 0.5.21 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers.scheduler import Scheduler

    return "ignore_waiting" in inspect.signature(Scheduler.is_fully_idle).parameters


def can_refuse_a_flush() -> bool:
    """Return whether a push that would flush a cache in use is answered with an error.

    Before 0.5.22 an assertion ends SGLang's scheduler instead.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    flush = SchedulerWeightUpdaterManager.flush_cache_after_weight_update
    return "message" in inspect.signature(flush).parameters


def needs_native_masks(field: str = "return_sampling_mask") -> pytest.MarkDecorator:
    """Skip a test that needs SGLang's own sampling masks."""
    return pytest.mark.skipif(not takes(field), reason=f"this SGLang has no {field}")


def grammar_problem() -> str:
    """Return why SGLang cannot serve grammars here, or an empty string.

    On some releases a request with a grammar ends the scheduler if there is no accelerator.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    if not torch.cuda.is_available():
        try:
            XGrammarGrammar.apply_vocab_mask(None, torch.zeros(1, 32), torch.ones(1, 1, dtype=torch.int32))
        except RuntimeError as error:
            return f"this SGLang has no grammars here: {error}"
    return ""


def needs_grammars() -> pytest.MarkDecorator:
    """Skip a test of grammars where SGLang cannot serve them."""
    reason = grammar_problem()
    return pytest.mark.skipif(bool(reason), reason=reason)


def skip_without(feature: Feature) -> None:
    """Skip a whole module where a feature is refused."""
    if reason := refused(feature):
        pytest.skip(f"{feature} is refused on this SGLang: {reason}", allow_module_level=True)
