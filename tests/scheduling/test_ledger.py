"""The token ledger: the two invariants of `scheduling.ledger` after every call, and what a resumed job takes over."""

from __future__ import annotations

import pytest
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


def test_by_hand() -> None:
    ledger = TokenLedger()
    ledger.generate(100)
    ledger.settle(40, Account.TRAINED)
    ledger.settle(25, Account.STALE)
    ledger.settle(5, Account.FAILED)
    ledger.settle(10, Account.EVALUATED)
    assert ledger.balances() == {"generated": 100, "trained": 40, "evaluated": 10, "stale": 25, "failed": 5, "held": 20}
