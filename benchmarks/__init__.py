"""Speed claims of this project: `python -m benchmarks [name ...]`, or `make bench` for all."""
