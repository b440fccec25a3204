"""The cost model's timeline against those who really decide: `OpenedStep` deals, `ActorStep` orders the passes, in virtual time.

`ra2p_costs.pipeline_s` repeats their rules in short; here the two must agree to the last bit, so that neither can be changed alone.
Arrivals come at whole times plus a fraction of their own: what happens at the same instant is in no defined order in a live job.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.driver import small_config, spec_of
from tiderl.scheduling.actions import Action, AssignMicroBatch, ScoreMicroBatch
from tiderl.scheduling.events import MicroBatchTrained
from tiderl.scheduling.lifecycle import Group, GroupState, Task, TaskState
from tiderl.scheduling.ra2p import Choice
from tiderl.scheduling.ra2p_costs import Arrival, PassCosts, Ranks, pipeline_s
from tiderl.scheduling.readiness import Signals
from tiderl.scheduling.step import OpenedStep
from tiderl.types import (
    Finish,
    GroupId,
    MicroBatch,
    MicroBatchId,
    Pipelining,
    Rank,
    TaskId,
    TaskKind,
    Trajectory,
    WeightVersion,
)
from tiderl.worker.actor_step import ActorStep, AwaitLogProbs, Backward, Forward, Idle, Score


class Ticket:
    """A micro-batch in flight."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


class Job:
    """One step: the real deciders, and costs instead of devices."""

    def __init__(self, way: Pipelining, arrivals: Sequence[Arrival], costs: PassCosts, ranks: Ranks) -> None:
        self.costs = costs
        self.lengths: list[int] = []
        self.num_events = count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now_s = self.last_trained_s = 0.0
        self.actors = [
            ActorStep(0, way, window_tokens=ranks.window_tokens, max_scored_tokens=ranks.max_wake_tokens)
            for _ in range(ranks.num_actors)
        ]
        self.is_busy = [False] * ranks.num_actors
        self.to_score: list[deque[ScoreMicroBatch]] = [deque() for _ in range(ranks.num_ref)]
        actor_ranks = tuple(Rank(r) for r in range(ranks.num_actors))
        num_ref = ranks.num_ref if way is Pipelining.DECOUPLED else 0
        self.step = OpenedStep(
            small_config(groups_per_step=len(arrivals), max_micro_batch_tokens=ranks.max_micro_batch_tokens),
            0,
            actor_ranks,
            tuple(Rank(ranks.num_actors + i) for i in range(num_ref)),
            Choice(way, {}, ""),
            Signals(0, None, 0.0),
            0.0,
            0.0,
        )
        for arrival in arrivals:
            self.at(arrival.ready_s, partial(self.feed, self.group(arrival.lengths)))

    def run(self) -> float:
        while self.events:
            self.now_s, _, happen = heapq.heappop(self.events)
            happen()
        assert self.step.is_closed and not self.step.num_outstanding
        return self.last_trained_s

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.num_events), happen))

    def group(self, lengths: Sequence[int]) -> Group:
        group = Group(spec_of(0), len(lengths), 0, WeightVersion(0), state=GroupState.READY)
        for length in lengths:
            task_id = TaskId(len(self.lengths))
            self.lengths.append(length)
            group.tasks.append(Task(task_id, group, TaskState.FINISHED, context_tokens=length))
        return group

    def feed(self, group: Group) -> None:
        self.perform(self.step.feed([group], self.now_s))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, AssignMicroBatch):
                trajectories = tuple(trajectory(self.lengths[task_id]) for task_id in action.task_ids)
                batch = MicroBatch(action.micro_batch_id, 0, trajectories, action.advantages)
                self.actors[action.rank].add(batch)
            elif isinstance(action, ScoreMicroBatch):
                ref = action.rank - len(self.actors)
                self.to_score[ref].append(action)
                if len(self.to_score[ref]) == 1:
                    self.score(ref)
        for actor in range(len(self.actors)):
            self.go_on(actor)

    def score(self, ref: int) -> None:
        num_tokens = sum(self.lengths[task_id] for task_id in self.to_score[ref][0].task_ids)
        self.at(self.now_s + num_tokens * self.costs.decoupled_reference_s, lambda: self.scored(ref))

    def scored(self, ref: int) -> None:
        action = self.to_score[ref].popleft()
        arrays = [np.zeros(self.lengths[task_id], np.float32) for task_id in action.task_ids]
        self.actors[action.actor].deliver(action.micro_batch_id, arrays)
        if self.to_score[ref]:
            self.score(ref)
        self.go_on(action.actor)

    def go_on(self, actor: int) -> None:
        if self.is_busy[actor]:
            return
        step, costs = self.actors[actor], self.costs
        todo = step.next()
        if isinstance(todo, Idle | AwaitLogProbs):
            return
        if isinstance(todo, Score):
            num_tokens = sum(batch.num_tokens for batch in todo.micro_batches)
            log_probs = {
                batch.micro_batch_id: [np.zeros(t.num_tokens, np.float32) for t in batch.trajectories]
                for batch in todo.micro_batches
            }
            seconds = costs.swap_s + num_tokens * costs.colocated_reference_s
            self.busy(actor, seconds, lambda: step.scored(log_probs))
        elif isinstance(todo, Forward):
            ticket = Ticket(todo.micro_batch.num_tokens)
            self.busy(actor, ticket.num_tokens * costs.forward_s, lambda: step.forwarded(ticket))
        else:
            assert isinstance(todo, Backward)
            batch = todo.micro_batch
            self.busy(actor, batch.num_tokens * costs.backward_s, lambda: self.trained(actor, batch))

    def busy(self, actor: int, seconds: float, done: Callable[[], None]) -> None:
        self.is_busy[actor] = True

        def end() -> None:
            self.is_busy[actor] = False
            done()
            self.go_on(actor)

        self.at(self.now_s + seconds, end)

    def trained(self, actor: int, batch: MicroBatch) -> None:
        self.actors[actor].trained()
        self.last_trained_s = self.now_s
        number = MicroBatchId(batch.micro_batch_id)
        event = MicroBatchTrained(Rank(actor), 0, number, batch.num_tokens, 0.0, 0.0, 0.0, 0.0, 0.0)
        self.perform(self.step.trained(event, self.now_s))


def trajectory(num_tokens: int) -> Trajectory:
    return Trajectory(
        task_id=TaskId(0),
        group_id=GroupId(0),
        kind=TaskKind.TRAIN,
        token_ids=np.zeros(num_tokens, np.int32),
        generated=np.ones(num_tokens, np.bool_),
        log_probs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        turns=(),
        images=(),
        reward=0.0,
        success=False,
        finish=Finish.DONE,
    )


GROUPS = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.integers(1, 6), min_size=1, max_size=6)), min_size=1, max_size=6
)
PASS_COSTS = st.builds(
    PassCosts, st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.integers(0, 20)
)
SOME_RANKS = st.builds(
    Ranks, st.integers(1, 4), st.integers(1, 3), st.integers(6, 12), st.integers(1, 40), st.integers(1, 40)
)


@settings(max_examples=200)
@given(st.sampled_from(Pipelining), GROUPS, PASS_COSTS, SOME_RANKS)
def test_the_timeline_is_what_the_job_would_do(
    way: Pipelining, groups: list[tuple[int, list[int]]], costs: PassCosts, ranks: Ranks
) -> None:
    # Exact in binary, and no sum of whole numbers leads from one arrival to another.
    arrivals = [Arrival(ready_s + i / 16, tuple(lengths)) for i, (ready_s, lengths) in enumerate(groups)]
    assert Job(way, arrivals, costs, ranks).run() == pipeline_s(way, arrivals, costs, ranks)
