"""Benchmarks: one module each, listed in `catalog`; how to run them is in docs/performance.md."""
