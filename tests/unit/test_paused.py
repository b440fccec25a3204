"""The leases of paused tasks: the five invariants of `coordinator.paused`, in virtual time, against servers that check their side.

`Server` is an environment server as far as leases go. It fails the test when a session hears two requests at once, or a `/pause`
after its task was delivered; it ends a session that was silent for its whole lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.virtual_time import run
from tiderl.coordinator import paused
from tiderl.coordinator.paused import MAX_ENDS, MAX_RENEWALS, PausedTasks
from tiderl.errors import EnvironmentFailure
from tiderl.types import GroupId, GroupSpec, PausedTask, SessionHandle, TaskId, TaskKind

LEASE_S = 3600.0
INTERVAL_S = LEASE_S / 3
REQUEST_S = 60.0


def now_s() -> float:
    return asyncio.get_running_loop().time()


def task_of(number: int, lease_s: float = LEASE_S) -> PausedTask:
    nothing = np.zeros(0, np.int32)
    return PausedTask(
        task_id=TaskId(number),
        group=GroupSpec(GroupId(0), TaskKind.TRAIN, "env", "train", 0, "type"),
        attempt=1,
        session=SessionHandle("http://server", f"s{number}", 1, 300.0, lease_s),
        token_ids=nothing,
        generated=np.zeros(0, np.bool_),
        log_probs=np.zeros(0, np.float32),
        weight_versions=nothing,
        turns=(),
        turn_start=0,
        generate_s=0.0,
        cached_tokens=0,
        played_s=0.0,
    )


class Server:
    """Sessions by id. `answer_s` is how long a request takes (a number, or a function of the session's id)."""

    def __init__(self, answer_s: float | Callable[[str], float] = 0.01) -> None:
        self._answer_s = answer_s if callable(answer_s) else lambda session_id: answer_s
        #: When each paused session was heard last; delivered, ended and expired ones are not here.
        self.heard_s: dict[str, float] = {}
        self.lease_s: dict[str, float] = {}
        self.heard: list[tuple[float, str, str]] = []
        self.busy: set[str] = set()
        self.max_busy = 0
        self.ended: list[str] = []
        self.expired: list[str] = []

    def open(self, task: PausedTask) -> PausedTask:
        """A rank has just paused this session."""
        self.heard_s[task.session.session_id] = now_s()
        self.lease_s[task.session.session_id] = task.session.pause_lease_s
        return task

    def delivered(self, task: PausedTask) -> None:
        """A rank resumes the session."""
        assert task.session.session_id not in self.busy, "handed out while it hears a request"
        self.expire()
        self.heard_s.pop(task.session.session_id, None)

    def expire(self) -> None:
        for session_id, heard_s in list(self.heard_s.items()):
            if now_s() - heard_s >= self.lease_s[session_id]:
                del self.heard_s[session_id]
                self.expired.append(session_id)

    def adopt(self, handle: SessionHandle) -> Session:
        return Session(self, handle.session_id)

    async def hear(self, session_id: str, what: str) -> None:
        assert session_id not in self.busy, f"{session_id} hears two requests at once"
        self.heard.append((now_s(), session_id, what))
        self.busy.add(session_id)
        self.max_busy = max(self.max_busy, len(self.busy))
        try:
            await asyncio.sleep(self._answer_s(session_id))
        finally:
            self.busy.discard(session_id)
        self.expire()

    def times(self, what: str) -> list[float]:
        return [heard_s for heard_s, _, word in self.heard if word == what]


class Session:
    def __init__(self, server: Server, session_id: str) -> None:
        self._server, self._id = server, session_id

    async def pause(self) -> None:
        await self._server.hear(self._id, "pause")
        if self._id not in self._server.heard_s:
            raise EnvironmentFailure(f"there is no session {self._id} here", retryable=True)
        self._server.heard_s[self._id] = now_s()

    async def end(self) -> None:
        await self._server.hear(self._id, "end")
        assert self._id not in self._server.ended, "ended twice"
        self._server.heard_s.pop(self._id, None)
        self._server.ended.append(self._id)


class Desk:
    """A `PausedTasks` with a server, and a core that forgets lost tasks as soon as it hears of them."""

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server()
        self.lost: list[TaskId] = []
        self.tasks = PausedTasks(self.server, REQUEST_S, self.on_lost)
        self.delivered: list[TaskId] = []

    def on_lost(self, task_id: TaskId, detail: str) -> None:
        assert "there is no session" in detail
        if self.tasks.forget(task_id):
            self.lost.append(task_id)

    def keep(self, *numbers: int, lease_s: float = LEASE_S) -> None:
        for number in numbers:
            self.tasks.keep(self.server.open(task_of(number, lease_s)))

    def take(self, number: int) -> None:
        def deliver(task: PausedTask) -> None:
            self.server.delivered(task)
            self.delivered.append(task.task_id)

        self.tasks.take(TaskId(number), deliver)


def in_virtual_time(play: Callable[[], Coroutine[Any, Any, Desk]], *, close_s: float = 5.0) -> Desk:
    """Play, close, and make sure that nothing has gone wrong unseen and nothing is left."""

    async def whole() -> Desk:
        desk = await play()
        desk.tasks.check()
        began_s = now_s()
        await desk.tasks.close(close_s)
        assert now_s() - began_s <= close_s
        desk.tasks.check()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left behind"
        assert len(desk.tasks) == 0
        return desk

    return run(whole())


def test_invariant_1_a_lease_is_renewed_three_times_however_long_the_pause() -> None:
    async def play() -> Desk:
        desk = Desk()
        desk.keep(0)
        await asyncio.sleep(10 * LEASE_S + 1.0)
        return desk

    desk = in_virtual_time(play)
    assert desk.server.times("pause") == pytest.approx([INTERVAL_S * n for n in range(1, 31)])
    assert desk.server.expired == [] and desk.lost == []


def test_invariant_1_every_session_by_its_own_lease() -> None:
    async def play() -> Desk:
        desk = Desk()
        desk.keep(0, lease_s=900.0)
        await asyncio.sleep(10.0)
        desk.keep(1, lease_s=30.0)  # is due before the one that is being waited for
        desk.keep(2, lease_s=90.0)
        await asyncio.sleep(61.0)
        return desk

    heard = in_virtual_time(play).server.heard
    pauses = [(round(heard_s, 6), session_id) for heard_s, session_id, what in heard if what == "pause"]
    # From 10 s on: every 10 s of one, every 30 s of the other, 300 s of the first.
    assert sorted(pauses) == [
        (20.0, "s1"), (30.0, "s1"), (40.0, "s1"), (40.0, "s2"), (50.0, "s1"), (60.0, "s1"), (70.0, "s1"), (70.0, "s2"),
    ]  # fmt: skip


def test_invariant_1_a_server_without_a_lease_worth_the_name_is_not_asked_in_a_tight_loop() -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=0.0))
        desk.keep(0, lease_s=1e-9)
        await asyncio.sleep(1.0)
        return desk

    assert len(in_virtual_time(play).server.times("pause")) <= 1.0 / paused.MIN_INTERVAL_S


