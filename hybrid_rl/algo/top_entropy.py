import math

from torch import Tensor

from hybrid_rl.algo.batch import Tokens

BOUNDS = {"share": (0, 1)}


def select(minibatch: Tokens, share: float = 0.2) -> Tensor:
    """1 for the `share` of the tokens whose distributions have the highest entropy, 0 for the others (arXiv
    2506.01939).

    The bound is the (1 − share) quantile of the minibatch's entropies: the value at place ⌈(1 − share) · (N − 1)⌉ in
    ascending order; tokens of equal entropy are all chosen or none. Silenced tokens stay in the aggregation's count, as
    in the paper and in TRL. share 1: all.
    """
    entropy = minibatch.entropy
    place = math.ceil((1 - share) * (len(entropy) - 1) - 1e-9)  # 0.1 · 10 is a little more than 1
    return (entropy >= entropy.sort().values[place]).float()
