"""A heap whose entries go out of date where they stand, and are dropped when they come to the top.

Invariants (tests/scheduling/test_lazy_heap.py):

1. `top` is the smallest valid entry.
2. The heap never holds more than twice as many entries as were valid when it was last cleaned, and a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

EntryT = TypeVar("EntryT", bound=tuple[Any, ...])

_FEW = 64


class LazyHeap(Generic[EntryT]):
    """Entries are tuples that compare without a tie; `is_valid` says whether one still holds."""

    def __init__(self, is_valid: Callable[[EntryT], bool]) -> None:
        self._is_valid = is_valid
        self._heap: list[EntryT] = []
        self._limit = _FEW

    def __len__(self) -> int:
        """Outdated entries are counted too."""
        return len(self._heap)

    def push(self, entry: EntryT) -> None:
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _FEW

    def top(self) -> EntryT | None:
        """The smallest valid entry, None if there is none."""
        while self._heap:
            if self._is_valid(self._heap[0]):
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> EntryT | None:
        """Take the smallest valid entry out."""
        return heapq.heappop(self._heap) if self.top() is not None else None
