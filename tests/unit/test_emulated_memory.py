"""Memory of an emulated actor: 45 GB and 24 GB of optimizer resident, 15 GB of reference, 1 GB a computed token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer_fakes import GB, RoundCosts
from tiderl.config.schema import Config, TrainerConfig
from tiderl.errors import TrainerError
from tiderl.trainers.emulated_memory import ActorMemory


def memory(gigabytes: float, num_actors: int = 1, **trainer: Any) -> ActorMemory:
    config = Config(trainer=TrainerConfig(**trainer))
    costs = RoundCosts(memory_bytes=int(gigabytes * GB))
    return ActorMemory(config, costs, num_actors)  # type: ignore[arg-type]


def refusal(gigabytes: float, num_tokens: int, num_in_flight: int = 0, reference: bool = False, **trainer: Any) -> str:
    """What is said of a micro-batch of `num_tokens` that does not fit beside `num_in_flight` others of one token."""
    own = memory(gigabytes, **trainer)
    if reference:
        own.take_reference()
    for _ in range(num_in_flight):
        own.take_activations(1)
    with pytest.raises(TrainerError) as caught:
        own.take_activations(num_tokens)
    return str(caught.value)


def test_a_model_that_just_fits_fits_and_one_byte_more_does_not() -> None:
    memory(69).check_resident()
    with pytest.raises(TrainerError) as caught:
        memory(69 - 1e-9).check_resident()
    message = str(caught.value)
    assert "needs 69.0 GB" in message and "69.0 GB resident (weights, gradients, its share of the optimizer)" in message
    assert message.endswith("what helps: more actors (roles.num_actors, 1)")
    memory(57, num_actors=2).check_resident()


def test_a_micro_batch_that_just_fits_fits_and_one_token_more_does_not() -> None:
    memory(80).take_activations(11)
    message = refusal(80, 12)
    assert "needs 81.0 GB" in message and "12.0 GB of activations (micro-batch of 12 tokens)" in message
    for setting in ("checkpoint_layers = true", "max_micro_batch_tokens (16384)", "roles.num_actors, 1"):
        assert setting in message
    for setting in ("window_tokens", "kl_weight", "trainer.swap"):
        assert setting not in message


def test_micro_batches_in_flight_add_up_and_their_window_is_named() -> None:
    message = refusal(80, 9, num_in_flight=3)
    assert "needs 81.0 GB" in message and "12.0 GB of activations (4 micro-batches in flight, 12 tokens)" in message
    assert "a smaller trainer.window_tokens (0)" in message


def test_recomputing_layers_makes_room_and_is_not_offered_twice() -> None:
    """A tenth of the activations: 110 tokens fit."""
    memory(80, checkpoint_layers=True).take_activations(110)
    message = refusal(80, 111, checkpoint_layers=True)
    assert "max_micro_batch_tokens" in message
    assert "checkpoint_layers" not in message


def test_a_reference_counts_while_it_is_there() -> None:
    own = memory(84)
    own.check_reference()
    own.take_reference()
    with pytest.raises(TrainerError, match=r"needs 85\.0 GB.* and 15\.0 GB of the reference"):
        own.take_activations(1)
    own.free_reference()
    own.take_activations(1)
    with pytest.raises(TrainerError, match=r"needs 85\.0 GB"):
        own.take_reference()
    own.free_activations(1)
    own.take_reference()


@pytest.mark.parametrize(("swap", "offered"), [("auto", True), ("resident", True), ("offload", False)])
def test_a_reference_in_the_way_is_offered_other_places(swap: str, offered: bool) -> None:
    message = refusal(84, 1, reference=True, swap=swap)
    assert ('trainer.swap = "offload"' in message) == offered
    assert "roles.num_ref" in message and "kl_weight = 0" in message


def test_a_reference_alone_in_the_way_cannot_be_offloaded_out_of_it() -> None:
    with pytest.raises(TrainerError, match=r"needs 84\.0 GB") as caught:
        memory(83).check_reference()
    assert "trainer.swap" not in str(caught.value)


def test_a_refusal_takes_nothing() -> None:
    own = memory(80)
    for _ in range(3):
        with pytest.raises(TrainerError):
            own.take_activations(12)
        with pytest.raises(TrainerError):
            own.take_reference()
    own.take_activations(11)


def test_what_is_freed_can_be_taken_again() -> None:
    own = memory(80)
    for _ in range(3):
        own.take_activations(4)
        own.take_activations(7)
        own.free_activations(4)
        own.take_activations(4)
        own.free_all_activations()


def test_a_reference_fits_beside_one_micro_batch_or_does_not() -> None:
    assert memory(86).reference_fits(2)
    assert not memory(86).reference_fits(3)
    assert memory(86, checkpoint_layers=True).reference_fits(20)
