"""One emulated actor on a clock that only its sleeps move: seconds and bytes by hand. Several actors: tests/conformance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.unit.trainer_fakes import GB, FakeTime, RoundCosts, micro_batch, sleeps, train, trajectory
from tiderl.clock import JobClock
from tiderl.config.schema import Config, LossConfig, OptimConfig, TrainerConfig
from tiderl.errors import TrainerError
from tiderl.rl import emulated_model
from tiderl.trainers.base import Trainer
from tiderl.trainers.emulated import EmulatedTrainer

NUM_RECEIVERS = 8
SMALL = RoundCosts(memory_bytes=80 * GB)

Make = Callable[..., EmulatedTrainer]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def make(group: dist.ProcessGroup, time: FakeTime) -> Make:
    def build(costs: RoundCosts | None = None, **sections: object) -> EmulatedTrainer:
        config = Config(**sections)  # type: ignore[arg-type]
        clock = JobClock(time.scale, time.read_s)
        return EmulatedTrainer(config, group, costs or RoundCosts(), clock, NUM_RECEIVERS, time.sleep)  # type: ignore[arg-type]

    return build


KL = LossConfig(kl_weight=0.1)


def test_it_is_a_trainer(make: Make) -> None:
    as_trainer: Trainer = make()
    assert as_trainer.version == 0


# --- seconds ----------------------------------------------------------------------------------------------------------


def test_starting_moves_the_weights(make: Make, time: FakeTime) -> None:
    make().start()
    assert sleeps(time) == [1.5]
    make(loss=KL).start()  # the reference is loaded by itself
    assert sleeps(time) == [1.5]


@pytest.mark.parametrize(("checkpoint_layers", "times"), [(False, 2), (True, 3)])
def test_a_steps_seconds_are_the_cost_models(make: Make, time: FakeTime, checkpoint_layers: bool, times: int) -> None:
    """Of 8 and 20 tokens, 5 and 9 are computed: what comes after the last generated one predicts nothing. The third
    trajectory has none, and is not computed at all."""
    trainer = make(trainer=TrainerConfig(checkpoint_layers=checkpoint_layers))
    trainer.begin_step()
    assert sleeps(time) == [0.25]
    batch = micro_batch(trajectory(8, [3, 5]), trajectory(20, [9]), trajectory(6, []))
    forward_s = (5 + 25 + 9 + 81) / 100
    in_flight = trainer.forward(batch)
    assert in_flight.num_tokens == 34
    assert sleeps(time) == pytest.approx([forward_s])
    result = trainer.backward(in_flight, None)
    assert sleeps(time) == pytest.approx([times * forward_s])
    assert (result.forward_s, result.backward_s) == pytest.approx((forward_s, times * forward_s))
    assert (result.num_tokens, result.num_trained_tokens, result.num_padding_tokens) == (34, 3, 0)
    done = trainer.end_step(abandon=False)
    assert sleeps(time) == pytest.approx([6.0])
    assert done.optimizer_s == pytest.approx(6.0)


def test_the_seconds_told_are_those_that_passed(make: Make, time: FakeTime) -> None:
    """Each sleep of the machine's seconds ends 0.25 s late, which is one of the job's: the next one is so much shorter."""
    trainer = make()
    trainer.begin_step()
    time.overshoot_s = 0.25
    first = train(trainer, micro_batch(trajectory(30, [29])), None)
    # 29 tokens: 8.7 s forward, 17.4 s backward.
    assert (first.forward_s, first.backward_s) == pytest.approx((8.7 + 1.0, 17.4))
    assert trainer.late_s == pytest.approx(1.0)
    second = train(trainer, micro_batch(trajectory(30, [29])), None)
    assert (second.forward_s, second.backward_s) == pytest.approx((8.7, 17.4))


def test_nothing_drifts_over_many_steps(make: Make, time: FakeTime) -> None:
    trainer = make()
    time.overshoot_s = 0.01
    began_s = time.now_s
    batch = micro_batch(trajectory(21, [20]))
    for _ in range(200):
        trainer.begin_step()
        train(trainer, batch, None)
        trainer.end_step(abandon=False)
    # 20 tokens are 4.2 s forward, and twice that backward.
    wanted_s = 200 * (0.25 + 3 * 4.2 + 6.0)
    assert (time.now_s - began_s) * time.scale == pytest.approx(wanted_s + trainer.late_s)
    assert trainer.late_s == pytest.approx(0.01 * time.scale)


def test_the_wait_between_forward_and_backward_is_nobodys(make: Make, time: FakeTime) -> None:
    """Ten seconds pass until the reference's log-probs are there: they neither count nor shorten the backward."""
    trainer = make(loss=KL)
    trainer.begin_step()
    batch = micro_batch(trajectory(30, [29]))
    in_flight = trainer.forward(batch)
    time.now_s += 10.0
    result = trainer.backward(in_flight, [np.zeros(30, dtype=np.float32)])
    assert (result.forward_s, result.backward_s) == pytest.approx((8.7, 17.4))


