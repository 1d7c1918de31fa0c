"""Try an algorithm's parts on a small made-up batch before a model loads, and name a part that breaks its contract."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object, instantiate
from torch import Tensor

from hybrid_rl.algo.batch import Scored, Tokens
from hybrid_rl.algo.declared import PartError, needs
from hybrid_rl.config import AlgoConfig, Config, KlPlace

CONTRACTS = {
    "advantage": "an advantage returns a float tensor, [R] for R rollouts or [N] for N tokens, "
    "and with a critic (advantages, targets [N])",
    "correction": "a correction returns (weights [N] float, kept [N] bool) for N tokens",
    "selection": "a selection returns weights [N] for the N tokens of the minibatch",
    "look": "a look returns numbers [N] for the N tokens of the minibatch",
    "loss": "a loss returns (losses [M], {name: [M]}) for M tokens, with a gradient through tokens.logprobs",
    "aggregation": "an aggregation returns (weights [N] float, a divisor above 0)",
}


class CheckedPart:
    """A part of the algorithm, which raises PartError with its key when it breaks its contract."""

    def __init__(self, kind: str, key: str, target: str, call: Callable[..., Any]):
        self.kind, self.key, self.target, self.call = kind, key, target, call

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self.call(*arguments)
        except Exception as error:  # whatever the user's code raises
            raise self.error(f"raises {type(error).__name__}: {_first_line(error)} ({_place(error)})") from error

    def error(self, problem: str) -> PartError:
        """Return the error that names the part, the problem and the contract."""
        return PartError(f"{self.key} ({self.target}) {problem}; {CONTRACTS[self.kind]}")

    def pair(self, result: Any) -> tuple[Any, Any]:
        """Return the result if it is a pair. Raises PartError."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.error(f"returns {_described(result)}")
        return result

    def tensor(self, value: Any, *sizes: int, what: str = "", kind: str = "number") -> Tensor:
        """Return `value` if it is a finite tensor of one of the sizes; `kind`: number (bool too), float or bool."""
        fits = isinstance(value, Tensor) and value.dim() == 1 and len(value) in sizes
        right = fits and {"number": True, "float": value.is_floating_point(), "bool": value.dtype == torch.bool}[kind]
        if not right:
            raise self.error(
                f"returns {what}{_described(value)} where {' or '.join(f'[{n}]' for n in dict.fromkeys(sizes))} {kind} "
                "is due"
            )
        if not bool(torch.isfinite(value).all()):
            raise self.error(f"returns {what}with NaN or infinite numbers")
        return value

    def without_gradient(self, value: Tensor) -> Tensor:
        """Return `value` if it has no gradient. Raises PartError."""
        if value.requires_grad:
            raise self.error("returns a tensor with a gradient")
        return value


def check_parts(config: Config) -> None:
    """Call each part of the algorithm as a run would. Raises PartError."""
    algo = config.algo
    with torch.random.fork_rng(devices=[]):
        batch = _made_up(config)
        advantages = _check_advantage(
            _part("advantage", "algo.advantage", algo.advantage), batch, "values" in needs(algo.advantage)
        )
        for name, part in algo.correction.items():
            _check_correction(_part("correction", f"algo.correction.{name}", part), batch)
        tokens = _tokens(batch)
        for name, part in algo.selection.items():
            selection = _part("selection", f"algo.selection.{name}", part)
            selection.without_gradient(selection.tensor(selection(tokens), len(tokens.logprobs)))
        _check_loss(algo, tokens)
        _check_aggregation(_part("aggregation", "algo.aggregation", algo.aggregation), batch, config.rollout.max_tokens)
        if "rollout_advantages" in needs(algo.loss):
            spread = max(float(of.max() - of.min()) for of in batch.per_rollout(advantages))
            if spread > 1e-5 * float(advantages.abs().max()):
                raise PartError(
                    f"algo.loss ({algo.loss['_target_']}) has one ratio a rollout and would average the tokens' own "
                    f"advantages of algo.advantage ({algo.advantage['_target_']}); use another loss, or an advantage "
                    "with one number a rollout"
                )


