"""Signs of life: the three invariants of `coordinator.membership`."""

from __future__ import annotations

from tiderl.config.schema import TimeoutsConfig
from tiderl.coordinator.membership import Membership
from tiderl.types import Rank
from tiderl.wire.messages import Farewell, Heartbeat

TIMEOUTS = TimeoutsConfig(start_s=100.0, lost_s=10.0)


def members_of(world_size: int = 3) -> Membership:
    return Membership(world_size, TIMEOUTS)


def lost(members: Membership, now_s: float) -> dict[int, str]:
    return dict(members.newly_lost(now_s))


def test_invariant_1_silence_past_the_bound_is_reported_once() -> None:
    members = members_of(2)
    members.heard(Rank(0), 50.0)
    members.heard(Rank(1), 55.0)
    assert lost(members, 60.0) == {}, "exactly the bound is not past it"
    assert list(lost(members, 60.5)) == [0]
    assert lost(members, 60.5) == {}
    members.heard(Rank(1), 65.0)
    assert lost(members, 75.0) == {}
    assert list(lost(members, 75.1)) == [1]


def test_a_reason_names_bound_and_last_phase() -> None:
    members = members_of(1)
    members.heard(Rank(0), 20.0)
    members.beat(Heartbeat(Rank(0), "sync", 0.0, {}))
    assert lost(members, 42.0) == {0: "silent for 22 s (timeouts.lost_s = 10); its last phase was 'sync'"}


def test_a_rank_is_lost_once_whoever_finds_out() -> None:
    members = members_of(2)
    members.heard(Rank(0), 1.0)
    assert members.lose(Rank(0)) is True
    assert members.lose(Rank(0)) is False
    assert lost(members, 500.0) == {1: "never heard of within 100 s (timeouts.start_s)"}
    assert members.lose(Rank(1)) is False
    assert members.present() == []


def test_invariant_2_before_the_first_message_the_start_is_the_bound() -> None:
    members = members_of(2)
    members.heard(Rank(0), 95.0)
    assert lost(members, 100.0) == {}
    assert lost(members, 100.5) == {1: "never heard of within 100 s (timeouts.start_s)"}


def test_invariant_3_who_has_left_or_is_lost_is_no_longer_present() -> None:
    members = members_of(4)
    assert members.present() == []
    for rank in (2, 0, 1):
        members.heard(Rank(rank), 1.0)
    assert members.present() == [0, 1, 2], "rank 3 was never heard of"
    members.left(Farewell(Rank(1), 500))
    assert members.present() == [0, 2]
    assert members.farewells[Rank(1)].total_generated_tokens == 500
    members.heard(Rank(0), 50.0)
    assert list(lost(members, 55.0)) == [2], "and who has left is not lost"
    assert members.present() == [0]
    members.heard(Rank(2), 56.0)
    assert members.present() == [0], "a lost rank does not come back"


def test_gauges_are_summed_over_the_newest_beats() -> None:
    members = members_of()
    members.beat(Heartbeat(Rank(0), "train", 0.0, {"running": 9.0}))
    members.beat(Heartbeat(Rank(0), "train", 0.0, {"running": 2.0, "waiting": 1.0}))
    members.beat(Heartbeat(Rank(2), "idle", 0.0, {"running": 3.0}))
    assert members.gauges() == {"running": 5.0, "waiting": 1.0}
