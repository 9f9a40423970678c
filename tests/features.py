"""What the installed SGLang is refused, as `releases` declares it: its tests are skipped, with the reason."""

from __future__ import annotations

import warnings

import pytest
import torch

from sglang_topp_patches.releases import Feature, refused

__all__ = ["needs", "needs_grammars", "needs_native_masks", "skip_without", "takes"]


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Skip a test where a feature is refused."""
    reason = refused(feature)
    return pytest.mark.skipif(bool(reason), reason=f"{feature} is refused on this SGLang: {reason}")


def takes(field: str) -> bool:
    """Whether SGLang's own `/generate` has a field."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers.io_struct import GenerateReqInput

    return field in GenerateReqInput.__dataclass_fields__


def needs_native_masks() -> pytest.MarkDecorator:
    """Skip a test that compares with SGLang's own `return_sampling_mask` where there is none."""
    reason = "this SGLang has no return_sampling_mask"
    return pytest.mark.skipif(not takes("return_sampling_mask"), reason=reason)


def needs_grammars() -> pytest.MarkDecorator:
    """Skip a test that constrains what is generated where SGLang cannot do so without an accelerator: its
    scheduler ends there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

    reason = ""
    if not torch.cuda.is_available():
        try:
            XGrammarGrammar.apply_vocab_mask(None, torch.zeros(1, 32), torch.ones(1, 1, dtype=torch.int32))
        except RuntimeError as error:
            reason = f"this SGLang has no grammars here: {error}"
    return pytest.mark.skipif(bool(reason), reason=reason)


def skip_without(feature: Feature) -> None:
    """Skip a whole module there."""
    if reason := refused(feature):
        pytest.skip(f"{feature} is refused on this SGLang: {reason}", allow_module_level=True)