def test_invariant_2_a_task_leaves_after_the_renewal_in_flight_and_its_orders_behind_it() -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=2.0))
        desk.keep(0, 1)
        await asyncio.sleep(INTERVAL_S + 0.5)
        assert desk.server.busy == {"s0", "s1"}
        seen: list[str] = []
        desk.take(0)
        desk.tasks.after_leaving(TaskId(0), lambda: seen.append(f"pause {desk.delivered}"))
        desk.tasks.after_leaving(TaskId(0), lambda: seen.append(f"cancel {desk.delivered}"))
        desk.tasks.after_leaving(TaskId(7), lambda: seen.append(f"another task {desk.delivered}"))
        assert desk.delivered == [] and seen == ["another task []"]
        await asyncio.sleep(1.0)
        assert desk.delivered == []
        await asyncio.sleep(1.0)
        assert desk.delivered == [0]
        assert seen == ["another task []", "pause [0]", "cancel [0]"]
        desk.tasks.after_leaving(TaskId(0), lambda: seen.append("it has left"))
        assert seen[-1] == "it has left"
        await asyncio.sleep(3 * LEASE_S)
        return desk

    desk = in_virtual_time(play)
    assert [session_id for _, session_id, what in desk.server.heard if what == "pause"].count("s0") == 1


def test_without_a_renewal_in_flight_a_task_leaves_at_once() -> None:
    async def play() -> Desk:
        desk = Desk()
        desk.keep(0)
        await asyncio.sleep(INTERVAL_S / 2)
        desk.take(0)
        assert desk.delivered == [0]
        await asyncio.sleep(3 * LEASE_S)
        assert desk.server.heard == []
        return desk

    in_virtual_time(play)


def test_a_task_that_comes_back_is_renewed_by_its_new_pause() -> None:
    async def play() -> Desk:
        desk = Desk()
        desk.keep(0)
        await asyncio.sleep(INTERVAL_S - 100.0)
        desk.take(0)
        await asyncio.sleep(50.0)
        desk.keep(0)
        await asyncio.sleep(INTERVAL_S + 10.0)
        return desk

    assert in_virtual_time(play).server.times("pause") == pytest.approx([2 * INTERVAL_S - 50.0])


