"""Benchmarks of sglang-topp. `make bench` runs all, and `python -m benchmarks NAME ...` runs those named."""
