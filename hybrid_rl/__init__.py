"""Reinforcement learning of language models where one process group samples and trains on the same devices."""

__version__ = "0.1.0"
