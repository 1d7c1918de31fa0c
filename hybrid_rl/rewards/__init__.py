"""Rewards to name in settings: `reward: {_target_: hybrid_rl.rewards.exact}`. How to compose them: docs/rewards.md.

Each is a function (completion, task) or a class that is made once in each worker and then called so. None imports
torch.
"""

from hybrid_rl.rewards.judge import Judge
from hybrid_rl.rewards.maths import MathVerify, numeric
from hybrid_rl.rewards.structure import JsonSchema, json_fields
from hybrid_rl.rewards.text import contains, exact, matches, similarity, zero
from hybrid_rl.rewards.trl import Trl
from hybrid_rl.rewards.verifiers import Verifiers

__all__ = [
    "JsonSchema",
    "Judge",
    "MathVerify",
    "Trl",
    "Verifiers",
    "contains",
    "exact",
    "json_fields",
    "matches",
    "numeric",
    "similarity",
    "zero",
]