def test_a_micro_batch_without_a_trained_token_takes_no_time(make: Make, time: FakeTime) -> None:
    trainer = make()
    trainer.begin_step()
    sleeps(time)
    result = train(trainer, micro_batch(trajectory(9, [])), None)
    assert (result.forward_s, result.backward_s, result.num_trained_tokens, sleeps(time)) == (0.0, 0.0, 0, [])


def test_weights_come_after_the_broadcasts_seconds(make: Make, time: FakeTime) -> None:
    """Receivers wait for the first byte: the seconds have to pass before it is sent."""
    trainer = make()
    weights = trainer.full_weights()
    assert sleeps(time) == []
    name, tensor = next(weights)
    assert sleeps(time) == [5.0]
    assert name == emulated_model.WEIGHT_NAME
    np.testing.assert_array_equal(tensor.numpy(), emulated_model.weights_of(0))
    assert list(weights) == []
    assert sleeps(time) == []


# --- updates ----------------------------------------------------------------------------------------------------------


def test_weights_and_scores_follow_the_version(make: Make) -> None:
    trainer = make()
    ids = [5, 3, 8, 1]
    for version in range(3):
        assert trainer.version == version
        np.testing.assert_array_equal(
            dict(trainer.full_weights())[emulated_model.WEIGHT_NAME], emulated_model.weights_of(version)
        )
        np.testing.assert_array_equal(trainer.score(ids), emulated_model.score(emulated_model.weights_of(version), ids))
        trainer.begin_step()
        train(trainer, micro_batch(trajectory(9, [4])), None)
        assert trainer.end_step(abandon=False).updated


def test_an_update_tells_the_learning_rate_that_it_was_made_with(make: Make) -> None:
    trainer = make(optim=OptimConfig(lr=0.4, warmup_steps=2))
    rates = []
    for abandon in (False, True, False, False):
        trainer.begin_step()
        train(trainer, micro_batch(trajectory(9, [4])), None)
        rates.append(trainer.end_step(abandon=abandon).lr)
    # Half, then the whole of it twice (the abandoned one is made again).
    assert rates == pytest.approx([0.2, 0.4, 0.4, 0.4])


def test_no_loss_is_made_up(make: Make) -> None:
    trainer = make()
    trainer.begin_step()
    result = train(trainer, micro_batch(trajectory(9, [4])), None)
    assert (result.sums, result.max_same_version_gap) == ({}, 0.0)
    assert trainer.end_step(abandon=False).grad_norm == 0.0


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_does_not_start(make: Make, time: FakeTime) -> None:
    """One actor: 45 GB and 24 GB of optimizer."""
    make(RoundCosts(memory_bytes=69 * GB)).start()
    sleeps(time)
    with pytest.raises(TrainerError, match=r"needs 69\.0 GB"):
        make(RoundCosts(memory_bytes=69 * GB - 1)).start()
    assert sleeps(time) == []


