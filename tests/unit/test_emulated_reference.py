"""The emulated reference on a clock that only its sleeps move: seconds and bytes by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.trainer_fakes import GB, FakeTime, RoundCosts, sleeps, trajectory
from tiderl.clock import JobClock
from tiderl.config.schema import Config, ScheduleConfig, TrainerConfig
from tiderl.errors import TrainerError
from tiderl.trainers.base import Reference
from tiderl.trainers.emulated_memory import ActorMemory
from tiderl.trainers.emulated_reference import EmulatedReference
from tiderl.trainers.reference import swap_policy

Make = Callable[..., EmulatedReference]

SCHEDULES = {
    "auto": ScheduleConfig(),
    "colocated": ScheduleConfig(pipelining="colocated"),
    "stream": ScheduleConfig(mode="stream", pipelining="decoupled"),
    "decoupled": ScheduleConfig(pipelining="decoupled"),
}


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def make(time: FakeTime) -> Make:
    """`beside_gb`: of the GPU that it shares with an actor (69 GB resident, 15 GB of reference); None: it has one of its own."""

    def build(beside_gb: int | None = None, **sections: object) -> EmulatedReference:
        config, costs = Config(**sections), RoundCosts(memory_bytes=(beside_gb or 1000) * GB)  # type: ignore[arg-type]
        memory = ActorMemory(config, costs, 1) if beside_gb else None  # type: ignore[arg-type]
        clock = JobClock(time.scale, time.read_s)
        return EmulatedReference(config, costs, clock, memory, time.sleep)  # type: ignore[arg-type]

    return build


def test_it_is_a_reference(make: Make) -> None:
    as_reference: Reference = make()
    assert not as_reference.is_on_device


def test_a_swap_takes_the_weights_way_in_and_nothing_out(make: Make, time: FakeTime) -> None:
    reference = make()
    reference.start()
    assert sleeps(time) == []
    for _ in range(2):
        assert [(reference.swap_in(), reference.is_on_device) for _ in range(2)] == [(1.5, True), (0.0, True)]
        assert sleeps(time) == [1.5]
        assert [(reference.swap_out(), reference.is_on_device) for _ in range(2)] == [(0.0, False)] * 2
        assert sleeps(time) == []


def test_scoring_takes_a_forward_of_each_part(make: Make, time: FakeTime) -> None:
    """Parts of at most 20 tokens: (12, 7), (15), (25). The last has no generated token: no forward. Log-probs are the
    engine's."""
    reference = make(trainer=TrainerConfig(max_micro_batch_tokens=20))
    reference.start()
    reference.swap_in()
    sleeps(time)
    trajectories = [trajectory(12, [4, 11]), trajectory(7, [2]), trajectory(15, [10]), trajectory(25, [])]
    arrays = reference.log_probs(trajectories)
    assert sleeps(time) == pytest.approx([(11 + 121 + 2 + 4) / 100, (10 + 100) / 100])
    for array, played in zip(arrays, trajectories, strict=True):
        np.testing.assert_array_equal(array, np.where(played.generated, played.log_probs, 0.0))
    assert reference.log_probs([]) == []


def test_nothing_drifts_and_the_seconds_told_are_those_that_passed(make: Make, time: FakeTime) -> None:
    """Each sleep ends 0.04 of the job's seconds late, and the next is so much shorter."""
    reference = make()
    reference.start()
    time.overshoot_s = 0.01
    began_s, told_s = time.now_s, []
    for _ in range(100):
        told_s.append(reference.swap_in())
        reference.log_probs([trajectory(21, [20])])
        reference.swap_out()
    assert (time.now_s - began_s) * time.scale == pytest.approx(100 * (1.5 + 4.2) + 0.04)
    assert told_s == pytest.approx([1.54, *[1.5] * 99])


# --- memory -----------------------------------------------------------------------------------------------------------


def test_beside_an_actor_it_takes_memory_while_it_is_there(make: Make) -> None:
    reference = make(beside_gb=84)
    reference.start()
    assert reference._memory is not None
    reference.swap_in()
    with pytest.raises(TrainerError, match=r"needs 85\.0 GB"):
        reference._memory.take_activations(1)
    reference.swap_out()
    reference._memory.take_activations(1)
    with pytest.raises(TrainerError, match=r"needs 85\.0 GB"):
        reference.swap_in()
    assert not reference.is_on_device


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_every_step_would_need_is_checked_at_the_start(make: Make, name: str) -> None:
    """Decoupled, the actor's own is for when no Ref rank is left."""
    schedule = SCHEDULES[name]
    make(beside_gb=84, schedule=schedule).start()
    reference = make(beside_gb=83, schedule=schedule)
    if name == "decoupled":
        reference.start()
        with pytest.raises(TrainerError, match=r"needs 84\.0 GB"):
            reference.swap_in()
    else:
        with pytest.raises(TrainerError, match=r"needs 84\.0 GB"):
            reference.start()


@pytest.mark.parametrize(("gigabytes", "policy"), [(94, "resident"), (93, "offload"), (None, "resident")])
def test_auto_keeps_it_where_it_fits_beside_the_largest_micro_batch(
    make: Make, gigabytes: int | None, policy: str
) -> None:
    """69 GB, 15 GB of reference, 10 GB of activations."""
    config = Config(trainer=TrainerConfig(max_micro_batch_tokens=10))
    reference = make(gigabytes, trainer=config.trainer)
    reference.start()
    assert swap_policy(config, reference) == policy
    reference.swap_in()
    with pytest.raises(TrainerError, match="call swap_out first"):
        swap_policy(config, reference)


def test_calls_out_of_order_are_refused(make: Make) -> None:
    reference = make()
    with pytest.raises(TrainerError, match="call start first"):
        reference.swap_in()
    reference.start()
    with pytest.raises(TrainerError, match="call swap_in first"):
        reference.log_probs([trajectory(9, [4])])