def look_of(loss: Mapping[str, Any]) -> Callable[[Tokens], Tensor] | None:
    """Return the `look` beside a loss, with the loss's arguments; None if there is none."""
    module = loss["_target_"].rpartition(".")[0]
    return (
        instantiate({**loss, "_target_": f"{module}.look"}, _partial_=True)
        if hasattr(get_object(module), "look")
        else None
    )


def _part(kind: str, key: str, part: Mapping[str, Any]) -> CheckedPart:
    try:
        return CheckedPart(kind, key, part["_target_"], instantiate(part, _partial_=True))
    except Exception as error:  # whatever the module does when imported
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra's own errors wrap it
            cause = cause.__cause__
        raise PartError(
            f"{key} ({part['_target_']}) cannot be loaded: {type(cause).__name__}: {_first_line(cause)}"
        ) from error


def _check_advantage(part: CheckedPart, batch: Scored, with_values: bool) -> Tensor:
    """Return the advantages at the tokens, [N]. Raises PartError."""
    result = part(batch)
    if isinstance(result, tuple) != with_values:
        raise part.error(
            f"returns {_described(result)}, and its NEEDS {'names' if with_values else 'does not name'} values"
        )
    rollouts, tokens = len(batch.outcomes), len(batch.behaviour_logprobs)
    if with_values:
        result, targets = part.pair(result)
        part.without_gradient(part.tensor(targets, tokens, what="targets ", kind="float"))
    advantages = part.without_gradient(part.tensor(result, rollouts, tokens, kind="float"))
    if not bool(advantages.any()):
        alone = (
            ": rollout.group_size=1 leaves a rollout nothing to be compared with"
            if rollouts == len(batch.group_sizes)
            else ""
        )
        raise part.error(f"is 0 for rollouts of unlike rewards, so that nothing would be trained{alone}")
    return batch.to_tokens(advantages) if len(advantages) == rollouts else advantages


def _check_correction(part: CheckedPart, batch: Scored) -> None:
    weights, kept = part.pair(part(batch))
    part.without_gradient(part.tensor(weights, len(batch.behaviour_logprobs), what="weights ", kind="float"))
    part.tensor(kept, len(batch.behaviour_logprobs), what="kept ", kind="bool")


def _check_loss(algo: AlgoConfig, tokens: Tokens) -> None:
    part, count = _part("loss", "algo.loss", algo.loss), len(tokens.logprobs)
    if look := look_of(algo.loss):
        seer = CheckedPart("look", "algo.loss", algo.loss["_target_"].rpartition(".")[0] + ".look", look)
        tokens.look = seer.without_gradient(seer.tensor(seer(tokens), count))
    found = _losses(part, tokens)
    (gradient,) = torch.autograd.grad(found[1].sum(), found[0].logprobs, allow_unused=True)
    if gradient is None or not bool(gradient.any()):
        raise part.error("gives tokens.logprobs no gradient")
    part.tensor(gradient, count, what="a gradient ")
    first = tokens.rollout < int(tokens.rollout.max() + 1) // 2
    apart = torch.cat([_losses(part, _of(tokens, rows))[1] for rows in (first, ~first)])
    if not torch.allclose(found[1], apart, rtol=1e-4, atol=1e-5):
        raise part.error(
            "gives a token another loss when other rollouts share its row, so the gradient would depend on how "
            "rollouts are packed (what must be known of the whole minibatch is computed by a function "
            "look(minibatch, …) beside the loss)"
        )
    _losses(part, _of(tokens, torch.zeros_like(first)))  # a rank may have rows without a token


def _losses(part: CheckedPart, tokens: Tokens) -> tuple[Tokens, Tensor]:
    tokens = _of(tokens, torch.ones_like(tokens.rollout, dtype=torch.bool))
    tokens.logprobs.requires_grad_()
    losses, numbers = part.pair(part(tokens))
    count = len(tokens.logprobs)
    if not isinstance(numbers, dict):
        raise part.error(f"returns {_described(numbers)} beside the losses")
    for name, column in numbers.items():
        part.tensor(column, count, what=f"{name!r} ")
    if not part.tensor(losses, count, what="losses ", kind="float").requires_grad:
        raise part.error("gives tokens.logprobs no gradient")
    return tokens, losses


