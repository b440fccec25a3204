"""The deferred loss: in whatever order forwards, scores and backwards come, a step's gradients are those of one plain computation.

One actor runs in this process, where graphs and storages can be looked at; two and three are real processes over gloo.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.actor_process import Actor, to_micro_batch
from tests.conformance.trainer_actors import (
    FOUR,
    Actors,
    PlainMicroBatch,
    assert_gradients,
    micro_batch,
    plain_gradients,
    settings,
)
from tiderl.errors import TrainerError
from tiderl.types import MicroBatch

KL_WEIGHT = 0.7
KL = {"kl_weight": KL_WEIGHT}

Order = list[tuple[str, int]]


def without_a_trained_token(seed: int, length: int) -> PlainMicroBatch:
    batch = micro_batch(seed, length)
    batch["trajectories"][0]["generated"] = [False] * length
    return batch


MICRO_BATCHES = [*FOUR[:2], without_a_trained_token(6, 11), *FOUR[2:], micro_batch(5, 7, 16)]
#: How many of them each rank gets.
COUNTS = {1: (6,), 2: (5, 1), 3: (2, 0, 4)}


def streamed(num: int, window: int) -> Order:
    """Decoupled, log-probs in order: so many forwards are made ahead of the oldest backward."""
    order = []
    for i in range(num + window):
        if i < num:
            order.append(("forward", i))
        if i >= window:
            order += [("receive", i - window), ("backward", i - window)]
    return order


def colocated(num: int) -> Order:
    """All that is ready is scored, then the actor works on all of it."""
    return [("score", i) for i in range(num)] + [(name, i) for i in range(num) for name in ("forward", "backward")]


def shuffled(num: int, seed: int) -> Order:
    """Log-probs come when they come, and backwards are made in their order."""
    rng = random.Random(seed)
    todo, scored, forwarded, order = list(range(num)), set[int](), set[int](), Order()
    arrivals = rng.sample(todo, num)
    while todo or forwarded:
        ready = sorted(scored & forwarded)
        name = rng.choice(["forward"] * bool(todo) + ["receive"] * bool(arrivals) + ["backward"] * bool(ready))
        if name == "forward":
            i = todo.pop(0)
            forwarded.add(i)
        elif name == "receive":
            i = arrivals.pop()
            scored.add(i)
        else:
            i = rng.choice(ready)
            forwarded.remove(i)
        order.append((name, i))
    return order


ORDERS: dict[str, Callable[[int], Order]] = {
    "alternating": lambda num: [(name, i) for i in range(num) for name in ("score", "forward", "backward")],
    "colocated": colocated,
    "window of 1": lambda num: streamed(num, 1),
    "window of 2": lambda num: streamed(num, 2),
    "all in flight": lambda num: streamed(num, num),
    "all in flight, last first": lambda num: (
        [("forward", i) for i in range(num)]
        + [(name, i) for i in reversed(range(num)) for name in ("receive", "backward")]
    ),
    "shuffled 1": lambda num: shuffled(num, 1),
    "shuffled 2": lambda num: shuffled(num, 2),
}
IN_ORDER = ("alternating", "colocated", "window of 1", "window of 2", "all in flight")


class Alone:
    """One actor in this process, with the interface of `Actors`."""

    world_size = 1

    def __init__(self) -> None:
        self.actor = Actor(0)

    def run(self, *command: Any) -> list[Any]:
        name, *arguments = command
        return [getattr(self.actor, name)(*arguments)]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone(group: None) -> Alone:
    return Alone()


@pytest.fixture(params=[1, 2, 3], ids=["1 actor", "2 actors", "3 actors"])
def actors(request: pytest.FixtureRequest, worlds: Callable[[int], Actors], alone: Alone) -> Alone | Actors:
    return alone if request.param == 1 else worlds(request.param)


def spread(world_size: int) -> list[list[PlainMicroBatch]]:
    own, start = [], 0
    for count in COUNTS[world_size]:
        own.append(MICRO_BATCHES[start : start + count])
        start += count
    assert start == len(MICRO_BATCHES)
    return own


def train(actors: Alone | Actors, order: Callable[[int], Order]) -> list[dict[str, Any]]:
    num = actors.world_size
    answers = actors.run("step", spread(num), [False] * num, [order(count) for count in COUNTS[num]])
    assert all(answer["updated"] for answer in answers)
    return answers


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["colocated", *(name for name in ORDERS if name not in IN_ORDER)])
def test_gradients_are_those_of_one_plain_computation(
    actors: Alone | Actors, models: dict[str, Path], tmp_path: Path, order: str
) -> None:
    """The reference is another model than the actor's, so that a mixed-up hand-over would show. Of the orders whose gradients are
    equal bit for bit (see below) one is enough."""
    actors.run("start", settings(models["tied"], loss=KL), str(models["llama"]))
    answers = train(actors, ORDERS[order])
    actors.run("state", str(tmp_path / "state.npz"))
    wanted, loss, num_tokens = plain_gradients(models["tied"], MICRO_BATCHES, KL_WEIGHT, models["llama"])
    assert_gradients(tmp_path / "state.npz", wanted)
    assert [a["num_trained_tokens"] for a in answers] == [num_tokens] * actors.world_size
    assert sum(r["sums"].get("loss", 0.0) for a in answers for r in a["results"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])
def test_in_order_the_gradients_are_the_ordinary_ones_bit_for_bit(
    actors: Alone | Actors, models: dict[str, Path], tmp_path: Path, recompute: bool
) -> None:
    trainer = {"checkpoint_head": recompute, "checkpoint_layers": recompute}
    silent = {i for i, m in enumerate(MICRO_BATCHES) if not any(map(any, (t["generated"] for t in m["trajectories"])))}
    starts = np.cumsum([0, *COUNTS[actors.world_size]]).tolist()
    ordinary = [
        [(name, i) for i in range(count) if start + i not in silent for name in ("score", "ordinary")]
        for start, count in zip(starts, COUNTS[actors.world_size], strict=False)
    ]

    def state_after(orders: list[Order]) -> set[str]:
        actors.run("start", settings(models["untied"], loss=KL, trainer=trainer), str(models["llama"]))
        actors.run("step", spread(actors.world_size), [False] * actors.world_size, orders)
        return set(actors.run("state", str(tmp_path / "state.npz")))

    wanted = state_after(ordinary)
    for name in IN_ORDER:
        assert state_after([ORDERS[name](count) for count in COUNTS[actors.world_size]]) == wanted, name


def test_a_step_abandoned_with_forwards_in_flight_leaves_no_trace(
    actors: Alone | Actors, models: dict[str, Path], tmp_path: Path
) -> None:
    num = actors.world_size
    actors.run("start", settings(models["tied"], loss=KL), str(models["llama"]))
    before = actors.run("state", str(tmp_path / "before.npz"))
    cut = [streamed(count, 2)[: count + 1] for count in COUNTS[num]]  # some are finished, some are not
    for answer in actors.run("step", spread(num), [True] * num, cut):
        assert (answer["abandoned"], answer["updated"], answer["version"]) == (True, False, 0)
    assert actors.run("state", str(tmp_path / "after.npz")) == before
    train(actors, ORDERS["window of 2"])
    actors.run("state", str(tmp_path / "state.npz"))
    assert_gradients(
        tmp_path / "state.npz", plain_gradients(models["tied"], MICRO_BATCHES, KL_WEIGHT, models["llama"])[0]
    )


# --- memory -----------------------------------------------------------------------------------------------------------


class _Held:
    """A tensor that a graph keeps for its backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would hold the graph that holds it


