"""Environments: what answers the policy, turn by turn, until the conversation is over. How to write one: docs/environments.md.

None of these imports torch.
"""

from hybrid_rl.environments.base import Done, Reply
from hybrid_rl.environments.gymnasium import Gymnasium
from hybrid_rl.environments.tools import Tools

__all__ = ["Done", "Gymnasium", "Reply", "Tools"]
