"""The trainer protocol on emulated actors, but for what it says of gradients: real processes over gloo, two or three of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.trainer_actors import Actors
from tiderl.rl import emulated_model

SCRIPT = "emulated_actor_process.py"
#: Bound of a collective where it must not pass, and where it must.
PATIENT_S, SHORT_S = 60.0, 2.0


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Actors]]:
    started: dict[int, Actors] = {}
    folder = tmp_path_factory.mktemp("stores")

    def world(size: int) -> Actors:
        if size not in started:
            started[size] = Actors(size, folder, SCRIPT)
        return started[size]

    yield world
    for actors in started.values():
        actors.close()


@pytest.fixture(params=[2, 3], ids=["2 actors", "3 actors"])
def actors(request: pytest.FixtureRequest, worlds: Callable[[int], Actors]) -> Actors:
    fresh = worlds(request.param)
    assert fresh.run("start", PATIENT_S) == [0] * request.param
    return fresh


def spread(actors: Actors, *sizes: list[list[int]]) -> list[list[list[int]]]:
    """Micro-batches for the first ranks, none for the others."""
    return [*sizes, *([] for _ in range(actors.world_size - len(sizes)))]


def alone(actors: Actors, rank: int, value: Any, other: Any) -> list[Any]:
    return [value if r == rank else other for r in range(actors.world_size)]


# --- steps ------------------------------------------------------------------------------------------------------------


def test_unequal_micro_batches_make_one_update_that_all_agree_on(actors: Actors) -> None:
    """Rank 0 has three micro-batches, rank 1 one, rank 2 (if any) none: 4 + 3 + 2 + 6 + 10 generated tokens."""
    answers = actors.run("step", spread(actors, [[8, 6], [4], [12]], [[20]]), [False] * actors.world_size)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["updated"] and not answers[0]["abandoned"]
    assert (answers[0]["version"], answers[0]["num_trained_tokens"]) == (1, 25)


def test_a_step_without_any_micro_batch_updates_nothing(actors: Actors) -> None:
    for answer in actors.run("step", spread(actors), [False] * actors.world_size):
        assert (answer["updated"], answer["abandoned"], answer["num_trained_tokens"], answer["version"]) == (
            False,
            False,
            0,
            0,
        )


def test_whoever_abandons_all_do(actors: Actors) -> None:
    work = spread(actors, [[8]], [[8], [8]])
    for rank in range(actors.world_size):
        answers = actors.run("step", work, alone(actors, rank, True, False))
        assert [(a["abandoned"], a["updated"], a["version"]) for a in answers] == [(True, False, 0)] * actors.world_size
    answers = actors.run("step", work, [False] * actors.world_size)
    assert [(a["abandoned"], a["updated"], a["version"]) for a in answers] == [(False, True, 1)] * actors.world_size
    assert answers[0]["num_trained_tokens"] == 12  # of this step alone


def test_tokens_of_a_step_before_are_not_counted_again(actors: Actors) -> None:
    none = [False] * actors.world_size
    actors.run("step", spread(actors, [[10]]), none)
    assert [a["updated"] for a in actors.run("step", spread(actors), none)] == [False] * actors.world_size


def test_weights_and_scores_are_the_same_everywhere_and_those_of_the_version(actors: Actors) -> None:
    for version in range(3):
        weights = actors.run("call", ["full_weights"] * actors.world_size)
        wanted = emulated_model.weights_of(version)
        assert weights == [[[emulated_model.WEIGHT_NAME, wanted.tolist()]]] * actors.world_size
        for scores in actors.run("call", ["score"] * actors.world_size):
            np.testing.assert_array_equal(np.float32(scores), emulated_model.score(wanted, [7, 3, 5]))
        actors.run("step", spread(actors, [[8]]), [False] * actors.world_size)


def test_inside_a_step_nobody_waits_for_anybody(actors: Actors) -> None:
    """Rank 0 alone makes a call, which would otherwise end with an error after PATIENT_S: only `end_step` needs the others."""
    actors.run("call", ["begin_step"] * actors.world_size)
    scores = actors.run("call", alone(actors, 0, "score", ""))
    assert scores[0] and scores[1:] == [None] * (actors.world_size - 1)
    assert actors.run("call", ["end_step"] * actors.world_size) == [0] * actors.world_size


# --- the order of calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin_step", "full_weights", "score", "wait_saved"])
def test_an_actor_that_does_not_come_is_waited_for_in_vain(actors: Actors, call: str) -> None:
    actors.run("start", SHORT_S)
    answers = actors.ask("call", alone(actors, 1, "", call))
    assert answers[1] == {"result": None}
    messages = [a.get("message", "") for rank, a in enumerate(answers) if rank != 1]
    assert all(f"the other actors in {call}" in m or "another actor is gone" in m for m in messages), answers
    # Whose time is up first may hang up on the others; that one has the name.
    assert any(
        a.get("error") == "WaitTimeout"
        and f"actor {rank} waited {SHORT_S:g} s" in a["message"]
        and "collective_s" in a["message"]
        for rank, a in enumerate(answers)
    ), answers


def test_an_end_that_one_actor_forgets_is_waited_for_in_vain(actors: Actors) -> None:
    actors.run("start", SHORT_S)
    actors.run("call", ["begin_step"] * actors.world_size)
    answers = actors.ask("call", alone(actors, 0, "", "end_step"))
    assert "result" in answers[0]
    assert any("the other actors in end_step" in a.get("message", "") for a in answers[1:]), answers


def test_an_actor_in_another_call_is_named_on_all(actors: Actors) -> None:
    calls = alone(actors, 1, "score", "begin_step")
    for answer in actors.ask("call", calls):
        assert answer.get("error") == "TrainerError", answer
        assert ", ".join(f"actor {rank} {call}" for rank, call in enumerate(calls)) in answer["message"]


def test_a_dead_actor_is_told_apart_from_a_late_one(tmp_path: Path) -> None:
    actors = Actors(2, tmp_path, SCRIPT)
    try:
        actors.run("start", PATIENT_S)
        actors.processes[1].kill()
        actors.processes[1].wait(timeout=20)
        process = actors.processes[0]
        assert process.stdin is not None
        process.stdin.write((json.dumps(["call", ["begin_step", ""]]) + "\n").encode())
        process.stdin.flush()
        answer = actors._answer(0, "begin_step")
        assert answer["error"] == "TrainerError"
        assert "begin_step failed, another actor is gone" in answer["message"]
    finally:
        actors.close()


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (3, 2), (2, 2)])
def test_a_checkpoint_loads_on_another_number_of_actors(
    worlds: Callable[[int], Actors], tmp_path: Path, savers: int, loaders: int
) -> None:
    old, new = worlds(savers), worlds(loaders)
    old.run("start", PATIENT_S)
    for _ in range(2):
        old.run("step", spread(old, [[8]]), [False] * savers)
    old.run("save", str(tmp_path / "checkpoint"))
    old.run("step", spread(old, [[8]]), [False] * savers)  # what comes after does not leak in
    assert [file.name for file in tmp_path.rglob("*")] == ["checkpoint", "checkpoint.json"]

    new.run("start", PATIENT_S)
    assert new.run("load", [str(tmp_path / "checkpoint")] * loaders) == [2] * loaders
    assert new.run("step", spread(new, [[8]]), [False] * loaders)[0]["version"] == 3


def test_a_save_that_fails_on_rank_0_fails_on_all(actors: Actors, tmp_path: Path) -> None:
    actors.run("save", str(tmp_path / "checkpoint"))
    (tmp_path / "file").write_text("in the way")
    for folder, problem in (("checkpoint", "exists"), ("file/checkpoint", "Not a directory")):
        answers = actors.ask("save", str(tmp_path / folder))
        assert {a.get("error") for a in answers} == {"TrainerError"}
        assert problem in answers[0]["message"]
        assert all("save failed on another actor" in a["message"] for a in answers[1:])


def test_a_load_that_fails_on_one_actor_changes_none(actors: Actors, tmp_path: Path) -> None:
    """A folder that one machine does not see: nobody goes on alone under other weights."""
    actors.run("step", spread(actors, [[8]]), [False] * actors.world_size)
    actors.run("save", str(tmp_path / "checkpoint"))
    actors.run("start", PATIENT_S)
    folders = alone(actors, 1, str(tmp_path / "nowhere"), str(tmp_path / "checkpoint"))
    answers = actors.ask("load", folders)
    assert {a.get("error") for a in answers} == {"TrainerError"}
    assert "nowhere is not a whole checkpoint" in answers[1]["message"]
    assert "load failed on another actor" in answers[0]["message"]
    assert actors.run("version") == [0] * actors.world_size