@contextmanager
def held_by_graphs() -> Iterator[weakref.WeakSet[_Held]]:
    """What is in the set when the block ends, or later, some graph made in the block still holds."""
    held = weakref.WeakSet[_Held]()

    def pack(tensor: torch.Tensor) -> _Held:
        kept = _Held(tensor)
        held.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield held


def as_micro_batch(plain: PlainMicroBatch) -> MicroBatch:
    return to_micro_batch(plain["trajectories"], plain["advantages"])


def test_a_graph_lives_from_its_forward_to_its_backward(alone: Alone, models: dict[str, Path]) -> None:
    alone.run("start", settings(models["tied"]))
    trainer = alone.actor.trainer
    trainer.begin_step()
    tickets, sizes = [], []
    with held_by_graphs() as held:
        for plain in FOUR[:3]:
            tickets.append(trainer.forward(as_micro_batch(plain)))
            sizes.append(len(held))
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    trainer.backward(tickets[1], None)
    assert len(held) == sizes[2] - (sizes[1] - sizes[0])
    trainer.backward(tickets[0], None)
    trainer.backward(tickets[2], None)
    assert len(held) == 0
    assert trainer.end_step(abandon=False).updated


def test_an_abandoned_step_frees_its_graphs_whoever_holds_the_tickets(alone: Alone, models: dict[str, Path]) -> None:
    alone.run("start", settings(models["tied"]))
    trainer = alone.actor.trainer
    trainer.begin_step()
    with held_by_graphs() as held:
        tickets = [trainer.forward(as_micro_batch(plain)) for plain in FOUR]
    assert [t.num_tokens for t in tickets] == [23, 30, 31, 15]
    assert len(held) > 0
    trainer.end_step(abandon=True)
    assert len(held) == 0


