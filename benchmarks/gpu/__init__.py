"""Speed and memory of hybrid_rl on a GPU: python -m benchmarks.gpu (see __main__.py)."""