def test_as_many_forwards_are_in_flight_as_fit(make: Make) -> None:
    """80 - 69 GB are left, 1 GB a computed token: 5 + 6 tokens fit, and 1 token more once there is room again."""
    trainer = make(SMALL)
    trainer.begin_step()
    first, second, third = (micro_batch(trajectory(20, [n])) for n in (5, 6, 1))
    in_flight = trainer.forward(first)
    trainer.forward(second)
    with pytest.raises(TrainerError, match="3 micro-batches in flight, 12 tokens"):
        trainer.forward(third)
    trainer.backward(in_flight, None)
    trainer.forward(third)


def test_a_micro_batch_without_a_trained_token_takes_no_memory(make: Make) -> None:
    trainer = make(SMALL)
    trainer.begin_step()
    for _ in range(3):
        train(trainer, micro_batch(trajectory(100, [])), None)


def test_an_abandoned_step_frees_what_was_in_flight(make: Make) -> None:
    trainer = make(SMALL)
    for _ in range(3):
        trainer.begin_step()
        trainer.forward(micro_batch(trajectory(20, [11])))
        assert trainer.end_step(abandon=True).abandoned
    trainer.begin_step()
    train(trainer, micro_batch(trajectory(20, [11])), None)
    assert trainer.end_step(abandon=False).num_trained_tokens == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_refused(make: Make, tmp_path: Path) -> None:
    trainer = make()
    with pytest.raises(TrainerError, match="call begin_step first"):
        train(trainer, micro_batch(trajectory(9, [4])), None)
    with pytest.raises(TrainerError, match="without begin_step"):
        trainer.end_step(abandon=False)
    trainer.begin_step()
    inside: list[Callable[[], object]] = [
        trainer.begin_step,
        lambda: list(trainer.full_weights()),
        lambda: trainer.save(tmp_path / "c"),
        lambda: trainer.load(tmp_path / "c"),
    ]
    for call in inside:
        with pytest.raises(TrainerError, match="call end_step first"):
            call()


def test_a_reference_is_wanted_where_the_loss_has_a_kl_term(make: Make) -> None:
    trainer = make(loss=KL)
    trainer.begin_step()
    with pytest.raises(TrainerError, match="reference log-probs are needed"):
        train(trainer, micro_batch(trajectory(9, [4])), None)


def test_a_step_is_not_closed_over_forwards_in_flight(make: Make) -> None:
    trainer = make()
    trainer.begin_step()
    in_flight = trainer.forward(micro_batch(trajectory(9, [4])))
    with pytest.raises(TrainerError, match="1 micro-batches have had their forward but not their backward"):
        trainer.end_step(abandon=False)
    trainer.backward(in_flight, None)
    assert trainer.end_step(abandon=False).updated
    with pytest.raises(TrainerError, match="not in flight"):
        trainer.backward(in_flight, None)


def test_there_is_nothing_to_export(make: Make, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"set checkpoint\.export_hf = false"):
        make().export_hf(tmp_path / "hf")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "not a whole checkpoint"),
        ("{", "is broken"),
        ("[]", "is broken"),
        (json.dumps({"format": "emulated-1"}), "is broken"),
        (json.dumps({"format": 1, "version": 3, "shapes": {}}), "the emulated trainer reads emulated-1"),
    ],
)
def test_what_is_no_emulated_checkpoint_is_refused(
    make: Make, tmp_path: Path, content: str | None, problem: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if content is not None:
        (folder / "checkpoint.json").write_text(content)
    trainer = make()
    with pytest.raises(TrainerError, match=problem):
        trainer.load(folder)
    assert trainer.version == 0


def test_a_real_trainer_refuses_an_emulated_checkpoint(make: Make, tmp_path: Path) -> None:
    from tiderl.trainers.checkpoint import read_info

    make().save(tmp_path / "checkpoint")
    with pytest.raises(TrainerError, match="has format emulated-1"):
        read_info(tmp_path / "checkpoint")


def test_a_save_that_was_cut_off_is_cleared_away(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    partial = tmp_path / "checkpoint.partial"
    partial.mkdir()
    (partial / "rubbish").write_text("half")
    make().save(tmp_path / "checkpoint")
    assert [file.name for file in (tmp_path / "checkpoint").iterdir()] == ["checkpoint.json"]
    assert not partial.exists()
    assert "cut off" in caplog.text
