"""Benchmarks of this project: `python -m benchmarks [NAME ...]`, or `make bench` for all."""
