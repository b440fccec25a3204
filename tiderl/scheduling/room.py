"""Ranks in the order of their headroom, at the price of a logarithm.

Headroom shrinks with every token and seldom grows. So only growth is told (`raised`); a rank whose headroom has shrunk since is
found out when it comes to the top, and put back where it belongs.

Invariants (tests/scheduling/test_room.py):

1. `top` is the rank with the most headroom of those that are in, ties by rank.
2. The heap never holds more than a few entries a rank.

Source: paper §4.1.
"""

from __future__ import annotations

from collections.abc import Callable

from tiderl.scheduling.lazy_heap import LazyHeap
from tiderl.types import Rank


class RoomOrder:
    """`headroom` gives a rank's present headroom in tokens."""

    def __init__(self, headroom: Callable[[Rank], int]) -> None:
        self._headroom = headroom
        #: Negative headroom under which a rank stands in the heap; other entries of it are outdated.
        self._stands: dict[Rank, int] = {}
        self._heap: LazyHeap[tuple[int, Rank]] = LazyHeap(lambda entry: self._stands.get(entry[1]) == entry[0])

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._stands

    def raised(self, rank: Rank) -> None:
        """The rank comes in, or its headroom may have grown."""
        key = -self._headroom(rank)
        if rank in self._stands and self._stands[rank] <= key:
            return
        self._stands[rank] = key
        self._heap.push((key, rank))

    def remove(self, rank: Rank) -> None:
        """The rank goes out; harmless if it is not in."""
        self._stands.pop(rank, None)

    def top(self) -> Rank | None:
        """The roomiest rank, or None if none is in."""
        while (entry := self._heap.top()) is not None:
            key, rank = entry
            now = -self._headroom(rank)
            if now == key:
                return rank
            self._stands[rank] = now
            self._heap.push((now, rank))
        return None
