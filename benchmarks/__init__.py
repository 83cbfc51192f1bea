"""Benchmarks of speed, exactness and memory against other packages."""
