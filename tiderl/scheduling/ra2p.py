"""Resource-Aware Ref-Actor Pipelining: which way of computing the reference makes a step shorter.

When a step opens, every way that the job has ranks for is predicted (`ra2p_costs.py`) from what passes have cost lately
(`ra2p_estimates.py`), from what is ready, and from what is expected to come. Where the settings leave only one way, the others are
predicted all the same: the metrics show what they would have cost.

Invariants (tests/scheduling/test_ra2p.py):

1. Without a KL penalty there is no reference; mode `stream` alternates, `async` is colocated; `tide` goes as `schedule.pipelining`
   says, and colocated where no Ref rank is left.
2. `auto` takes the way with the lower prediction, but leaves the last one only for one that is `MIN_GAIN` faster.
3. Before anything was measured, `auto` is decoupled where there are Ref ranks.
4. The same events and forecasts give the same choices.

Source: paper §5.1, Appendix A; paper.md §8, 3.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tiderl.config.schema import Config
from tiderl.scheduling.events import MicroBatchTrained, ReferenceScored, StepTrained
from tiderl.scheduling.ra2p_costs import Arrival, Ranks, paper_s, pipeline_s
from tiderl.scheduling.ra2p_estimates import CostEstimates
from tiderl.types import Pipelining

#: A way is left for another that is predicted to take this share less; below that it would be noise that chooses.
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class StepForecast:
    """What is known of a step when it opens."""

    #: Tokens of each group that is ready, and of those still to come (expected), in the order in which they will be taken.
    ready_tokens: tuple[int, ...]
    coming_tokens: tuple[int, ...]
    #: Expected seconds between two groups that become ready (TPRM); 0.0 if unknown.
    gap_s: float
    num_actors: int
    num_ref: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The way chosen for a step. `predicted_s`: from its opening to the last backward, of every way that the job has ranks for;
    empty before anything was measured."""

    pipelining: Pipelining
    predicted_s: Mapping[Pipelining, float]
    reason: str


class Ra2p:
    """Learns what passes cost, and chooses. Its state depends on the events and forecasts alone."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._use_reference = config.loss.kl_weight > 0
        self._estimates = CostEstimates()
        self._last: Pipelining | None = None

    def trained(self, event: MicroBatchTrained) -> None:
        self._estimates.trained(event)

    def scored(self, event: ReferenceScored) -> None:
        self._estimates.scored(event)

    def stepped(self, event: StepTrained) -> None:
        """Only a whole step says what a swap pair cost: micro-batches share it."""
        self._estimates.stepped(event)

    def choose(self, forecast: StepForecast) -> Choice:
        """The way for the step that opens now, with the reason in words."""
        predicted_s = self._predict(forecast)
        way, reason = self._choose(forecast, predicted_s)
        self._last = way
        return Choice(way, predicted_s, f"{way.value}: {reason}")

    def _choose(self, forecast: StepForecast, predicted_s: Mapping[Pipelining, float]) -> tuple[Pipelining, str]:
        schedule = self._config.schedule
        if not self._use_reference:
            return Pipelining.NONE, "no KL penalty (loss.kl_weight is 0)" + _against(predicted_s, Pipelining.NONE)
        if schedule.mode != "tide":
            way = Pipelining.ALTERNATING if schedule.mode == "stream" else Pipelining.COLOCATED
            return way, f"schedule.mode is {schedule.mode}" + _against(predicted_s, way)
        if forecast.num_ref == 0:
            return Pipelining.COLOCATED, "there is no Ref rank" + _against(predicted_s, Pipelining.COLOCATED)
        if schedule.pipelining != "auto":
            way = Pipelining(schedule.pipelining)
            return way, f"schedule.pipelining is {way.value}" + _against(predicted_s, way)
        if not predicted_s:
            return Pipelining.DECOUPLED, "nothing measured yet, and there are Ref ranks"
        return self._compare(predicted_s)

    def _compare(self, predicted_s: Mapping[Pipelining, float]) -> tuple[Pipelining, str]:
        decoupled, colocated = Pipelining.DECOUPLED, Pipelining.COLOCATED
        faster = decoupled if predicted_s[decoupled] <= predicted_s[colocated] else colocated
        other = colocated if faster is decoupled else decoupled
        if self._last is other and predicted_s[faster] > (1 - MIN_GAIN) * predicted_s[other]:
            return other, f"{_seconds(predicted_s, other, faster)}, which is not {MIN_GAIN:.0%} less"
        return faster, _seconds(predicted_s, faster, other)

    def _predict(self, forecast: StepForecast) -> dict[Pipelining, float]:
        costs = self._estimates.costs(use_reference=self._use_reference)
        if costs is None:
            return {}
        ways = [Pipelining.COLOCATED, Pipelining.ALTERNATING] if self._use_reference else [Pipelining.NONE]
        if self._use_reference and forecast.num_ref > 0:
            ways.insert(0, Pipelining.DECOUPLED)
        model = paper_s if self._config.schedule.cost_model == "paper" else pipeline_s
        arrivals, ranks = self._arrivals(forecast), self._ranks(forecast)
        return {way: model(way, arrivals, costs, ranks) for way in ways}

    def _arrivals(self, forecast: StepForecast) -> list[Arrival]:
        """What is ready lies there together; a group comes every `gap_s` after that."""
        ready = [length for tokens in forecast.ready_tokens for length in self._lengths(tokens)]
        coming = enumerate(forecast.coming_tokens, start=1)
        return [
            Arrival(0.0, tuple(ready)),
            *(Arrival(i * forecast.gap_s, self._lengths(tokens)) for i, tokens in coming),
        ]

    def _lengths(self, group_tokens: int) -> tuple[int, ...]:
        """A group's trajectories are taken to be equally long."""
        size = self._config.train.group_size
        short, num_longer = divmod(group_tokens, size)
        return tuple(length for i in range(size) if (length := short + (i < num_longer)))

    def _ranks(self, forecast: StepForecast) -> Ranks:
        trainer = self._config.trainer
        return Ranks(
            num_actors=forecast.num_actors,
            num_ref=forecast.num_ref,
            max_micro_batch_tokens=trainer.max_micro_batch_tokens,
            window_tokens=trainer.window_tokens or 2 * trainer.max_micro_batch_tokens,
            # An actor holds nothing but log-probs of what it has scored: no step has so many that it would matter.
            max_wake_tokens=sys.maxsize,
        )


def _against(predicted_s: Mapping[Pipelining, float], way: Pipelining) -> str:
    """The numbers behind a way that was not chosen by them."""
    return f"; {_seconds(predicted_s, way, *(w for w in predicted_s if w is not way))}" if predicted_s else ""


def _seconds(predicted_s: Mapping[Pipelining, float], way: Pipelining, *others: Pipelining) -> str:
    """`8.1 s against 9.6 s colocated`."""
    own, *against = (f"{s:.1f} s" if (s := predicted_s[w]) >= 1 else f"{s:.2g} s" for w in (way, *others))
    named = " and ".join(f"{seconds} {other.value}" for seconds, other in zip(against, others, strict=True))
    return f"{own} against {named}" if named else own
