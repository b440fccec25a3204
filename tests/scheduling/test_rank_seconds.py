"""The ledger of rank-seconds: what is taken from the ranks, what is concluded, and what the second witness finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.errors import IllegalEvent
from tiderl.scheduling.ledger import Activity, RankSeconds, SecondsBalance
from tiderl.types import Rank


def test_two_ranks_by_hand() -> None:
    ledger = RankSeconds(2)
    # Rank 0's process began at 2 s of the job and tells at 10 s, rank 1's at 3 s.
    ledger.tell(Rank(0), {"startup": 5.0, "forward": 3.0}, 10.0)
    ledger.tell(Rank(1), {"startup": 4.0, "decode": 3.0}, 10.0)
    balance = ledger.balance()
    assert balance.elapsed_s == 20.0
    assert {k: v for k, v in balance.seconds.items() if v} == {"startup": 5 + 2 + 4 + 3, "forward": 3.0, "decode": 3.0}
    assert balance.error == 0.0

    ledger.tell(Rank(0), {"startup": 5.0, "forward": 3.0, "data_wait": 10.0}, 20.0)
    ledger.tell(Rank(1), {"startup": 4.0, "decode": 13.0}, 20.0)
    since = ledger.balance().since(balance)
    assert {k: v for k, v in since.seconds.items() if v} == {"data_wait": 10.0, "decode": 10.0}
    assert (since.elapsed_s, since.error) == (20.0, 0.0)

    final = ledger.final(21.0)
    assert final.elapsed_s == 42.0
    assert final.seconds["shutdown"] == 2.0
    assert final.error == 0.0


def test_seconds_that_no_rank_accounts_for_are_an_error_of_that_share() -> None:
    ledger = RankSeconds(1)
    ledger.tell(Rank(0), {"startup": 1.0}, 1.0)
    ledger.tell(Rank(0), {"startup": 1.0, "decode": 97.0}, 100.0)  # two of 99 s are missing
    assert ledger.balance().error == pytest.approx(0.02)
    ledger = RankSeconds(1)
    ledger.tell(Rank(0), {"startup": 1.0}, 1.0)
    ledger.tell(Rank(0), {"startup": 1.0, "decode": 101.0}, 100.0)  # two were counted twice
    assert ledger.balance().error == pytest.approx(0.02)


def test_a_rank_that_never_told_leaves_a_hole_in_the_final_balance() -> None:
    ledger = RankSeconds(2)
    ledger.tell(Rank(0), {"startup": 10.0}, 10.0)
    assert ledger.balance().error == 0.0
    assert ledger.final(10.0).error == 0.5


def test_an_empty_balance_has_no_error() -> None:
    assert RankSeconds(3).balance() == SecondsBalance(dict.fromkeys((a.value for a in Activity), 0.0), 0.0)
    assert RankSeconds(3).balance().error == 0.0


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ({"napping": 1.0}, r"rank 0 spent seconds on \['napping'\]"),
        ({"decode": 1.0}, "fewer seconds on decode, startup"),
    ],
)
def test_what_cannot_be_is_illegal_and_changes_nothing(seconds: dict[str, float], message: str) -> None:
    ledger = RankSeconds(1)
    ledger.tell(Rank(0), {"startup": 2.0, "decode": 2.0}, 4.0)
    before = ledger.balance()
    with pytest.raises(IllegalEvent, match=message):
        ledger.tell(Rank(0), seconds, 5.0)
    assert ledger.balance() == before


RANKS = st.integers(0, 3)
SPANS = st.lists(st.tuples(RANKS, st.sampled_from(Activity), st.floats(0.001, 50.0)), max_size=40)


@given(births=st.lists(st.floats(0.0, 20.0), min_size=4, max_size=4), spans=SPANS, drift=st.floats(0.9, 1.1))
def test_clocks_that_agree_close_and_those_that_drift_do_not(
    births: list[float], spans: list[tuple[int, Activity, float]], drift: float
) -> None:
    """Ranks whose clocks run `drift` times as fast: the error is what they counted wrongly after their first word."""
    ledger = RankSeconds(4)
    now_s = 20.0
    counts: list[dict[str, float]] = [{"startup": now_s - birth} for birth in births]
    told_s = [now_s] * 4
    for number, count in enumerate(counts):
        ledger.tell(Rank(number), count, now_s)
    for number, activity, span_s in spans:
        now_s += span_s
        lived_s = (now_s - told_s[number]) * drift
        counts[number][activity.value] = counts[number].get(activity.value, 0.0) + lived_s
        told_s[number] = now_s
        ledger.tell(Rank(number), counts[number], now_s)
    balance = ledger.balance()
    after_first_s = sum(told_s) - 4 * 20.0
    assert balance.elapsed_s == pytest.approx(sum(told_s))
    assert balance.error == pytest.approx(abs(drift - 1.0) * after_first_s / sum(told_s), abs=1e-9)
