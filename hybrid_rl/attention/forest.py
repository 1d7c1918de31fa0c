"""Where the prompts and branches of group trees lie in a flat row, as arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Forest:
    """`trees` lists (prompt length, branch lengths); in the flat row [T] each prompt is followed by its branches.

    `prompts` and `branches` are (first position, length) of each, [N] and [M] int64; `tree` [M] is a branch's number
    among the N trees. Empty branches are left out.
    """

    def __init__(self, trees: Sequence[tuple[int, Sequence[int]]]):
        counts = np.array([len(sizes) for _, sizes in trees])
        lengths = np.array([n for prompt, sizes in trees for n in (prompt, *sizes)], np.int64)
        starts = lengths.cumsum() - lengths
        prompt = (counts + 1).cumsum() - counts - 1  # its place in `lengths`
        self.tokens = int(lengths.sum())
        self.prompts = starts[prompt], lengths[prompt]
        starts, lengths = np.delete(starts, prompt), np.delete(lengths, prompt)
        there = lengths > 0
        self.branches = starts[there], lengths[there]
        self.tree = np.repeat(np.arange(len(counts)), counts)[there]
        self.sizes = self.prompts[1][self.tree] + self.branches[1]  # of each branch with its prompt
        self.longest = int(max(self.prompts[1].max(), self.sizes.max(initial=0)))


def spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of every part, end to end: starts[i], starts[i] + 1, … of each."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + np.repeat(starts - ends + lengths, lengths)


def padded(starts: np.ndarray, lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return each part's positions, padded with 0 to the longest, and which of them are its own; [B, longest] both."""
    step = np.arange(lengths.max(initial=0))
    own = step < lengths[:, None]
    return torch.from_numpy(np.where(own, starts[:, None] + step, 0)), torch.from_numpy(own)
