"""Invariants of `tiderl.engines.emulated_answers`."""

from __future__ import annotations

import numpy as np
import pytest

from tiderl.engines.emulated_answers import EmulatedAnswers, cut
from tiderl.engines.emulated_language import END, NUM_FILLERS, act_id, answer_length, call_id, read_act

STEPS = 50


def answers(seed: int = 0, rank: int = 1) -> EmulatedAnswers:
    return EmulatedAnswers(seed, rank, STEPS)


def prompt(*ids: int) -> np.ndarray:
    return np.array([3, 1, 4, *ids], np.int32)


def test_an_answer_is_act_fillers_end_at_the_length_asked_for() -> None:
    answer = answers().answer("r", prompt(call_id(20, exact=True)), 10, 100, (END,))
    act, *fillers, end = answer.token_ids.tolist()
    assert answer.finish == "stop" and answer.token_ids.dtype == np.int32
    assert read_act(act).skill == pytest.approx(10 / STEPS)
    assert len(fillers) == 18 and max(fillers) < NUM_FILLERS and end == END


def test_about_is_decided_by_the_act() -> None:
    source, call = answers(), call_id(60, exact=False)
    made = [source.answer("r", prompt(call), 0, 10_000, ()).token_ids for _ in range(30)]
    assert len({tokens.size for tokens in made}) > 10
    assert all(tokens.size == answer_length(call, int(tokens[0])) and tokens[-1] == END for tokens in made)


def test_skill_ends_at_one() -> None:
    answer = answers().answer("r", prompt(call_id(5, exact=True)), STEPS + 7, 100, ())
    assert read_act(int(answer.token_ids[0])).skill == 1.0


@pytest.mark.parametrize("num_made", [1, 2, 12, 19])
def test_what_is_left_after_a_pause_completes_the_answer(num_made: int) -> None:
    call = call_id(20, exact=False)
    whole = answers().answer("r", prompt(call), 3, 1000, (END,)).token_ids.tolist()
    num_made = min(num_made, len(whole) - 1)
    # On another rank, under other weights.
    rest = answers(rank=2).answer("r", prompt(call, *whole[:num_made]), 9, 1000, (END,))
    assert (rest.token_ids.size, rest.finish) == (len(whole) - num_made, "stop")
    assert rest.token_ids[-1] == END and rest.token_ids[:-1].max(initial=0) < NUM_FILLERS


def test_an_answer_that_was_never_ended_ends_at_once() -> None:
    overdue = prompt(call_id(3, exact=True), act_id(0.0, 5), 1, 2, 3, 4)
    assert answers().answer("r", overdue, 0, 100, ()).token_ids.tolist() == [END]


def test_an_answer_of_one_token_is_an_act() -> None:
    answer = answers().answer("r", prompt(call_id(1, exact=True)), STEPS, 100, (END,))
    assert (answer.token_ids.size, answer.finish) == (1, "stop")
    assert read_act(int(answer.token_ids[0])).skill == 1.0


def test_without_a_call_fillers_go_on_to_the_cap() -> None:
    for ids in ([], [call_id(5, exact=True), act_id(0.5, 1), END]):
        answer = answers().answer("r", prompt(*ids), 0, 40, (END,))
        assert (answer.token_ids.size, answer.finish) == (40, "length")
        assert answer.token_ids.max() < NUM_FILLERS


@pytest.mark.parametrize(("cap", "finish"), [(19, "length"), (20, "stop")])
def test_the_cap_comes_first(cap: int, finish: str) -> None:
    answer = answers().answer("r", prompt(call_id(20, exact=True)), 0, cap, ())
    assert (answer.token_ids.size, answer.finish) == (cap, finish)


def test_ignore_stop_goes_on_to_the_cap() -> None:
    answer = answers().answer("r", prompt(call_id(20, exact=True)), 0, 50, None)
    assert (answer.token_ids.size, answer.finish) == (50, "length")
    assert answer.token_ids[19] == END and answer.token_ids[20:].max() < NUM_FILLERS
    assert answers().answer("r", prompt(call_id(20, exact=True)), 0, 8, None).token_ids.size == 8


@pytest.mark.parametrize(
    ("cap", "stop_ids", "kept", "finish"),
    [
        (9, (7,), [5, 6, 7], "stop"),
        (9, (8, 6), [5, 6], "stop"),
        (3, (7,), [5, 6, 7], "stop"),
        (2, (7,), [5, 6], "length"),
        (9, (9,), [5, 6, 7, 8, 7], "stop"),
        (4, (), [5, 6, 7, 8], "length"),
    ],
)
def test_the_first_stop_id_ends_it_and_is_kept(
    cap: int, stop_ids: tuple[int, ...], kept: list[int], finish: str
) -> None:
    answer = cut(np.array([5, 6, 7, 8, 7], np.int32), cap, stop_ids, complete=True)
    assert (answer.token_ids.tolist(), answer.finish) == (kept, finish)


def test_seed_and_rank_decide() -> None:
    def draw(seed: int, rank: int) -> list[int]:
        source = answers(seed, rank)
        return [t for _ in range(3) for t in source.answer("r", prompt(), 0, 20, ()).token_ids.tolist()]

    assert draw(0, 1) == draw(0, 1)
    assert draw(0, 1) != draw(0, 2) and draw(0, 1) != draw(1, 1)
