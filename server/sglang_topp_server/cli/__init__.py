"""The command `sglang-topp` and its subcommands."""
