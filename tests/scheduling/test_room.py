"""`RoomOrder` against a model that looks at every rank, and the bound on its heap."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiderl.scheduling.room import RoomOrder
from tiderl.types import Rank

RANKS = st.integers(0, 5)


class RoomMachine(RuleBasedStateMachine):
    """Headroom shrinks untold, and grows only with a word; ranks come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.headroom = dict.fromkeys(range(6), 0)
        self.inside: set[int] = set()
        self.order = RoomOrder(lambda rank: self.headroom[rank])

    @rule(rank=RANKS, tokens=st.integers(0, 8))
    def comes_in_or_grows(self, rank: int, tokens: int) -> None:
        self.headroom[rank] += tokens
        self.order.raised(Rank(rank))
        self.inside.add(rank)

    @rule(rank=RANKS, tokens=st.integers(1, 8))
    def shrinks(self, rank: int, tokens: int) -> None:
        self.headroom[rank] -= tokens

    @rule(rank=RANKS, down=st.integers(1, 8), up=st.integers(0, 8))
    def shrinks_and_grows_again(self, rank: int, down: int, up: int) -> None:
        """What was found out on the way must not count any more."""
        self.headroom[rank] -= down
        self.top_is_the_roomiest()
        if rank in self.inside:
            self.comes_in_or_grows(rank, up)

    @rule(rank=RANKS)
    def goes_out(self, rank: int) -> None:
        self.order.remove(Rank(rank))
        self.inside.discard(rank)

    @rule(rank=RANKS, tokens=st.integers(-8, 8))
    def changes_outside(self, rank: int, tokens: int) -> None:
        """A rank that is out needs to tell nothing before it comes in again."""
        if rank not in self.inside:
            self.headroom[rank] += tokens

    @precondition(lambda self: self.inside)
    @rule()
    def top_goes_out(self) -> None:
        """As Algorithm 1 asks one rank after the other."""
        asked = []
        while (rank := self.order.top()) is not None:
            asked.append(rank)
            self.order.remove(rank)
        assert asked == sorted(self.inside, key=lambda r: (-self.headroom[r], r))
        self.inside.clear()

    @rule()
    def top_is_the_roomiest(self) -> None:
        """Invariant 1."""
        expected = min(self.inside, key=lambda r: (-self.headroom[r], r), default=None)
        assert self.order.top() == expected

    @invariant()
    def the_same_ranks_are_in(self) -> None:
        assert {rank for rank in self.headroom if Rank(rank) in self.order} == self.inside


TestRoomOrder = RoomMachine.TestCase
TestRoomOrder.settings = settings(max_examples=50)


def test_by_hand() -> None:
    headroom = {0: 5, 1: 7, 2: 7}
    order = RoomOrder(lambda rank: headroom[rank])
    assert order.top() is None
    order.remove(Rank(0))  # harmless
    for rank in headroom:
        order.raised(Rank(rank))
    assert order.top() == 1
    headroom[1] = 6  # not told: found out
    assert order.top() == 2
    headroom[2] = 4
    assert order.top() == 1
    order.remove(Rank(1))
    assert order.top() == 0


def test_invariant_2_the_heap_is_bounded_by_the_ranks() -> None:
    num_ranks = 10
    headroom = dict.fromkeys(range(num_ranks), 0)
    order = RoomOrder(lambda rank: headroom[rank])
    largest = 0
    for number in range(5000):
        rank = Rank(number * 7 % num_ranks)
        headroom[rank] += 1
        order.raised(rank)
        if number % 13 == 0:
            order.remove(rank)
            order.raised(rank)
        if number % 29 == 0:
            headroom[rank] -= 20
            order.top()
        # A look inside: how much is kept is what the invariant is about, and nothing outside shows it.
        largest = max(largest, len(order._heap))
    assert largest <= 5 * num_ranks, "a few entries a rank"
