"""The subcommands of `sglang-topp`, one module each.

Each module has a function `add_parser`, which registers the command and the function that runs it. A module
imports optional dependencies only when its command runs. So `sglang-topp --help` works without them.
"""
