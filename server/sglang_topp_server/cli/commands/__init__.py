"""The subcommands of `sglang-topp`, one module each.

Each module has `add_parser`, which registers the command and its function. The module imports optional
dependencies only when the command runs, so that `sglang-topp --help` works with the base install.
"""