def test_invariant_3_a_lost_session_is_reported_once() -> None:
    async def play() -> Desk:
        desk = Desk()
        desk.keep(0, 1)
        del desk.server.heard_s["s0"]
        await asyncio.sleep(3 * LEASE_S)
        assert len(desk.tasks) == 1
        return desk

    desk = in_virtual_time(play)
    assert desk.lost == [0]
    assert desk.server.ended == ["s1"], "what is gone need not be ended"


@pytest.mark.parametrize("decision", ["resume", "end"])
def test_invariant_3_what_the_core_decides_before_it_hears_of_a_loss_comes_first(decision: str) -> None:
    async def play() -> Desk:
        desk = Desk()
        told: list[TaskId] = []
        desk.tasks = PausedTasks(desk.server, REQUEST_S, lambda task_id, detail: told.append(task_id))
        desk.keep(0)
        desk.server.heard_s.clear()
        await asyncio.sleep(INTERVAL_S + 1.0)
        assert told == [0] and len(desk.tasks) == 1, "it stays until the core hears of it"
        if decision == "resume":
            desk.take(0)
        else:
            desk.tasks.end([TaskId(0)])
        assert not desk.tasks.forget(TaskId(0))
        return desk

    desk = in_virtual_time(play)
    assert desk.delivered == ([0] if decision == "resume" else [])
    assert desk.server.ended == []


def test_invariant_3_a_loss_that_is_found_while_a_task_leaves_is_for_its_rank_to_find() -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=2.0))
        desk.keep(0, 1)
        desk.server.heard_s.clear()
        await asyncio.sleep(INTERVAL_S + 1.0)
        desk.take(0)
        desk.tasks.end([TaskId(1)])
        await asyncio.sleep(10.0)
        return desk

    desk = in_virtual_time(play)
    assert desk.delivered == [0] and desk.lost == [] and desk.server.ended == []


def test_a_task_that_is_not_lost_is_not_forgotten() -> None:
    async def play() -> Desk:
        desk = Desk()
        desk.keep(0)
        assert not desk.tasks.forget(TaskId(0)) and not desk.tasks.forget(TaskId(1))
        assert len(desk.tasks) == 1
        return desk

    in_virtual_time(play)


def test_invariant_4_renewals_and_ends_in_flight_are_bounded() -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=1.0))
        desk.keep(*range(200))
        await asyncio.sleep(INTERVAL_S + 60.0)
        assert desk.server.max_busy == MAX_RENEWALS
        assert len(desk.server.times("pause")) == 200
        desk.server.max_busy = 0
        desk.tasks.end([TaskId(n) for n in range(100)])
        await asyncio.sleep(60.0)
        assert desk.server.max_busy == MAX_ENDS
        assert len(desk.server.ended) == 100
        return desk

    assert len(in_virtual_time(play).server.ended) == 200


def test_entries_of_tasks_that_have_left_do_not_pile_up() -> None:
    async def play() -> Desk:
        desk = Desk()
        for number in range(10_000):
            desk.keep(number)
            desk.take(number)
        assert len(desk.tasks._due) <= 2 * MAX_RENEWALS
        return desk

    in_virtual_time(play)


def test_invariant_5_a_renewal_that_is_not_answered_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=1e9))
        desk.keep(0, 1)
        await asyncio.sleep(INTERVAL_S + 1.0)
        desk.take(0)
        desk.tasks.end([TaskId(1)])
        await asyncio.sleep(REQUEST_S - 1.0)
        assert desk.delivered == []
        await asyncio.sleep(2.0)
        assert desk.delivered == [0]
        await asyncio.sleep(REQUEST_S)
        assert desk.server.busy == set()
        return desk

    with caplog.at_level(logging.WARNING):
        in_virtual_time(play)
    assert "session s0 on http://server (task 0): no answer to a renewal of its lease in 60 s" in caplog.text
    assert "session s1 on http://server (task 1) is left to its lease: no answer to its end" in caplog.text


def test_invariant_5_a_renewal_that_is_swallowed_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    """The first two are never answered; the third finds the session, just in time."""
    answers = iter([1e9, 1e9])

    async def play() -> Desk:
        desk = Desk(Server(answer_s=lambda session_id: next(answers, 0.01)))
        desk.keep(0, lease_s=LEASE_S)
        desk.server.lease_s["s0"] = LEASE_S + 1.0  # to the third answer, not to the third request
        await asyncio.sleep(4 * INTERVAL_S + 10.0)
        return desk

    desk = in_virtual_time(play)
    assert desk.lost == []
    assert desk.server.times("pause") == pytest.approx([INTERVAL_S * n for n in (1, 2, 3, 4)])
    assert caplog.text.count("asking again") == 2


