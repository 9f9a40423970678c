"""Timing, peak memory, result files, plots, and a fake engine: shared by all benchmarks."""
