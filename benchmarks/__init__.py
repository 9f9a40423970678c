"""Benchmarks of sglang-topp: `python -m benchmarks NAME ...` runs some, and `make bench` runs all."""
