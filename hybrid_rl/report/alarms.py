"""Alarms that say, from the metrics of RL steps, that training goes wrong."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST = 5  # measured steps that tell how a run began
WINDOW = 5  # steps over which a measure is compared with its best ones
CALM = 5  # steps in a row without its cause after which an alarm is over, so that a value around a limit alarms once


@dataclass(slots=True)
class Alarms:
    """The limits of the alarms, and what they remember of earlier steps.

    An alarm is one line with the value, its limit and what to look at, given once when its cause begins. `state()`
    holds what is remembered, so that a resumed run gives the same alarms as an uninterrupted one.
    """

    entropy_share: float = (
        0.1  # of the mean of the first steps; in a run that learns well entropy falls to about a fifth
    )
    entropy_floor: float = 0.05  # nats a token; both limits must be undercut, since a policy may begin with low entropy
    mismatch: float = 1e-2  # nats a token, for `steps` steps in a row; the bound of prime-rl's tests
    mismatch_growth: float = 10.0  # times the median of the first steps; alarms at once if also above mismatch_floor
    mismatch_floor: float = 1e-3  # nats a token; bfloat16 engines of dense models stay below (1e-5 to 1e-3)
    dropped: float = 0.9  # share of tokens that corrections drop from the loss
    truncated: float = 0.5  # share of completions
    repetition: float = 0.5  # share of 4-grams, mean over completions
    parting: float = (
        3.0  # standard errors by which a reward must have risen, and a measure fallen, since the measure's best
    )
    steps: int = 3  # steps in a row for which a mismatch or a constant reward part must last
    _first: dict[str, list[float]] = field(default_factory=dict, init=False)  # the first measured values
    _lasting: dict[str, int] = field(default_factory=dict, init=False)  # number of steps in a row with a cause
    _varied: list[str] = field(
        default_factory=list, init=False
    )  # reward parts that differed between rollouts in some step
    _recent: dict[str, list[list[float]]] = field(
        default_factory=dict, init=False
    )  # measure → [[measure, reward]] of WINDOW steps
    _best: dict[str, list[list[float]]] = field(
        default_factory=dict, init=False
    )  # the same of the measure's best WINDOW
    _active: dict[str, int] = field(default_factory=dict, init=False)  # alarm → steps since its cause was last seen

    def check(self, values: dict[str, Any]) -> dict[str, str]:
        """Return the alarms that begin in this step: short name → line. `values` are its metrics."""
        began = {}
        for name, line in self._judged(values):
            if line and name not in self._active:
                began[name] = line
            if line:
                self._active[name] = 0
            elif name in self._active:
                self._active[name] += 1
                if self._active[name] == CALM:
                    del self._active[name]
        return began

    def state(self) -> dict[str, Any]:
        """Return what is remembered, as values for JSON."""
        return {
            "first": {name: list(values) for name, values in self._first.items()},
            "lasting": dict(self._lasting),
            "varied": list(self._varied),
            "active": dict(self._active),
            "recent": {name: list(pairs) for name, pairs in self._recent.items()},
            "best": {name: list(pairs) for name, pairs in self._best.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state()` returned."""
        self._first = {name: list(values) for name, values in state["first"].items()}
        self._recent, self._best = ({k: list(v) for k, v in state.get(name, {}).items()} for name in ("recent", "best"))
        self._lasting, self._varied, self._active = dict(state["lasting"]), list(state["varied"]), dict(state["active"])

    def _judged(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (short name, line, "" without a cause) of each alarm for which this step has values."""
        yield from self._entropy(_measured(values, "entropy"))
        yield from self._mismatch(_measured(values, "mismatch_kl"))
        if (share := _measured(values, "dropped")) is not None:
            line = (
                f"algo.correction drops {share:.1%} of tokens, limit {self.dropped:.0%}: "
                "almost nothing is trained; look at mismatch_kl"
            )
            yield "dropped", line if share >= self.dropped else ""
        yield from self._reward(values)
        yield from self._measures(values)
        if (share := _measured(values, "truncated")) is not None:
            line = (
                f"{share:.1%} of completions truncated, limit {self.truncated:.0%}: "
                "raise rollout.max_tokens, or check whether completions end at all"
            )
            yield "truncated", line if share >= self.truncated else ""
        if (share := _measured(values, "repetition")) is not None:
            line = (
                f"repetition {share:.1%}, limit {self.repetition:.0%}: "
                "completions repeat themselves; read the rollouts of this step"
            )
            yield "repetition", line if share >= self.repetition else ""

    def _entropy(self, entropy: float | None) -> Iterator[tuple[str, str]]:
        if entropy is None:
            return
        if first := self._began("entropy", entropy):
            began = statistics.fmean(first)
            limit = min(self.entropy_floor, self.entropy_share * began)
            line = (
                f"entropy {entropy:.2g} nats a token, limit {limit:.2g}, began with {began:.2g}: "
                "completions hardly differ; see if the task is solved, else lower rl.optimizer.lr or raise clip_high"
            )
            yield "entropy", line if entropy < limit else ""

    def _mismatch(self, kl: float | None) -> Iterator[tuple[str, str]]:
        if kl is None:
            return
        first = self._began("mismatch_kl", kl)
        growth = (
            max(self.mismatch_floor, self.mismatch_growth * statistics.median(first))
            if len(first) == FIRST
            else math.inf
        )
        lasting = self._last("mismatch_kl", kl > self.mismatch)
        line = ""
        if lasting >= self.steps:
            line = f"limit {self.mismatch:.0e} for {self.steps} steps"
        elif kl > growth:
            line = f"limit {growth:.1e}, began with {statistics.median(first):.1e}"
        cause = (
            "engine and trainer compute different probabilities; check with handover.verify=true, "
            "then compare their precision"
        )
        yield "mismatch_kl", f"mismatch KL {kl:.1e} nats a token, {line}: {cause}" if line else ""

    def _reward(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        std = _measured(values, "reward_std")
        if std is not None:
            line = (
                f"reward {values['reward']:.3g} in every rollout, limit: s.d. above 0: "
                "no difference to learn from; check how rollouts are scored"
            )
            yield "reward", line if std == 0 else ""
        parts_std = values.get("parts_std", {})
        vary = [name for name, std in parts_std.items() if std > 0]
        self._varied += [name for name in vary if name not in self._varied]
        for name in parts_std:
            if name in self._varied:
                lasting = self._last(f"part:{name}", bool(vary) and name not in vary)
                line = (
                    f"reward part {name} {values['parts'][name]:.3g} in every rollout, limit {self.steps} such steps: "
                    "it no longer differs between completions; check whether it is learned, gamed or broken"
                )
                yield f"part:{name}", line if lasting >= self.steps else ""

    def _measures(self, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Compare each measure's newest steps with its best ones: a reward that rises while it falls is gamed."""
        for name, measure in values.get("measures", {}).items():
            recent = [*self._recent.get(name, []), [measure, values["reward"]]][-WINDOW:]
            self._recent[name] = recent
            if len(recent) < WINDOW:
                continue
            best = self._best.setdefault(name, recent)
            if statistics.fmean(m for m, _ in recent) > statistics.fmean(m for m, _ in best):
                self._best[name] = best = recent
            (measures, rewards), (best_measures, best_rewards) = zip(*recent, strict=True), zip(*best, strict=True)
            parted = _change(best_measures, measures) < -self.parting and _change(best_rewards, rewards) > self.parting
            line = (
                f"measure {name} fell to {statistics.fmean(measures):.3g} from {statistics.fmean(best_measures):.3g} "
                f"while the reward rose to {statistics.fmean(rewards):.3g} from {statistics.fmean(best_rewards):.3g} "
                f"(means of {WINDOW} steps, limit {self.parting:g} standard errors): the reward is gamed; read the rollouts with the largest reward"
            )
            yield f"measure:{name}", line if parted else ""

    def _began(self, name: str, value: float) -> list[float]:
        """Return the values of the first steps before this one, at most FIRST; remember this one if there are fewer."""
        first = list(self._first.setdefault(name, []))
        if len(first) < FIRST:
            self._first[name].append(value)
        return first

    def _last(self, name: str, holds: bool) -> int:
        """Return for how many steps in a row, this one included, the cause `name` holds."""
        self._lasting[name] = self._lasting.get(name, 0) + 1 if holds else 0
        return self._lasting[name]


def _change(before: Sequence[float], after: Sequence[float]) -> float:
    """Return by how many standard errors the mean changed; values that do not vary count as varying by a millionth."""
    a, b = statistics.fmean(before), statistics.fmean(after)
    error = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
    return (b - a) / max(error, 1e-6 * max(abs(a), abs(b)), 1e-12)


def _measured(values: dict[str, Any], key: str) -> float | None:
    """Return the value, None if it is missing or non-finite."""
    value = values.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