@pytest.mark.parametrize("in_flight", [False, True])
def test_invariant_5_closing_ends_what_is_left_and_what_still_comes(in_flight: bool) -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=1.0))
        desk.keep(0, 1, 2)
        await asyncio.sleep(INTERVAL_S + (0.5 if in_flight else -0.5))
        assert bool(desk.server.busy) == in_flight
        if in_flight:
            desk.take(2)  # its rank is about to leave: there is nobody to deliver it to
        desk.tasks.end_all()
        desk.keep(3)
        await asyncio.sleep(3.0)
        assert sorted(desk.server.ended) == ["s0", "s1", "s2", "s3"], "before anybody waits for it"
        return desk

    desk = in_virtual_time(play)
    assert sorted(desk.server.ended) == ["s0", "s1", "s2", "s3"]
    assert desk.delivered == []


def test_invariant_5_closing_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> Desk:
        desk = Desk(Server(answer_s=1e9))
        desk.keep(0, 1)
        return desk

    with caplog.at_level(logging.WARNING):
        in_virtual_time(play)
    assert "2 requests about paused sessions are unanswered" in caplog.text


def test_closing_without_a_task_is_nothing() -> None:
    async def play() -> Desk:
        return Desk()

    in_virtual_time(play)


def test_a_server_that_this_job_does_not_know_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    class Strict(Server):
        def adopt(self, handle: SessionHandle) -> Session:
            raise EnvironmentFailure("there is no session of that server", retryable=True)

    async def play() -> Desk:
        desk = Desk(Strict())
        desk.keep(0, 1)
        desk.tasks.end([TaskId(1)])
        await asyncio.sleep(LEASE_S)
        return desk

    assert in_virtual_time(play).lost == [0]
    assert "(task 1) is left to its lease: there is no session of that server" in caplog.text


def test_a_bug_in_the_background_is_not_swallowed() -> None:
    class Broken(Server):
        def adopt(self, handle: SessionHandle) -> Session:
            raise KeyError("a bug")

    async def play() -> None:
        desk = Desk(Broken())
        desk.keep(0)
        await asyncio.sleep(LEASE_S)
        try:
            with pytest.raises(KeyError, match="a bug"):
                desk.tasks.check()
        finally:
            await desk.tasks.close(5.0)

    run(play())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "take", "end", "lose", "wait", "wait", "wait"]),
        st.integers(0, 5),
        st.floats(0.0, 40.0),
    ),
    max_size=60,
)


@given(STEPS, st.floats(0.0, 5.0))
def test_whatever_happens_in_whatever_order_every_task_leaves_once_and_no_lease_runs_out(
    steps: list[tuple[str, int, float]], answer_s: float
) -> None:
    """Leases of a minute, requests that take up to a quarter of a renewal's interval, six tasks that come and go."""
    here: set[int] = set()
    came: Counter[int] = Counter()
    lost: set[str] = set()

    async def play() -> Desk:
        desk = Desk(Server(answer_s))
        for what, number, wait_s in steps:
            here.difference_update(desk.lost)
            if what == "wait":
                await asyncio.sleep(wait_s)
            elif what == "keep" and number not in here and f"s{number}" not in desk.server.busy:
                desk.keep(number, lease_s=60.0)
                desk.server.ended = [s for s in desk.server.ended if s != f"s{number}"]
                here.add(number)
                came[number] += 1
            elif what in ("take", "end") and number in here:
                here.discard(number)
                desk.take(number) if what == "take" else desk.tasks.end([TaskId(number)])
                # A task comes back only after its rank has had it, and an ended one never.
                await asyncio.sleep(answer_s + 0.1)
            elif what == "lose" and number in here:
                desk.server.heard_s.pop(f"s{number}", None)
                lost.add(f"s{number}")
        return desk

    # A renewal in flight, and the end behind it.
    desk = in_virtual_time(play, close_s=2.0 * answer_s + 1.0)
    assert desk.server.expired == []
    assert desk.server.heard_s == {}, "no session is left but those that are played"
    for number in here - set(desk.lost):
        assert f"s{number}" in desk.server.ended or f"s{number}" in lost
    assert all(left <= came[number] for number, left in Counter(desk.delivered).items())
