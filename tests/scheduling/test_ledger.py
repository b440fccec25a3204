"""The token ledger: the three invariants of `scheduling.ledger` after every call, and what a resumed job takes over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiderl.scheduling.ledger import Account, TokenLedger


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = TokenLedger()
        self.model = dict.fromkeys(["generated", "held", *(a.value for a in Account)], 0)

    @rule(num_tokens=st.integers(0, 1000))
    def generate(self, num_tokens: int) -> None:
        self.ledger.generate(num_tokens)
        self.model["generated"] += num_tokens
        self.model["held"] += num_tokens

    @precondition(lambda self: self.model["held"] > 0)
    @rule(data=st.data(), account=st.sampled_from(Account))
    def settle(self, data: st.DataObject, account: Account) -> None:
        num_tokens = data.draw(st.integers(0, self.model["held"]))
        self.ledger.settle(num_tokens, account)
        self.model["held"] -= num_tokens
        self.model[account.value] += num_tokens

    @rule(excess=st.integers(1, 10), account=st.sampled_from(Account))
    def what_is_not_held_cannot_be_settled(self, excess: int, account: Account) -> None:
        with pytest.raises(AssertionError):
            self.ledger.settle(self.model["held"] + excess, account)

    @rule(account=st.sampled_from(Account))
    def nothing_runs_backwards(self, account: Account) -> None:
        """Invariant 2."""
        with pytest.raises(AssertionError):
            self.ledger.generate(-1)
        with pytest.raises(AssertionError):
            self.ledger.settle(-1, account)

    @rule(prompt=st.integers(0, 100), prefilled=st.integers(0, 100))
    def prefill(self, prompt: int, prefilled: int) -> None:
        """Prompts have accounts of their own."""
        self.ledger.prefill(prompt, prefilled, num_new=0)

    @rule()
    def save_and_restore(self) -> None:
        """What was held dies with the process: it counts as failed, so nothing is lost from the books."""
        restored = TokenLedger()
        restored.restore(self.ledger.balances())
        self.ledger = restored
        self.model["failed"] += self.model["held"]
        self.model["held"] = 0

    @invariant()
    def the_books_close(self) -> None:
        """Invariant 1, and agreement with the model."""
        balances = self.ledger.balances()
        assert balances == self.model
        assert balances["generated"] == sum(n for name, n in balances.items() if name != "generated")
        assert min(balances.values()) >= 0


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=30)


def test_by_hand() -> None:
    ledger = TokenLedger()
    ledger.generate(100)
    ledger.settle(40, Account.TRAINED)
    ledger.settle(20, Account.STALE)
    ledger.settle(5, Account.FAILED)
    ledger.settle(10, Account.EVALUATED)
    ledger.settle(3, Account.DROPPED)
    assert ledger.balances() == {
        "generated": 100,
        "trained": 40,
        "evaluated": 10,
        "stale": 20,
        "failed": 5,
        "dropped": 3,
        "held": 22,
    }


def test_invariant_3_by_hand() -> None:
    """A task of two turns that is preempted before the second, beside a sibling that shares its prompt."""
    ledger = TokenLedger()
    assert ledger.hit_rate == 0.0
    ledger.prefill(100, 100, num_new=100)  # the first turn: all of it is new
    ledger.prefill(100, 4, num_new=0)  # the sibling finds it, but for an open block
    assert (ledger.prefill_first, ledger.prefill_repeated, ledger.prefill_cached) == (100, 4, 96)
    ledger.prefill(150, 150, num_new=30)  # the second turn: its context had been thrown out, 120 tokens come again
    assert (ledger.prefill_first, ledger.prefill_repeated, ledger.prefill_cached) == (130, 124, 96)
    assert ledger.hit_rate == pytest.approx(96 / 350)


@given(
    calls=st.lists(
        st.integers(0, 500).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))), max_size=20
    )
)
def test_invariant_3_every_prompt_token_is_counted_once(calls: list[tuple[int, int, int]]) -> None:
    ledger = TokenLedger()
    for prompt, prefilled, num_new in calls:
        ledger.prefill(prompt, prefilled, num_new=num_new)
    parts = (ledger.prefill_first, ledger.prefill_repeated, ledger.prefill_cached)
    assert min(parts) >= 0
    assert sum(parts) == sum(prompt for prompt, _, _ in calls)
    assert ledger.prefill_cached == sum(prompt - prefilled for prompt, prefilled, _ in calls)
    assert ledger.prefill_first <= sum(num_new for _, _, num_new in calls), (
        "only what is new is computed for the first time"
    )
    assert 0.0 <= ledger.hit_rate <= 1.0


def test_what_is_computed_more_than_once_within_a_turn_is_repeated() -> None:
    """An engine that preempts a request computes its prompt twice: more is prefilled than the prompt is long."""
    ledger = TokenLedger()
    ledger.prefill(100, 180, num_new=100)
    assert (ledger.prefill_first, ledger.prefill_repeated, ledger.prefill_cached) == (100, 80, 0)
