"""The one owner of "where did every generated token go", and of "what did every rank do with its seconds".

Invariants (tests/scheduling/test_ledger.py, test_rank_seconds.py):

1. `generated = trained + evaluated + stale + failed + dropped + held`, after every call.
2. No account is ever negative; only `held` shrinks.
3. Every token of a prompt is found in a cache, or computed: for the first time, or again. `repeated` is what CTB exists to avoid.
4. Every second of every rank is one of `Activity`. Ranks count on their own clocks; the scheduler's clock is the second witness,
   and `RankSeconds` tells by how much the two disagree.

A token is *held* from its generation until its trajectory's fate is known: in flight, paused, buffered, or inside an open
training step.

Source: paper §2.1 (goodput counts only tokens that advance an update; RWT and TWT are rank-seconds lost to waiting).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from tiderl.errors import IllegalEvent
from tiderl.types import Rank


class Account(enum.Enum):
    """Where a token can end."""

    TRAINED = "trained"
    EVALUATED = "evaluated"
    STALE = "stale"
    FAILED = "failed"
    #: Of spare trajectories whose group was complete without them.
    DROPPED = "dropped"


class Activity(enum.Enum):
    """What a rank can do with a second."""

    #: From the job's start until the rank has joined.
    STARTUP = "startup"
    PREFILL = "prefill"
    DECODE = "decode"
    #: The engine is idle: all tasks of the rank wait for their environments.
    ENV_WAIT = "env_wait"
    #: The rank has no task, because rollout may not run further ahead of the trainer: the paper's RWT.
    WEIGHT_WAIT = "weight_wait"
    REFERENCE = "reference"
    FORWARD = "forward"
    BACKWARD = "backward"
    #: With the gradients' reduction, and so with waiting for the slowest actor.
    OPTIMIZER = "optimizer"
    #: The reference on its way to the device, or off it.
    SWAP = "swap"
    #: From the call to the sync, on actors; from the first byte, on rollout ranks.
    SYNC = "sync"
    #: Actors and Ref ranks have nothing to train on, or to score: the paper's TWT.
    DATA_WAIT = "data_wait"
    CHECKPOINT = "checkpoint"
    #: From the order to leave until the job's end.
    SHUTDOWN = "shutdown"


#: What a second is said to be used for: any activity's value.
ACTIVITIES = frozenset(activity.value for activity in Activity)


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


@dataclass(slots=True)
class _RankRecord:
    """What is known of one rank: its own count so far, and when it was told."""

    told_s: float
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class SecondsBalance:
    """Rank-seconds by activity, and `elapsed_s`: what they have to add up to, by the scheduler's clock."""

    seconds: Mapping[str, float]
    elapsed_s: float

    @property
    def error(self) -> float:
        """|sum - elapsed| / elapsed; 0.0 for an empty balance."""
        return abs(sum(self.seconds.values()) - self.elapsed_s) / self.elapsed_s if self.elapsed_s else 0.0

    def since(self, earlier: SecondsBalance) -> SecondsBalance:
        """What came after `earlier`."""
        seconds = {name: value - earlier.seconds.get(name, 0.0) for name, value in self.seconds.items()}
        return SecondsBalance(seconds, self.elapsed_s - earlier.elapsed_s)


class RankSeconds:
    """Rank-seconds of a job whose clock starts at 0.0.

    What happened before a rank's own count began (its process was being started) is startup, and what happens after its last word
    is shutdown; between the two, nothing is made up: the ranks' counts stand as they came.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: dict[Rank, _RankRecord] = {}
        self._totals = dict.fromkeys((activity.value for activity in Activity), 0.0)
        self._elapsed_s = 0.0

    def tell(self, rank: Rank, seconds: Mapping[str, float], now_s: float) -> None:
        """A rank's count since its process began, by activity. Raises `IllegalEvent` for one that is unknown or has shrunk."""
        known = self._ranks.get(rank)
        before = known.seconds if known is not None else {}
        if not seconds.keys() <= ACTIVITIES:
            raise IllegalEvent(
                f"rank {rank} spent seconds on {sorted(seconds.keys() - ACTIVITIES)}, which is no activity"
            )
        shrunk = [
            name for name in sorted(before.keys() | seconds.keys()) if seconds.get(name, 0.0) < before.get(name, 0.0)
        ]
        if shrunk:
            raise IllegalEvent(f"rank {rank} has spent fewer seconds on {', '.join(shrunk)} than it had before")
        for name, value in seconds.items():
            self._totals[name] += value - before.get(name, 0.0)
        if known is None:
            self._totals[Activity.STARTUP.value] += max(0.0, now_s - sum(seconds.values()))
            self._elapsed_s += now_s
        else:
            self._elapsed_s += now_s - known.told_s
        self._ranks[rank] = _RankRecord(now_s, dict(seconds))

    def balance(self) -> SecondsBalance:
        """All that ranks have told so far."""
        return SecondsBalance(dict(self._totals), self._elapsed_s)

    def final(self, now_s: float) -> SecondsBalance:
        """The balance of a job that has ended: `elapsed_s` is its time x ranks, whoever did not tell included."""
        seconds = dict(self._totals)
        for record in self._ranks.values():
            seconds[Activity.SHUTDOWN.value] += now_s - record.told_s
        return SecondsBalance(seconds, now_s * self._num_ranks)
