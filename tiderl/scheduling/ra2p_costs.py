"""What a training step would take, each way of computing the reference: the paper's formulas, and a replay of the timeline.

The *paper's* formulas (Appendix A) know micro-batches of one size. `C_dec` lacks the Ref rank's throughput (it is wrong once
M * t_ref > t_f + t_b), adds waits for data to the work that would hide them, and is positive for no micro-batch at all.

The *pipeline* model plays what the ranks would do, pass by pass (`pipeline_s`):

- Trajectories wait until every actor can get a full micro-batch, until an actor has nothing to do, or until they are the last;
  then `dispatch.spread` deals them out. So does `step.py`.
- An actor that shares its rank with the reference takes the micro-batches that lie there (`max_wake_tokens`), brings the reference
  in once, scores them all, sends it away and trains on each. In turn (alternating), it takes one.
- A decoupled actor trains on its oldest micro-batch in flight once that is scored; until then it makes further forwards, as far as
  `window_tokens` lets it. Micro-batches are queued at the Ref rank that was given the fewest tokens.

Messages take no time. All is as exact as its inputs, and the same on every machine: sums and products only.

Invariants (tests/scheduling/test_ra2p_costs.py):

1. The paper's formulas are those of Appendix A, to the letter.
2. `pipeline_s` is the time of the last backward in a naive replay of the same rules in small steps of time; and in one of
   `step.py` and `worker/actor_step.py` themselves (test_ra2p_twins.py).
3. No way is faster than any rank's own work, nor than the last arrival and a pass over it.

Source: paper §5.1, Appendix A; paper.md §8, 3.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiderl.scheduling import dispatch
from tiderl.types import Pipelining, TaskId


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds a token of each pass, on one rank; `swap_s` is what it takes to bring the reference in and send it away again."""

    colocated_reference_s: float
    decoupled_reference_s: float
    forward_s: float
    backward_s: float
    swap_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """Trajectories of so many tokens each that become ready together, so long after the step's opening (0.0: before it)."""

    ready_s: float
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who works on a step, and how much each may hold at once."""

    num_actors: int
    num_ref: int
    max_micro_batch_tokens: int
    #: Decoupled: most tokens of micro-batches in flight; a single one always may be.
    window_tokens: int
    #: Colocated: most tokens that are scored with one swap; a single micro-batch always may be.
    max_wake_tokens: int


# --- Appendix A -------------------------------------------------------------------------------------------------------


def paper_decoupled_s(
    ready_s: Sequence[float], *, num_actors_per_ref: int, reference_s: float, forward_s: float, backward_s: float
) -> float:
    """`C_dec`. `ready_s` are the micro-batches' arrivals, sorted, from the step's opening; the others seconds a micro-batch."""
    total_s = sum(i * reference_s for i in range(num_actors_per_ref))
    last_s = 0.0
    for arrival_s in ready_s:
        # What is ready before the step is ready at its opening: so the gap is d_i, for i <= N0, i = N0 + 1 and i > N0 + 1.
        since_opening_s = max(arrival_s, 0.0)
        total_s += max(since_opening_s - last_s, forward_s + backward_s)
        last_s = since_opening_s
    return total_s


def paper_colocated_s(
    ready_s: Sequence[float],
    *,
    max_micro_batches: int,
    reference_s: float,
    forward_s: float,
    backward_s: float,
    swap_s: float,
) -> float:
    """`C_col`. `swap_s` is one swap, of which each wake-up makes two; the rest as in `paper_decoupled_s`."""
    now_s, first = 0.0, 0
    while first < len(ready_s):
        now_s = max(now_s, ready_s[first])
        num_ready = sum(arrival_s <= now_s for arrival_s in ready_s[first:])
        k = min(num_ready, max_micro_batches)
        now_s += swap_s + k * reference_s
        now_s += swap_s + k * (forward_s + backward_s)
        first += k
    return now_s


def paper_s(way: Pipelining, arrivals: Sequence[Arrival], costs: PassCosts, ranks: Ranks) -> float:
    """Appendix A for a whole step. The paper leaves open what a micro-batch is where several actors work side by side: here, a
    round of the actors, each with its part; all rounds are of equal size, and ready with their last trajectory."""
    num_tokens = sum(sum(arrival.lengths) for arrival in arrivals)
    num_rounds = math.ceil(num_tokens / (ranks.num_actors * ranks.max_micro_batch_tokens))
    if num_rounds == 0:
        return 0.0
    ready_s: list[float] = []
    num_ready = 0
    for arrival in sorted(arrivals, key=lambda a: a.ready_s):
        num_ready += sum(arrival.lengths)
        ready_s += [arrival.ready_s] * (num_ready * num_rounds // num_tokens - len(ready_s))
    # What one actor has of a round.
    tokens = num_tokens / (num_rounds * ranks.num_actors)
    forward_s, backward_s = tokens * costs.forward_s, tokens * costs.backward_s
    if way is Pipelining.DECOUPLED:
        return paper_decoupled_s(
            ready_s,
            num_actors_per_ref=math.ceil(ranks.num_actors / ranks.num_ref),
            reference_s=tokens * costs.decoupled_reference_s,
            forward_s=forward_s,
            backward_s=backward_s,
        )
    if way is Pipelining.NONE:
        reference_s = swap_s = 0.0
    else:
        reference_s, swap_s = tokens * costs.colocated_reference_s, costs.swap_s / 2
    return paper_colocated_s(
        ready_s,
        max_micro_batches=1 if way is Pipelining.ALTERNATING else max(1, int(ranks.max_wake_tokens // tokens)),
        reference_s=reference_s,
        forward_s=forward_s,
        backward_s=backward_s,
        swap_s=swap_s,
    )


# --- the timeline -----------------------------------------------------------------------------------------------------


def pipeline_s(way: Pipelining, arrivals: Sequence[Arrival], costs: PassCosts, ranks: Ranks) -> float:
    """Seconds from the step's opening to its last backward. Decoupled needs a Ref rank."""
    return _Timeline(way, arrivals, costs, ranks).play()


