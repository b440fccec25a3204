"""How the trajectories of a training step are spread over the actor ranks, and cut into micro-batches.

Colocated dispatch: longest first, in a zig-zag over the ranks (0 1 2 2 1 0 0 1 …), so that the ranks' token sums are nearly equal.
Each rank's share is then cut into micro-batches that fit its memory, the fullest first.

Invariants (tests/scheduling/test_dispatch.py):

1. Every trajectory is assigned exactly once, and no micro-batch exceeds `max_tokens`.
2. The token sums of any two ranks differ by at most the longest trajectory.
3. The last micro-batch of a rank is its smallest.

Source: paper §5.1, "Micro-batch dispatch".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiderl.types import TaskId


@dataclass(frozen=True, slots=True)
class Share:
    """One micro-batch of one data-parallel rank (an index, not a global rank)."""

    dp_index: int
    task_ids: tuple[TaskId, ...]
    num_tokens: int


def zig_zag(lengths: Sequence[tuple[int, TaskId]], num_ranks: int) -> list[list[tuple[int, TaskId]]]:
    """Deal `(tokens, task)` pairs to `num_ranks` ranks, longest first, turning round at either end."""
    dealt: list[list[tuple[int, TaskId]]] = [[] for _ in range(num_ranks)]
    for i, item in enumerate(sorted(lengths, key=lambda pair: (-pair[0], pair[1]))):
        lap, place = divmod(i, num_ranks)
        dealt[place if lap % 2 == 0 else num_ranks - 1 - place].append(item)
    return dealt


def cut_to_memory(items: Sequence[tuple[int, TaskId]], max_tokens: int) -> list[list[tuple[int, TaskId]]]:
    """First-fit: put each item into the first micro-batch with room. Items come longest first; each must fit alone."""
    bins: list[list[tuple[int, TaskId]]] = []
    room: list[int] = []
    for item in items:
        assert item[0] <= max_tokens, (item, max_tokens)
        for i, free in enumerate(room):
            if item[0] <= free:
                bins[i].append(item)
                room[i] -= item[0]
                break
        else:
            bins.append([item])
            room.append(max_tokens - item[0])
    return bins


def colocated(lengths: Sequence[tuple[int, TaskId]], num_ranks: int, max_tokens: int) -> list[Share]:
    """All micro-batches of a step whose trajectories are all there, in the order in which they should be sent."""
    shares: list[Share] = []
    for dp_index, items in enumerate(zig_zag(lengths, num_ranks)):
        cut = [Share(dp_index, tuple(t for _, t in b), sum(n for n, _ in b)) for b in cut_to_memory(items, max_tokens)]
        shares += sorted(cut, key=lambda share: (-share.num_tokens, share.task_ids))
    return shares
