"""The subcommands of `sglang-topp`, one module each.

Each module has a function `add_parser`, which registers the subcommand and the function that runs the
subcommand. Each module imports optional dependencies only when its subcommand runs, so that
`sglang-topp --help` works without these dependencies.
"""
