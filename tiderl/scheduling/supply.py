"""Which groups come next: what was ordered of the task stream, what has arrived, and what must be played again.

Invariants (tests/scheduling/test_core_machine.py, tests/scheduling/test_core_scenarios.py):

1. What is on its way is never ordered twice, and no more is taken than was ordered.
2. Groups that an earlier run left open come before the stream goes on; `num_supplied` counts the stream's groups that were taken.

Source: paper §2.1 (the task stream), §4.1 (dispatch is throttled by the staleness bound).
"""

from __future__ import annotations

from collections.abc import Container

from tiderl.errors import IllegalEvent
from tiderl.scheduling.actions import SupplyGroups
from tiderl.scheduling.events import GroupsSupplied
from tiderl.types import GroupId, GroupSpec, TaskKind


class GroupSupply:
    """Orders to the task stream and their answers."""

    def __init__(self) -> None:
        #: Groups that the run was interrupted in; they are played again before the stream goes on.
        self.to_restart: list[GroupSpec] = []
        self.num_supplied = 0
        self._ordered: dict[TaskKind, int] = dict.fromkeys(TaskKind, 0)

    def order_round(self, count: int) -> SupplyGroups:
        """All groups of an evaluation."""
        self._ordered[TaskKind.EVAL] = count
        return SupplyGroups(TaskKind.EVAL, count)

    def fill(self, quota: int) -> tuple[list[GroupSpec], list[SupplyGroups]]:
        """Training groups up to `quota`: those to start again at once, and an order for the rest."""
        wanted = quota - self._ordered[TaskKind.TRAIN]
        if wanted <= 0:
            return [], []
        again, self.to_restart = self.to_restart[:wanted], self.to_restart[wanted:]
        wanted -= len(again)
        if wanted == 0:
            return again, []
        self._ordered[TaskKind.TRAIN] += wanted
        return again, [SupplyGroups(TaskKind.TRAIN, wanted)]

    def arrived(self, event: GroupsSupplied, known: Container[GroupId], *, is_wanted: bool) -> tuple[GroupSpec, ...]:
        """The groups to play, none if they come too late. Raises `IllegalEvent` for an answer that fits no order."""
        ordered = self._ordered[event.kind]
        if len(event.groups) > ordered:
            raise IllegalEvent(f"{len(event.groups)} {event.kind.value} groups were supplied, {ordered} were asked for")
        if event.kind is TaskKind.EVAL and len(event.groups) < ordered:
            raise IllegalEvent(f"an evaluation of {ordered} tasks got only {len(event.groups)}")
        is_repeated = len({spec.group_id for spec in event.groups}) < len(event.groups)
        for spec in event.groups:
            if is_repeated or spec.group_id in known or spec.kind is not event.kind:
                raise IllegalEvent(f"group {spec.group_id} was supplied twice, or is of the wrong kind")
        # Several orders may be on their way at once, each with an answer of its own.
        self._ordered[event.kind] -= len(event.groups)
        if not is_wanted:
            # The run or the round has ended meanwhile. They are not counted, so that a resumed run draws them again.
            return ()
        if event.kind is TaskKind.TRAIN:
            self.num_supplied += len(event.groups)
        return event.groups