class _Readers(TorchDispatchMode):
    """Which operations read the memory of some tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._places = {tensor.data_ptr(): tensor for tensor in tensors}
        self.read: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = (a.data_ptr() for a in args if type(a) is torch.Tensor)
        self.read += [(func.overloadpacket.__name__, place) for place in places if place in self._places]
        return func(*args, **(kwargs or {}))


def test_log_probs_are_handed_over_without_a_copy(alone: Alone, models: dict[str, Path]) -> None:
    """Only the selection of the generated tokens, which is where the loss begins, reads them, and it reads them where they are."""
    alone.run("start", settings(models["tied"], loss=KL), str(models["llama"]))
    batch = as_micro_batch(FOUR[2])
    reference, trainer = alone.actor.reference, alone.actor.trainer
    reference.swap_in()
    log_probs = reference.log_probs(batch.trajectories)
    reference.swap_out()  # they outlive the model
    tensors = [own for own in log_probs if isinstance(own, torch.Tensor)]
    assert len(tensors) == 3
    assert len({own.untyped_storage().data_ptr() for own in tensors}) == 1

    trainer.begin_step()
    in_flight = trainer.forward(batch)
    with _Readers(tensors) as readers:
        trainer.backward(in_flight, log_probs)
    assert readers.read == [("index_select", own.data_ptr()) for own in tensors]
    assert trainer.end_step(abandon=False).updated


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_backward_needs_a_forward_of_its_step(alone: Alone, models: dict[str, Path]) -> None:
    alone.run("start", settings(models["tied"]))
    trainer = alone.actor.trainer
    trainer.begin_step()
    first, second = (trainer.forward(as_micro_batch(plain)) for plain in FOUR[:2])
    trainer.backward(first, None)
    with pytest.raises(TrainerError, match="not in flight"):
        trainer.backward(first, None)
    trainer.end_step(abandon=True)
    trainer.begin_step()
    with pytest.raises(TrainerError, match="30 tokens that is not in flight"):
        trainer.backward(second, None)


def test_a_step_is_not_closed_over_forwards_in_flight(alone: Alone, models: dict[str, Path]) -> None:
    """Nor over one whose backward failed: its tokens would be missing from the gradient, and nobody would know."""
    alone.run("start", settings(models["tied"], loss=KL))
    trainer = alone.actor.trainer
    trainer.begin_step()
    in_flight = trainer.forward(as_micro_batch(FOUR[0]))
    with pytest.raises(TrainerError, match="reference log-probs are needed"):
        trainer.backward(in_flight, None)
    for wrong in ([np.zeros(23, dtype=np.float32)], [torch.zeros(9), torch.zeros(13)]):
        with pytest.raises(ValueError, match="trajectories of"):
            trainer.backward(in_flight, wrong)
    with pytest.raises(TrainerError, match="1 micro-batches have had their forward but not their backward"):
        trainer.end_step(abandon=False)
    trainer.backward(in_flight, [np.zeros(9, dtype=np.float32), np.zeros(14, dtype=np.float32)])
    assert trainer.end_step(abandon=False).updated
