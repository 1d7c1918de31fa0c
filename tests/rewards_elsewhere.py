"""Rewards under names that come from an import, an assignment, a class or a block."""

from functools import partial as made
from functools import wraps

from tests.rewards import length as again  # noqa: F401
from tests.rewards import with_a_limit

partial = made(with_a_limit, limit=3)


class Class:
    @staticmethod
    def method(completion, task):
        return 1.0


try:
    import no_such_module  # noqa: F401
except ImportError:

    def in_a_block(completion, task):
        return 1.0


def _any(function):
    @wraps(function)
    def call(*arguments):
        return function()

    return call


@_any
def wrapped():
    return 1.0
