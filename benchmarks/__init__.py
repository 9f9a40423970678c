"""Benchmarks of sglang-topp: `python -m benchmarks NAME ...` runs the named ones, and `make bench` all."""
