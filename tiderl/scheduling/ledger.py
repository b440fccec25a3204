"""The one owner of "where did every generated token go".

Invariants (tests/scheduling/test_ledger.py):

1. `generated = trained + evaluated + stale + failed + dropped + held`, after every call.
2. No account is ever negative; only `held` shrinks.
3. Every token of a prompt is found in a cache, or computed: for the first time, or again. `repeated` is what CTB exists to avoid.

A token is *held* from its generation until its trajectory's fate is known: in flight, paused, buffered, or inside an open
training step.

Source: paper §2.1 (goodput counts only tokens that advance an update).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Account(enum.Enum):
    """Where a token can end."""

    TRAINED = "trained"
    EVALUATED = "evaluated"
    STALE = "stale"
    FAILED = "failed"
    #: Of spare trajectories whose group was complete without them.
    DROPPED = "dropped"


class TokenLedger:
    """Double-entry counts of generated tokens."""

    def __init__(self) -> None:
        self.generated = 0
        self.held = 0
        self.settled: dict[Account, int] = dict.fromkeys(Account, 0)
        self.prefill_first = 0
        self.prefill_repeated = 0
        self.prefill_cached = 0

    def generate(self, num_tokens: int) -> None:
        """`num_tokens` came out of an engine; their fate is open."""
        assert num_tokens >= 0, num_tokens
        self.generated += num_tokens
        self.held += num_tokens

    def settle(self, num_tokens: int, account: Account) -> None:
        """The fate of `num_tokens` held tokens is known."""
        assert 0 <= num_tokens <= self.held, (num_tokens, self.held, account)
        self.held -= num_tokens
        self.settled[account] += num_tokens

    def prefill(self, prompt_tokens: int, prefilled_tokens: int, *, num_new: int) -> None:
        """Of a prompt `prefilled_tokens` were computed; `num_new` of its tokens had never been computed before."""
        first = min(prefilled_tokens, num_new)
        self.prefill_first += first
        self.prefill_repeated += prefilled_tokens - first
        self.prefill_cached += max(0, prompt_tokens - prefilled_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were found in a cache; 0.0 before the first."""
        total = self.prefill_first + self.prefill_repeated + self.prefill_cached
        return self.prefill_cached / total if total else 0.0

    def balances(self) -> dict[str, int]:
        """All accounts of generated tokens by name, `generated` and `held` included."""
        return {"generated": self.generated, **{a.value: n for a, n in self.settled.items()}, "held": self.held}

    def restore(self, balances: Mapping[str, int]) -> None:
        """Take over saved balances. What was held then is lost with the process that held it: it counts as failed."""
        self.generated = balances["generated"]
        self.settled = {a: balances[a.value] for a in Account}
        self.settled[Account.FAILED] += balances["held"]
        self.held = 0
