"""Hand the device over: to the engine, with the trainer's weights, and back to the trainer.

`hand_over` and `take_back` are the only places where memory changes hands, in training and in evaluation alike.
`Handover` calls them for a run, and restarts an engine that died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.engine.base import KV_CACHE, WEIGHTS, Engine, EngineDied, EngineError
from hybrid_rl.policy.model import Policy
from hybrid_rl.policy.numbers import broken_weight
from hybrid_rl.policy.offload import release_cached
from hybrid_rl.policy.optimizer import Optimizer

BUCKET_BYTES = 512 * 2**20


class HandoverError(RuntimeError):
    """Raised when the engine's weights are not the policy's, or these are not finite."""


@dataclass(slots=True)
class Handover:
    """Give the device to the engine and to the trainer in turns: it samples between `to_engine` and `to_trainer`.

    All calls are collective.
    """

    policy: Policy
    engine: Engine
    bucket_bytes: int = BUCKET_BYTES
    allowed_restarts: int = 0  # of an engine that died
    say: Callable[[str], None] = lambda line: None
    version: int = 0  # of the weights that were handed over last
    restarts: int = 0

    def to_engine(self, version: int, optimizer: Optimizer | None = None, verify: bool = False) -> None:
        """Hand the weights over, to a new engine if it turns out to be dead. It is awake when this returns."""
        self.version = version
        while True:
            try:
                hand_over(self.policy, self.engine, version, optimizer, verify=verify, bucket_bytes=self.bucket_bytes)
                return
            except EngineDied as error:
                self._restart(error, optimizer)
                verify = True

    def to_trainer(self, optimizer: Optimizer | None = None) -> None:
        """Put the engine to sleep, and bring back what the trainer had parked."""
        take_back(self.policy, self.engine, optimizer)

    def revive(self, error: EngineDied) -> None:
        """Replace an engine that died while it sampled with a new one that has the same weights."""
        self._restart(error)
        self.to_engine(self.version, verify=True)

    def _restart(self, error: EngineDied, optimizer: Optimizer | None = None) -> None:
        """Restart the engine, asleep. Raise EngineError if no restart is left."""
        if self.restarts >= self.allowed_restarts:
            raise EngineError(
                f"the engine died {self.allowed_restarts + 1} times, and engine.restarts={self.allowed_restarts}; "
                f"{error}"
            )
        self.restarts += 1
        self.say(f"engine restarted ({self.restarts} of {self.allowed_restarts} times): {str(error).splitlines()[0]}")
        self.policy.park()  # a new engine takes its memory at once, so the trainer must free its part
        if optimizer is not None:
            optimizer.park()
        release_cached(self.policy.device)
        self.policy.ranks.on_all(self.engine.restart)
        self.policy.ranks.on_all(self.engine.sleep)
        self.policy.unpark()


def hand_over(
    policy: Policy,
    engine: Engine,
    version: int,
    optimizer: Optimizer | None = None,
    *,
    verify: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Give the device to the engine, and return the bytes that this rank copied. Collective.

    In this order: wake the engine's weights, copy the policy's in, park what only the trainer needs, wake the KV cache.
    For an engine that samples from the policy's own parameters they are unsharded in place instead of copied. `verify`
    compares the weights name by name. Raises HandoverError for non-finite weights before anything moves; an error on
    one rank is raised on all.
    """
    if name := broken_weight(policy):
        raise HandoverError(
            f"{name} of the policy's weights is infinite or NaN (version {version}); "
            "nothing sound can be sampled from them"
        )
    shared, moved = engine.shares(policy.sampler), 0
    if not shared:  # it is in another process
        release_cached(policy.device)
    policy.ranks.on_all(lambda: engine.wake([WEIGHTS]))
    if shared:
        policy.gather()
        engine.set_version(version)
    else:
        moved = _send(policy, engine, version, bucket_bytes)
    if verify:
        _compare(policy, engine, version, bucket_bytes, merged=not shared)
    policy.park()
    if optimizer is not None:
        optimizer.park()
    if not shared:
        release_cached(policy.device)
    policy.ranks.on_all(lambda: engine.wake([KV_CACHE]))
    return moved


def take_back(policy: Policy, engine: Engine, optimizer: Optimizer | None = None) -> int:
    """Give the device back to the trainer, and return the bytes freed. Collective.

    The KV cache and whole weights are freed, which engine and policy check; then the parked tensors are moved back.
    """
    try:
        freed = engine.sleep([KV_CACHE, WEIGHTS])
    except EngineDied:  # so its memory is free, and the next handover starts a new one
        freed = 0
    freed += policy.reshard()
    policy.unpark()
    if optimizer is not None:
        optimizer.unpark()
    return freed


def _send(policy: Policy, engine: Engine, version: int, bucket_bytes: int) -> int:
    moved, problem, lost = 0, None, None

    def counted() -> Iterator[dict[str, Tensor]]:
        nonlocal moved, lost
        while True:
            try:
                bucket = next(buckets)
            except StopIteration:
                return
            except Exception as error:  # out of memory, say: this rank cannot walk on, and must not wait for the others
                lost = error
                raise
            moved += sum(tensor.nbytes for tensor in bucket.values())
            yield bucket

    buckets = policy.buckets(engine.dtype, bucket_bytes)
    try:
        engine.update_weights(counted(), version)
    except Exception as error:  # raised by agree(), after the others have got what they wait for
        problem = error
    if lost is not None:
        raise lost
    for _ in buckets:  # the other ranks walk the sequence to its end, so this one does
        pass
    policy.ranks.agree(problem)
    return moved


def _compare(policy: Policy, engine: Engine, version: int, bucket_bytes: int, merged: bool) -> None:
    theirs, wrong = policy.ranks.on_all(engine.weights), []
    for bucket in policy.buckets(engine.dtype, bucket_bytes, merged):
        if not engine.team.main:  # another rank compares what this engine holds
            continue
        wrong += [
            n
            for n, t in bucket.items()
            if n not in theirs or not torch.equal(theirs[n].to(t.device), t.to(theirs[n].dtype))
        ]
    policy.ranks.agree(
        HandoverError(f"after the handover of version {version} the engine's {wrong[0]} differs from the policy's")
        if wrong
        else None
    )
