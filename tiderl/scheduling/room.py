"""Ranks in the order of their headroom, at the price of a logarithm.

Headroom shrinks with every token and seldom grows. So only growth is told (`raised`); a rank whose headroom has shrunk since is
found out when it comes to the top, and put back where it belongs.

Invariants (tests/scheduling/test_room.py):

1. `top` is the rank with the most headroom of those that are in, ties by rank.
2. The heap never holds more than a few entries a rank.

Source: paper §4.1.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tiderl.types import Rank

_MAX_ENTRIES_PER_RANK = 4


class RoomOrder:
    """`headroom` gives a rank's present headroom in tokens."""

    def __init__(self, headroom: Callable[[Rank], int]) -> None:
        self._headroom = headroom
        self._heap: list[tuple[int, Rank]] = []
        #: Negative headroom under which a rank stands in the heap; other entries of it are outdated.
        self._stands: dict[Rank, int] = {}

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._stands

    def raised(self, rank: Rank) -> None:
        """The rank comes in, or its headroom may have grown."""
        key = -self._headroom(rank)
        if rank in self._stands and self._stands[rank] <= key:
            return
        self._stands[rank] = key
        heapq.heappush(self._heap, (key, rank))
        if len(self._heap) > _MAX_ENTRIES_PER_RANK * len(self._stands) + _MAX_ENTRIES_PER_RANK:
            self._heap = [(key, rank) for rank, key in self._stands.items()]
            heapq.heapify(self._heap)

    def remove(self, rank: Rank) -> None:
        """The rank goes out; harmless if it is not in."""
        self._stands.pop(rank, None)

    def top(self) -> Rank | None:
        """The roomiest rank, or None if none is in."""
        heap = self._heap
        while heap:
            key, rank = heap[0]
            if self._stands.get(rank) != key:
                heapq.heappop(heap)
                continue
            now = -self._headroom(rank)
            if now == key:
                return rank
            self._stands[rank] = now
            heapq.heapreplace(heap, (now, rank))
        return None
