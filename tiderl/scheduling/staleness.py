"""The one owner of the staleness bound, counted in weight versions.

A group's *start version* is the oldest weight version among its tokens. It is trained at version v with staleness
`v - start_version`, which never exceeds `max_staleness`.

Invariants (tests/scheduling/test_staleness.py):

1. At most `(max_staleness + 1) * groups_per_step` groups are outstanding: admitted, and neither trained nor given back.
   A group counts as outstanding until the weights that it helped to make have reached the rollout ranks.
2. If every step trains `groups_per_step` groups, and takes a group only when that `leaves_time` for all others, none is ever late.
3. No more groups are admitted than the remaining steps can consume.

Why 2 follows from 1: when a group starts at version v, at most (s + 1) * B groups are outstanding, so the s + 1 steps at versions
v .. v + s can train all of them, the group included, if none of these steps is filled with newer groups while too many older ones
are still being played. With s > 1 it is not enough to look at the groups whose last step is the present one. A step that is open
may take newer groups first, as long as the places that it has left, and the steps after it, suffice for the older ones.

Source: paper §4.1, constraint 2. Counting versions instead of groups: paper.md §8, 4.
"""

from __future__ import annotations

from collections.abc import Mapping

from tiderl.types import WeightVersion


class StalenessGate:
    """Counts outstanding groups and compares versions."""

    def __init__(self, max_staleness: int, groups_per_step: int, total_steps: int, version: WeightVersion) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self._total_steps = total_steps
        #: The version on the rollout ranks: that of the last finished weight sync.
        self.version = version
        self.outstanding = 0

    @property
    def quota(self) -> int:
        """How many groups may be admitted now."""
        steps_ahead = min(self._max_staleness + 1, self._total_steps - self.version)
        return max(0, steps_ahead * self._groups_per_step - self.outstanding)

    def admit(self, num_groups: int) -> None:
        assert num_groups <= self.quota, (num_groups, self.quota)
        self.outstanding += num_groups

    def retire(self, num_groups: int) -> None:
        """Groups were trained and synced, or dropped: others may take their place."""
        assert 0 <= num_groups <= self.outstanding, (num_groups, self.outstanding)
        self.outstanding -= num_groups

    def advance(self, version: WeightVersion) -> None:
        assert version >= self.version, (version, self.version)
        self.version = version

    def leaves_time(self, others: Mapping[WeightVersion, int], room: int) -> bool:
        """Can the present step, which has `room` more places, and the steps after it train all `others` in time?

        `others` counts groups by start version, those that are played and those that are ready. The last chance of a group is the
        step at its start version + max_staleness.
        """
        num_until = 0
        for version in sorted(others):
            num_until += others[version]
            if num_until > room + max(0, version + self._max_staleness - self.version) * self._groups_per_step:
                return False
        return True

    def is_late(self, start_version: WeightVersion) -> bool:
        """Is it too late to train the group?"""
        return self.version - start_version > self._max_staleness
