"""SGLang warns at its import on a machine without an accelerator; the tests' own warnings are errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.io_struct  # noqa: F401  # imported here for the reason above
