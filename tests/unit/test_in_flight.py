"""Forwards in flight: a ticket is good once, failures keep it, a step's end voids it."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.errors import TrainerError
from tiderl.trainers.base import InFlight
from tiderl.trainers.in_flight import InFlightForwards, Ticket


class Graph:
    """Something that can be seen to die."""


def finish(forwards: InFlightForwards[Graph], ticket: InFlight) -> Graph:
    with forwards.finishing(ticket) as graph:
        return graph


def is_empty(forwards: InFlightForwards[Graph]) -> bool:
    try:
        forwards.require_none()
    except TrainerError:
        return False
    return True


def test_a_ticket_is_good_once() -> None:
    forwards = InFlightForwards[Graph]()
    graph = Graph()
    ticket = forwards.add(7, graph)
    assert ticket.num_tokens == 7
    assert finish(forwards, ticket) is graph
    with pytest.raises(TrainerError, match="7 tokens that is not in flight"):
        finish(forwards, ticket)


def test_a_ticket_of_another_or_of_a_step_before_is_void() -> None:
    forwards = InFlightForwards[Graph]()
    ticket = forwards.add(7, Graph())
    forwards.drop()
    forwards.add(7, Graph())
    for void in (ticket, Ticket(7), InFlightForwards[Graph]().add(7, Graph())):
        with pytest.raises(TrainerError, match="not in flight"):
            finish(forwards, void)


def test_a_backward_that_fails_stays_in_flight() -> None:
    forwards = InFlightForwards[Graph]()
    ticket = forwards.add(7, Graph())
    with pytest.raises(ZeroDivisionError), forwards.finishing(ticket):
        raise ZeroDivisionError
    with pytest.raises(TrainerError, match="1 micro-batches"):
        forwards.require_none()
    finish(forwards, ticket)
    forwards.require_none()


def test_what_is_finished_or_dropped_is_not_held() -> None:
    forwards = InFlightForwards[Graph]()
    graphs = [Graph() for _ in range(3)]
    seen = [weakref.ref(graph) for graph in graphs]
    tickets = [forwards.add(1, graph) for graph in graphs]
    del graphs
    finish(forwards, tickets[1])
    assert [graph() is None for graph in seen] == [False, True, False]
    forwards.drop()
    assert [graph() is None for graph in seen] == [True, True, True]
    forwards.require_none()


@given(st.lists(st.tuples(st.sampled_from(["add", "finish", "fail", "drop"]), st.integers(0, 5))))
def test_it_holds_what_was_added_and_neither_finished_nor_dropped(moves: list[tuple[str, int]]) -> None:
    forwards, wanted = InFlightForwards[Graph](), dict[InFlight, Graph]()
    for move, i in moves:
        ticket = list(wanted)[i] if i < len(wanted) else None
        if move == "add":
            graph = Graph()
            wanted[forwards.add(i, graph)] = graph
        elif move == "drop":
            forwards.drop()
            wanted.clear()
        elif ticket is not None and move == "finish":
            assert finish(forwards, ticket) is wanted.pop(ticket)
        elif ticket is not None:
            with pytest.raises(ZeroDivisionError), forwards.finishing(ticket) as graph:
                assert graph is wanted[ticket]
                raise ZeroDivisionError
        assert is_empty(forwards) == (not wanted)
