"""What an actor's device does next: the order of forwards, backwards and scorings, by hand for each way and by random arrivals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_fakes import Ticket, micro_batch
from tiderl.errors import WireError
from tiderl.trainers.base import LogProbs
from tiderl.types import MicroBatch, MicroBatchId, Pipelining
from tiderl.worker.actor_step import ActorStep, AwaitLogProbs, Backward, Forward, Idle, Next, Score

WINDOW = 20


def log_probs_of(batch: MicroBatch) -> list[LogProbs]:
    return [np.zeros(t.num_tokens, np.float32) for t in batch.trajectories]


def opened(pipelining: Pipelining, *lengths: int, max_scored_tokens: int = 1000) -> tuple[ActorStep, list[MicroBatch]]:
    """A step with micro-batches of one trajectory each."""
    step = ActorStep(0, pipelining, window_tokens=WINDOW, max_scored_tokens=max_scored_tokens)
    batches = [micro_batch(number, length) for number, length in enumerate(lengths)]
    for batch in batches:
        step.add(batch)
    return step, batches


def do(step: ActorStep, action: Next) -> str:
    """What a worker does with it, and its name: `s0,1` scores micro-batches 0 and 1, `f0` and `b0` are passes."""
    if isinstance(action, Score):
        step.scored({batch.micro_batch_id: log_probs_of(batch) for batch in action.micro_batches})
        return "s" + ",".join(str(batch.micro_batch_id) for batch in action.micro_batches)
    if isinstance(action, Forward):
        step.forwarded(Ticket(0, action.micro_batch.num_tokens))
        return f"f{action.micro_batch.micro_batch_id}"
    if isinstance(action, Backward):
        step.trained()
        return f"b{action.micro_batch.micro_batch_id}"
    if isinstance(action, AwaitLogProbs):
        return f"?{action.micro_batch_id}"
    return action.value


def run(step: ActorStep) -> str:
    """Until there is nothing to do; the last word says why."""
    done: list[str] = []
    while not isinstance(action := step.next(), Idle | AwaitLogProbs):
        done.append(do(step, action))
    return " ".join([*done, do(step, action)])


def test_without_a_reference_every_micro_batch_goes_through_at_once() -> None:
    step, _ = opened(Pipelining.NONE, 5, 6)
    step.deliver(MicroBatchId(0), [])  # means nothing here
    step.finish_colocated()
    assert isinstance(step.next(), Forward)
    step.forwarded(Ticket(0, 5))
    backward = step.next()
    assert isinstance(backward, Backward)
    assert backward.log_probs is None
    assert run(step) == "b0 f1 b1 await orders"
    step.close()
    assert run(step) == "close"


def test_alternating_scores_one_micro_batch_at_a_time() -> None:
    step, _ = opened(Pipelining.ALTERNATING, 5, 5)
    assert run(step) == "s0 f0 b0 s1 f1 b1 await orders"


def test_colocated_scores_what_is_there_and_newcomers_only_after_that_was_trained_on() -> None:
    step, _ = opened(Pipelining.COLOCATED, 5, 5, 5)
    assert [do(step, step.next()) for _ in range(3)] == ["s0,1,2", "f0", "b0"]
    step.add(micro_batch(3, 5))
    assert [do(step, step.next()) for _ in range(3)] == ["f1", "b1", "f2"]
    step.add(micro_batch(4, 5))
    assert run(step) == "b2 s3,4 f3 b3 f4 b4 await orders"


@pytest.mark.parametrize(
    ("max_scored_tokens", "expected"),
    [(15, "s0,1,2 f0 b0 f1 b1 f2 b2 s3"), (14, "s0,1 f0 b0 f1 b1 s2,3"), (4, "s0 f0 b0 s1 f1 b1 s2")],
)
def test_a_scoring_takes_at_most_what_memory_allows_and_always_one(max_scored_tokens: int, expected: str) -> None:
    step, _ = opened(Pipelining.COLOCATED, 5, 5, 5, 5, max_scored_tokens=max_scored_tokens)
    assert run(step).startswith(expected)


def test_the_backward_gets_the_very_objects_that_the_reference_returned() -> None:
    step, (batch,) = opened(Pipelining.COLOCATED, 5)
    values = log_probs_of(batch)
    step.scored({batch.micro_batch_id: values})
    do(step, step.next())
    backward = step.next()
    assert isinstance(backward, Backward)
    assert backward.log_probs is not None
    assert all(a is b for a, b in zip(backward.log_probs, values, strict=True))


def test_decoupled_forwards_run_ahead_as_far_as_the_window_reaches() -> None:
    step, batches = opened(Pipelining.DECOUPLED, 8, 12, 1)
    assert run(step) == "f0 f1 ?0"  # 8 + 12 tokens fill the window of 20
    # Not the oldest: order is kept.
    step.deliver(MicroBatchId(1), log_probs_of(batches[1]))
    assert run(step) == "?0"
    step.deliver(MicroBatchId(0), log_probs_of(batches[0]))
    assert run(step) == "b0 b1 f2 ?2"
    step.close()
    assert run(step) == "?2"
    step.deliver(MicroBatchId(2), log_probs_of(batches[2]))
    assert run(step) == "b2 close"


def test_a_micro_batch_larger_than_the_window_goes_alone() -> None:
    step, _ = opened(Pipelining.DECOUPLED, 30, 1)
    assert run(step) == "f0 ?0"


def test_log_probs_may_come_before_their_micro_batch() -> None:
    step, _ = opened(Pipelining.DECOUPLED)
    step.deliver(MicroBatchId(7), log_probs_of(micro_batch(7, 4)))
    assert run(step) == "await orders"
    step.add(micro_batch(7, 4))
    assert run(step) == "f7 b7 await orders"


def test_a_ref_rank_is_lost_and_the_actor_scores_the_rest_itself() -> None:
    step, batches = opened(Pipelining.DECOUPLED, 8, 8, 8, 8)
    step.deliver(MicroBatchId(1), log_probs_of(batches[1]))
    assert run(step) == "f0 f1 ?0"
    step.finish_colocated()
    late = [np.full(8, -9.0, np.float32)]
    step.deliver(MicroBatchId(0), list(late))  # of a Ref rank that was only slow, or of another one
    # In one go: 0 is in flight, 1 had its log-probs already, 2 and 3 were waiting.
    assert do(step, step.next()) == "s0,2,3"
    backward = step.next()
    assert isinstance(backward, Backward)
    assert backward.log_probs is not None
    assert float(backward.log_probs[0][0]) == 0.0
    step.add(micro_batch(4, 8))
    assert run(step) == "b0 b1 f2 b2 f3 b3 s4 f4 b4 await orders"


def test_log_probs_of_something_else_are_refused_by_name() -> None:
    step, _ = opened(Pipelining.DECOUPLED, 8)
    step.deliver(MicroBatchId(0), [np.zeros(7, np.float32)])
    do(step, step.next())
    with pytest.raises(WireError, match=r"micro-batch 0 have lengths \[7\], its trajectories \[8\]"):
        step.next()


@pytest.mark.parametrize("pipelining", list(Pipelining))
def test_an_abandoned_step_can_only_be_closed(pipelining: Pipelining) -> None:
    step, batches = opened(pipelining, 5, 5)
    action = step.next()
    step.abandon()
    do(step, action)  # was on the device when the order came
    assert run(step) == "await orders"
    step.add(micro_batch(2, 5))
    step.deliver(MicroBatchId(0), log_probs_of(batches[0]))
    step.finish_colocated()
    assert run(step) == "await orders"
    step.close()
    assert run(step) == "close"


@dataclass
class Arrivals:
    """Lengths of micro-batches, and the order in which they and their log-probs come: ("add", i), ("deliver", i), ("lose", 0)."""

    lengths: list[int]
    order: list[tuple[str, int]]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrivals:
    lengths = draw(st.lists(st.integers(1, 25), min_size=1, max_size=8))
    adds = [("add", i) for i in range(len(lengths))]
    lost = draw(st.booleans())
    # Where a Ref rank is lost, some log-probs never come.
    scored = (
        draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))) if lost else [True] * len(lengths)
    )
    others = [("deliver", i) for i, comes in enumerate(scored) if comes] + ([("lose", 0)] if lost else [])
    order: list[tuple[str, int]] = []
    for event in draw(st.permutations(others)):
        order += adds[: (n := draw(st.integers(0, len(adds))))]
        del adds[:n]
        order.append(event)
    return Arrivals(lengths, order + adds)


@given(arrivals(), st.data())
def test_whatever_the_order_of_arrival_all_is_trained_on_in_the_order_of_assignment(
    coming: Arrivals, data: st.DataObject
) -> None:
    """Invariants 1, 2, 3 and 5; how far the device gets between two arrivals is drawn too."""
    step, _ = opened(Pipelining.DECOUPLED)
    batches = [micro_batch(number, length) for number, length in enumerate(coming.lengths)]
    forwards: list[int] = []
    backwards: list[int] = []
    known: set[int] = set()
    lost = False

    def go_on(most: int) -> None:
        nonlocal known
        for _ in range(most):
            action = step.next()
            if isinstance(action, Score):
                assert lost
                known |= {batch.micro_batch_id for batch in action.micro_batches}
            elif isinstance(action, Forward):
                forwards.append(action.micro_batch.micro_batch_id)
                in_flight = [coming.lengths[i] for i in forwards[len(backwards) :]]
                assert len(in_flight) == 1 or sum(in_flight) <= WINDOW
            elif isinstance(action, Backward):
                backwards.append(action.micro_batch.micro_batch_id)
                assert backwards[-1] in known
            else:
                assert not (lost and isinstance(action, AwaitLogProbs)), "waits for a rank that is gone"
                return
            do(step, action)

    for kind, number in coming.order:
        if kind == "add":
            step.add(batches[number])
        elif kind == "deliver":
            step.deliver(MicroBatchId(number), log_probs_of(batches[number]))
            known |= set() if lost else {number}
        else:
            step.finish_colocated()
            lost = True
        go_on(data.draw(st.integers(0, 4)))
    step.close()
    go_on(1000)
    everything = list(range(len(batches)))
    assert forwards == everything
    assert backwards == everything
    assert step.next() is Idle.CLOSE
