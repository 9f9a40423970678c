"""Ignore the warning of SGLang's import without an accelerator. All other warnings are errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.io_struct  # noqa: F401  # imported here for the reason above
