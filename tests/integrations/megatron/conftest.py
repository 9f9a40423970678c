"""Megatron-core has an environment of its own, which `make megatron` creates."""

import importlib.util

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
collect_ignore_glob = [] if HAS_MEGATRON else ["*.py"]
