"""What the installed SGLang is refused, as `releases` declares it: its tests are skipped, with the reason."""

from __future__ import annotations

import warnings

import pytest

from sglang_topp_patches.releases import Feature, refused

__all__ = ["needs", "needs_native_masks", "skip_without"]


def needs(feature: Feature) -> pytest.MarkDecorator:
    """Skip a test where a feature is refused."""
    reason = refused(feature)
    return pytest.mark.skipif(bool(reason), reason=f"{feature} is refused on this SGLang: {reason}")


def needs_native_masks() -> pytest.MarkDecorator:
    """Skip a test that compares with SGLang's own `return_sampling_mask` where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.managers.io_struct import GenerateReqInput

    has_masks = "return_sampling_mask" in GenerateReqInput.__dataclass_fields__
    return pytest.mark.skipif(not has_masks, reason="this SGLang has no return_sampling_mask")


def skip_without(feature: Feature) -> None:
    """Skip a whole module there."""
    if reason := refused(feature):
        pytest.skip(f"{feature} is refused on this SGLang: {reason}", allow_module_level=True)
