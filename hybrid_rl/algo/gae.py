import torch
from torch import Tensor

from hybrid_rl.algo.batch import Scored
from hybrid_rl.algo.reinforce_pp import whiten as whitened

NEEDS = ("values", "silent")
BOUNDS = {"gamma": (0, 1), "lam": (0, 1), "critic_lam": (0, 1)}


def advantages(
    batch: Scored, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True, critic_lam: float | None = None
) -> tuple[Tensor, Tensor]:
    """Â_t = δ_t + γλ·Â_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t, and the critic's targets Â_t + V_t, [N] both (GAE, arXiv
    1506.02438, eq. 16).

    V and Â after a rollout's last token are 0. `whiten`: the advantages, over the batch's kept tokens, not the targets.
    critic_lam: λ of the targets' own Â (decoupled GAE, arXiv 2503.01491: 1, so that a long answer's reward reaches its
    first token); null: lam. r = [0, 0, 1], V = 0.5 throughout, λ = 0.5: Â = [0.125, 0.25, 0.5] before whitening,
    targets [0.625, 0.75, 1].
    """
    values = batch.values
    assert values is not None, "gae needs values"
    delta = batch.token_rewards + gamma * following(batch, values) - values
    advantage = discounted(batch, delta, torch.full_like(delta, gamma * lam))
    learned = advantage if critic_lam is None else discounted(batch, delta, torch.full_like(delta, gamma * critic_lam))
    return whitened(batch, advantage) if whiten else advantage, learned + values


def following(batch: Scored, column: Tensor) -> Tensor:
    """Return the number at the rollout's next token, 0 at its last: [N] → [N]."""
    after = column.roll(-1)
    after[_last(batch)] = 0
    return after


def discounted(batch: Scored, addend: Tensor, decay: Tensor) -> Tensor:
    """Return x_t = addend_t + decay_t · x_{t+1} within each rollout, [N]; x is 0 after its last token.

    Each round doubles the number of tokens whose terms x holds: 32,768 tokens take 15 rounds, without a loop over them.
    """
    decay = decay.clone()
    decay[_last(batch)] = 0  # so that nothing crosses into the next rollout, nor from the last to the first
    reach, longest = 1, int(batch.lengths.max())
    while reach < longest:
        addend, decay = addend + decay * addend.roll(-reach), decay * decay.roll(-reach)
        reach *= 2
    return addend


def _last(batch: Scored) -> Tensor:
    """Return the place of each rollout's last token, [R]."""
    return batch.lengths.cumsum(0) - 1
