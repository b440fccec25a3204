"""The lazy heap against a sorted list of what is valid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiderl.scheduling.lazy_heap import LazyHeap

#: Push a number, let a number go out of date, take the first one out.
STEPS = st.lists(st.tuples(st.sampled_from(["push", "outdate", "pop"]), st.integers(0, 30)), max_size=200)


@given(STEPS)
def test_the_top_is_the_smallest_that_is_valid(steps: list[tuple[str, int]]) -> None:
    """Invariant 1."""
    valid: set[tuple[int]] = set()
    heap: LazyHeap[tuple[int]] = LazyHeap(lambda entry: entry in valid)
    for verb, number in steps:
        entry = (number,)
        if verb == "push" and entry not in valid:
            valid.add(entry)
            heap.push(entry)
        elif verb == "outdate":
            valid.discard(entry)
        elif verb == "pop":
            assert heap.pop() == min(valid, default=None)
            valid -= {min(valid)} if valid else set()
        assert heap.top() == min(valid, default=None)


def test_outdated_entries_do_not_pile_up() -> None:
    """Invariant 2: a hundred are valid at any time, at the far end, where no look at the top would find the others."""
    newest: dict[int, int] = {}
    heap: LazyHeap[tuple[int, int]] = LazyHeap(lambda entry: newest[entry[1]] == entry[0])
    for number in range(20_000):
        newest[number % 100] = -number
        heap.push((-number, number % 100))
        assert len(heap) <= 2 * 100 + 64 + 1