class _Pass(enum.Enum):
    """What a rank is busy with."""

    #: On an actor's rank: for all that it then trains on.
    SWAP_AND_SCORE = enum.auto()
    #: On a Ref rank.
    SCORE = enum.auto()
    FORWARD = enum.auto()
    #: What is left of a micro-batch, to the end of its backward.
    TRAIN = enum.auto()


@dataclass(slots=True, eq=False)
class _MicroBatch:
    num_tokens: int
    is_scored: bool = False


@dataclass(slots=True, eq=False)
class _Rank:
    """An actor or a Ref rank. `plan` holds the passes that are decided; the first of them ends at `end_s`."""

    inbox: deque[_MicroBatch] = field(default_factory=deque)
    in_flight: deque[_MicroBatch] = field(default_factory=deque)
    plan: deque[tuple[_Pass, float, _MicroBatch | None]] = field(default_factory=deque)
    end_s: float = math.inf
    #: Tokens that it was given, and micro-batches that it is not through with.
    load: int = 0
    num_outstanding: int = 0


class _Timeline:
    """One step being played."""

    def __init__(self, way: Pipelining, arrivals: Sequence[Arrival], costs: PassCosts, ranks: Ranks) -> None:
        assert way is not Pipelining.DECOUPLED or ranks.num_ref > 0, "decoupled without a Ref rank"
        self._way = way
        self._costs = costs
        self._max_micro_batch_tokens = ranks.max_micro_batch_tokens
        self._window_tokens = ranks.window_tokens
        self._max_wake_tokens = 0 if way is Pipelining.ALTERNATING else ranks.max_wake_tokens
        self._coming = deque(sorted(arrivals, key=lambda arrival: arrival.ready_s))
        self._pending: list[tuple[int, TaskId]] = []
        self._num_tasks = 0
        self._actors = [_Rank() for _ in range(ranks.num_actors)]
        self._refs = [_Rank() for _ in range(ranks.num_ref if way is Pipelining.DECOUPLED else 0)]
        self._now_s = 0.0

    def play(self) -> float:
        last_s = 0.0
        while True:
            self._receive()
            self._deal()
            for rank in self._refs + self._actors:
                self._go_on(rank)
            arrival_s = self._coming[0].ready_s if self._coming else math.inf
            next_s = min(arrival_s, *(rank.end_s for rank in self._refs + self._actors))
            if next_s == math.inf:
                return last_s
            self._now_s = next_s
            for rank in self._refs + self._actors:
                if rank.end_s == next_s and self._finish(rank):
                    last_s = next_s

    def _receive(self) -> None:
        while self._coming and self._coming[0].ready_s <= self._now_s:
            for length in self._coming.popleft().lengths:
                self._pending.append((length, TaskId(self._num_tasks)))
                self._num_tasks += 1

    def _deal(self) -> None:
        num_tokens = sum(length for length, _ in self._pending)
        if not (
            not self._coming  # these were the last
            or any(actor.num_outstanding == 0 for actor in self._actors)
            or dispatch.saturates(num_tokens, len(self._actors), self._max_micro_batch_tokens)
        ):
            return
        loads = [actor.load for actor in self._actors]
        decoupled = self._way is Pipelining.DECOUPLED
        for share in dispatch.spread(self._pending, loads, self._max_micro_batch_tokens, smallest_last=decoupled):
            micro_batch = _MicroBatch(share.num_tokens)
            receivers = [self._actors[share.dp_index]]
            if decoupled:
                receivers.append(min(self._refs, key=lambda rank: rank.load))
            for rank in receivers:
                rank.inbox.append(micro_batch)
                rank.load += share.num_tokens
                rank.num_outstanding += 1
        self._pending = []

    def _go_on(self, rank: _Rank) -> None:
        """An idle rank takes what it can."""
        if rank.plan:
            return
        if rank in self._refs:
            self._score(rank)
        elif self._way is Pipelining.DECOUPLED:
            self._overlap(rank)
        else:
            self._wake(rank)
        if rank.plan:
            rank.end_s = self._now_s + rank.plan[0][1]

    def _score(self, ref: _Rank) -> None:
        if ref.inbox:
            micro_batch = ref.inbox.popleft()
            ref.plan.append((_Pass.SCORE, micro_batch.num_tokens * self._costs.decoupled_reference_s, micro_batch))

    def _overlap(self, actor: _Rank) -> None:
        """A backward if one is open, else a forward."""
        if actor.in_flight and actor.in_flight[0].is_scored:
            micro_batch = actor.in_flight.popleft()
            actor.plan.append((_Pass.TRAIN, micro_batch.num_tokens * self._costs.backward_s, micro_batch))
        elif actor.inbox:
            held = sum(micro_batch.num_tokens for micro_batch in actor.in_flight)
            if not held or held + actor.inbox[0].num_tokens <= self._window_tokens:
                micro_batch = actor.inbox.popleft()
                actor.plan.append((_Pass.FORWARD, micro_batch.num_tokens * self._costs.forward_s, micro_batch))

    def _wake(self, actor: _Rank) -> None:
        """Score and train on all that is there and fits."""
        taken: list[_MicroBatch] = []
        num_tokens = 0
        while actor.inbox and (not taken or num_tokens + actor.inbox[0].num_tokens <= self._max_wake_tokens):
            taken.append(actor.inbox.popleft())
            num_tokens += taken[-1].num_tokens
        if not taken:
            return
        if self._way is not Pipelining.NONE:
            score_s = self._costs.swap_s + num_tokens * self._costs.colocated_reference_s
            actor.plan.append((_Pass.SWAP_AND_SCORE, score_s, None))
        token_s = self._costs.forward_s + self._costs.backward_s
        actor.plan += [(_Pass.TRAIN, micro_batch.num_tokens * token_s, micro_batch) for micro_batch in taken]

    def _finish(self, rank: _Rank) -> bool:
        """The pass that a rank is busy with ends; True if it was the last one of a micro-batch."""
        done, _, micro_batch = rank.plan.popleft()
        rank.end_s = self._now_s + rank.plan[0][1] if rank.plan else math.inf
        if micro_batch is None:
            return False
        if done is _Pass.SCORE:
            micro_batch.is_scored = True
        elif done is _Pass.FORWARD:
            rank.in_flight.append(micro_batch)
            return False
        rank.num_outstanding -= 1
        return done is _Pass.TRAIN