def _check_aggregation(part: CheckedPart, batch: Scored, max_tokens: int) -> None:
    kept = batch.to_tokens(batch.kept)
    weights, divisor = part.pair(part(kept, batch.rollout, max_tokens))
    part.without_gradient(part.tensor(weights, len(kept), what="weights ", kind="float"))
    if not isinstance(divisor, float | int) or not 0 < divisor < float("inf"):
        raise part.error(f"returns the divisor {divisor!r}")


class _MadeUpParts(dict[str, Tensor]):
    """The parts of a made-up reward; every name counts as one, since the real reward's names are not yet known."""

    def __missing__(self, name: str) -> Tensor:
        return next(iter(self.values()))

    def __contains__(self, name: object) -> bool:
        return True


def _made_up(config: Config) -> Scored:
    """Return three groups of the run's size, with unlike rewards, equal ones, and 0 and 1.

    Rollouts have 1 to 4 tokens; the last is not kept.
    """
    algo, size, draw = config.algo, config.rollout.group_size, torch.Generator().manual_seed(0)
    rollouts = 3 * size
    lengths = torch.arange(rollouts) % 4 + 1
    tokens = int(lengths.sum())

    def noise(count: int, scale: float = 1.0) -> Tensor:
        return scale * torch.rand(count, generator=draw)

    first = torch.cat([noise(size), torch.full((size,), 0.5), (torch.arange(size) % 2).float()])
    second = noise(rollouts, 0.5)
    second[size : 2 * size] = 0.25
    behaviour, wanted = -0.1 - noise(tokens, 2.0), needs(algo.advantage)
    kept = torch.ones(rollouts, dtype=torch.bool)
    kept[-1] = rollouts == 1
    in_reward = algo.kl.coef > 0 and algo.kl.place == KlPlace.reward
    return Scored(
        first + second,
        [size] * 3,
        lengths,
        kept,
        behaviour,
        behaviour + noise(tokens, 0.01),
        penalties=-noise(tokens, 0.1) if in_reward else None,
        values=noise(tokens) if "values" in wanted else None,
        greedy=noise(rollouts) if "greedy" in wanted else None,
        teacher_logprobs=-0.1 - noise(tokens, 2.0) if "teacher_logprobs" in wanted else None,
        parts=_MadeUpParts(first=first, second=second),
    )


def _tokens(batch: Scored) -> Tokens:
    """Return the batch's tokens after a small change of the policy; advantages have either sign."""
    draw = torch.Generator().manual_seed(1)
    moved = 0.2 * torch.randn(len(batch.behaviour_logprobs), generator=draw)
    advantages = torch.randn(len(batch.lengths), generator=draw)
    logprobs = (batch.old_logprobs + moved).clamp(max=-0.01)
    return Tokens(
        logprobs,
        batch.old_logprobs,
        batch.behaviour_logprobs,
        batch.to_tokens(advantages),
        batch.rollout,
        entropy=1 - logprobs.exp(),
    )


def _of(tokens: Tokens, chosen: Tensor) -> Tokens:
    """Return copies of the chosen tokens; `chosen` is [M] bool."""
    names = ("logprobs", "old_logprobs", "behaviour_logprobs", "advantages", "rollout", "entropy", "look")
    columns = {name: column[chosen].clone() for name in names if (column := getattr(tokens, name)) is not None}
    return Tokens(**columns)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _first_line(error: BaseException) -> str:
    return " ".join((str(error).strip() or "no message").splitlines()[0].split())


def _place(error: BaseException) -> str:
    """Return the last line of code outside torch that the error passed through."""
    frames: Iterator[traceback.FrameSummary] = reversed(traceback.extract_tb(error.__traceback__))
    own = Path(torch.__file__).parent
    frame = next(f for f in frames if own not in Path(f.filename).parents)
    return f"{frame.filename}:{frame.lineno}"
