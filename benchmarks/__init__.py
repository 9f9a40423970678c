"""Benchmarks of sglang-topp: `python -m benchmarks NAME ...` runs the named benchmarks, `make bench` all."""
