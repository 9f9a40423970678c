"""`make integrations` runs the tests: Megatron-core needs Python 3.12, and comes with verl."""

import importlib.util
import os

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
collect_ignore_glob = [] if HAS_MEGATRON else ["*.py"]

if HAS_MEGATRON:  # set before torch and verl are imported; `make test` imports this file too
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # of verl's and Megatron's small kernels
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "tests.integrations.verl.cpu_platform"
