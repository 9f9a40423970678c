"""Benchmarks of sglang-topp. `python -m benchmarks NAME ...` runs some of them, and `make bench` runs all."""
