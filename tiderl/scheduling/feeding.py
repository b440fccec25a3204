"""Which ready groups a training step takes, and when it begins: the way from the buffer to the trainer.

A streaming step begins with whatever is ready and takes more while it is open; in mode "async" it begins with all of its groups.
Either way it takes the oldest first, and none that would make another one too late (`staleness.py`).

Invariants (tests/scheduling/test_core_machine.py, test_core_scenarios.py):

1. A step takes exactly `train.groups_per_step` groups.
2. With `on_late = "wait"` no group is ever too late; with "drop" those that are too late are dropped, and counted.

Source: paper §5.1 (streaming), §4.1 (staleness).
"""

from __future__ import annotations

from tiderl.config.schema import Config
from tiderl.scheduling.actions import Action, Note
from tiderl.scheduling.groups import GroupBook
from tiderl.scheduling.lifecycle import Group
from tiderl.scheduling.ra2p import Ra2p, StepForecast
from tiderl.scheduling.training import TrainingSide
from tiderl.types import Pipelining, Rank


class StepFeeder:
    """Between the group book and the training half; owns nothing."""

    def __init__(self, config: Config, book: GroupBook, training: TrainingSide, ra2p: Ra2p) -> None:
        self._config = config
        self._book = book
        self._training = training
        self._ra2p = ra2p
        self._batch = config.train.groups_per_step

    def begin(self, ref_ranks: tuple[Rank, ...], now_s: float) -> list[Action]:
        """The trainer is free: open the next step, if it may begin with what is ready. `ref_ranks` could score for it."""
        actions = self._book.take_late()
        if not self._may_take(self._batch if self._config.schedule.mode == "async" else 1, self._batch):
            return actions
        signals = self._book.ready.signals(now_s)
        choice = self._ra2p.choose(self._forecast(len(ref_ranks)))
        scoring = ref_ranks if choice.pipelining is Pipelining.DECOUPLED else ()
        step = self._training.next_step
        actions += self._training.open_step(choice, signals, scoring, now_s)
        if choice.pipelining is not Pipelining.NONE:
            actions.append(Note("info", f"step {step}: {choice.reason}"))
        return actions + self._feed(now_s)

    def go_on(self, now_s: float) -> list[Action]:
        """A step is open: give it the groups that it may take by now."""
        return self._book.take_late() + self._feed(now_s)

    def _feed(self, now_s: float) -> list[Action]:
        step = self._training.step
        assert step is not None
        room = step.room
        taken: list[Group] = []
        while self._may_take(1, room - len(taken)):
            taken.append(self._book.groups[self._book.ready.take()])
        return self._training.feed(taken, now_s) if taken else []

    def _may_take(self, num_groups: int, room: int) -> bool:
        """Whether a step with `room` places left takes so many of the ready groups."""
        if self._config.schedule.on_late == "wait":
            return self._book.may_take(num_groups, room)
        return num_groups <= min(room, len(self._book.ready))

    def _forecast(self, num_ref: int) -> StepForecast:
        """The step that could begin now: what is ready, and what is to come if it goes on as before."""
        ready = [self._book.groups[group_id] for group_id in self._book.ready.oldest(self._batch)]
        tokens = tuple(sum(task.context_tokens for task in group.finished) for group in ready)
        return StepForecast(
            ready_tokens=tokens,
            coming_tokens=(sum(tokens) // len(tokens),) * (self._batch - len(tokens)),
            gap_s=self._book.ready.expected_gap_s,
            num_actors=len(self._training.actors),
            num_ref=num_ref,
        )
