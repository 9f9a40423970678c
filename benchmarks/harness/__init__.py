"""Tools that all benchmarks share: timing, peak memory, result files, plots, and a fake engine."""
