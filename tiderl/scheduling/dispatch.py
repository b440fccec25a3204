"""How trajectories are spread over the actor ranks, and cut into micro-batches.

Trajectories are dealt longest first: in a zig-zag over the ranks (0 1 2 2 1 0 0 1 …) while all have been given as much in this
step, and to the rank with the fewest tokens otherwise. Each rank's hand is then cut into micro-batches that fit its memory.

Colocated, they come rank by rank: what lies together in an actor's inbox is scored with one swap. Decoupled (`smallest_last`),
they come round by round, so that no actor's first waits behind another's second at a Ref rank, and what is left to do after the
last score is as little as can be: for that the smallest trajectory may get a micro-batch of its own.

The paper gives the ranks of an FSDP group sequences of similar length, because they meet in every layer. Here they meet once a
step (`trainers/base.py`): a rank that is through with a micro-batch waits for nobody, and there is nothing to save.

Invariants (tests/scheduling/test_dispatch.py):

1. Every trajectory is assigned exactly once, and no micro-batch exceeds `max_tokens`.
2. A rank that is given something ends at most the longest of the new trajectories above every other rank, what it had before
   included. So do all ranks, where they began with equal loads.
3. A rank's micro-batches come the largest first: its last one is its smallest. In each, the smallest trajectory is the last.
4. With `smallest_last`, the last micro-batch is the smallest of all, and in it the smallest trajectory of all the last. Those
   before it come round by round: every rank's first, then every second, …

Source: paper §5.1, "Micro-batch dispatch"; Appendix B.3.
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


def saturates(num_tokens: int, num_ranks: int, max_tokens: int) -> bool:
    """Is there enough to give every rank a full micro-batch?"""
    return num_tokens >= num_ranks * max_tokens


def spread(
    lengths: Sequence[tuple[int, TaskId]], loads: Sequence[int], max_tokens: int, *, smallest_last: bool = False
) -> list[Share]:
    """Micro-batches of at most `max_tokens`, in the order in which they should be sent.

    `lengths` are pairs (tokens, task), in any order; `loads` the tokens that each rank was given in this step already."""
    hands = zig_zag(lengths, len(loads)) if len(set(loads)) == 1 else _level(lengths, loads)
    if smallest_last and lengths:
        return _by_round(hands, max_tokens)
    return [share for dp_index, hand in enumerate(hands) for share in _cut(dp_index, hand, max_tokens)]


def zig_zag(lengths: Sequence[tuple[int, TaskId]], num_ranks: int) -> list[list[tuple[int, TaskId]]]:
    """Deal `(tokens, task)` pairs to `num_ranks` ranks, longest first, turning round at either end."""
    dealt: list[list[tuple[int, TaskId]]] = [[] for _ in range(num_ranks)]
    for i, item in enumerate(_longest_first(lengths)):
        lap, place = divmod(i, num_ranks)
        dealt[place if lap % 2 == 0 else num_ranks - 1 - place].append(item)
    return dealt


def _level(lengths: Sequence[tuple[int, TaskId]], loads: Sequence[int]) -> list[list[tuple[int, TaskId]]]:
    """Deal longest first, each to the rank that has the fewest tokens then."""
    dealt: list[list[tuple[int, TaskId]]] = [[] for _ in loads]
    sums = list(loads)
    for item in _longest_first(lengths):
        place = min(range(len(sums)), key=lambda i: (sums[i], i))
        dealt[place].append(item)
        sums[place] += item[0]
    return dealt


def _longest_first(lengths: Sequence[tuple[int, TaskId]]) -> list[tuple[int, TaskId]]:
    return sorted(lengths, key=lambda pair: (-pair[0], pair[1]))


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


def _cut(dp_index: int, hand: Sequence[tuple[int, TaskId]], max_tokens: int) -> list[Share]:
    """One rank's micro-batches, the largest first."""
    shares = [Share(dp_index, tuple(t for _, t in b), sum(n for n, _ in b)) for b in cut_to_memory(hand, max_tokens)]
    return sorted(shares, key=lambda share: (-share.num_tokens, share.task_ids))


def _by_round(hands: Sequence[Sequence[tuple[int, TaskId]]], max_tokens: int) -> list[Share]:
    """All micro-batches but the last one by rounds, the larger ones of a round first. Some hand must hold something."""
    smallest, holder = min((hand[-1], i) for i, hand in enumerate(hands) if hand)
    cut = [_cut(i, hand[:-1] if i == holder else hand, max_tokens) for i, hand in enumerate(hands)]
    last = _last(cut, holder, smallest, max_tokens)
    rounds = [(place, -share.num_tokens, share.dp_index, share) for shares in cut for place, share in enumerate(shares)]
    return [share for *_, share in sorted(rounds, key=lambda entry: entry[:3])] + [last]


def _last(cut: list[list[Share]], holder: int, smallest: tuple[int, TaskId], max_tokens: int) -> Share:
    """The micro-batch that ends with the smallest trajectory: its holder's last, taken out of `cut`, if that stays the smallest of
    all with it; else one of its own."""
    length, task_id = smallest
    own = cut[holder].pop() if cut[holder] else Share(holder, (), 0)
    least = min((share.num_tokens for shares in cut for share in shares), default=max_tokens)
    if own.num_tokens + length <= least:
        return Share(holder, (*own.task_ids, task_id), own.num_tokens + length)
    cut[holder].append(own)
    return Share(holder, (task_id,), length)
