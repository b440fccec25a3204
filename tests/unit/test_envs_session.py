"""The session table: a state machine against a model of what must hold, and each rule by example."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from tiderl.envs import session as session_module
from tiderl.envs.payload import ErrorKind, Refusal, StartRequest
from tiderl.envs.session import Session, SessionTable

LEASE_S = 10.0
PAUSE_LEASE_S = 100.0
GONE = Refusal(ErrorKind.UNKNOWN_SESSION, "gone")


def start(table: SessionTable[str, str], name: str, now_s: float = 0.0) -> Session[str, str]:
    request = StartRequest(f"start {name}", "env", "train", 0)
    assert table.recall_start(request) is None
    table.record_start(request, f"answer {name}")
    session: Session[str, str] = Session(name, request.request_id, 0, "worker", now_s)
    table.add(session)
    return session


def small_table() -> SessionTable[str, str]:
    return SessionTable(2, LEASE_S, PAUSE_LEASE_S)


def test_a_start_is_recalled_until_its_session_departs() -> None:
    table = small_table()
    session = start(table, "a")
    request = StartRequest("start a", "env", "train", 0)
    assert table.recall_start(request) == "answer a"
    with pytest.raises(Refusal) as refusal:
        table.recall_start(StartRequest("start a", "env", "train", 1))
    assert refusal.value.kind is ErrorKind.BAD_REQUEST
    assert table.depart(session, GONE)
    assert not table.depart(session, GONE)
    with pytest.raises(Refusal) as refusal:
        table.recall_start(request)
    assert refusal.value is GONE


def test_an_abandoned_start_frees_its_place_and_its_id() -> None:
    table = small_table()
    request = StartRequest("r", "env", "train", 0)
    for _ in range(3):
        assert table.recall_start(request) is None
        table.record_start(request, "answer")
        table.abandon_start(request)
    assert table.num_active == 0


def test_a_reused_request_id_with_another_action_is_refused() -> None:
    session = start(small_table(), "a")
    session.record("r", 0, "go", "answer")
    assert session.recall("r", 0, "go") == "answer"
    for turn, action in ((0, "stop"), (1, "go")):
        with pytest.raises(Refusal) as refusal:
            session.recall("r", turn, action)
        assert refusal.value.kind is ErrorKind.BAD_REQUEST


def test_a_pause_that_arrives_again_after_the_resume_does_nothing() -> None:
    session = start(small_table(), "a")
    session.set_paused(True, "pause", 1.0)
    session.set_paused(False, "resume", 2.0)
    session.set_paused(True, "pause", 3.0)
    assert not session.paused


def test_a_resume_that_arrives_again_after_the_next_pause_does_nothing() -> None:
    session = start(small_table(), "a")
    session.set_paused(True, "pause 1", 1.0)
    session.set_paused(False, "resume", 2.0)
    session.set_paused(True, "pause 2", 3.0)
    session.set_paused(False, "resume", 4.0)
    assert session.paused


def test_an_action_resumes() -> None:
    session = start(small_table(), "a")
    session.set_paused(True, "pause", 1.0)
    session.record("r", 0, "go", "answer")
    assert not session.paused


def test_the_reason_of_an_end_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_DEPARTED", 2)
    table = small_table()
    for name in "abc":
        table.depart(start(table, name), GONE)
    with pytest.raises(Refusal, match="was the server restarted"):
        table.get("a")
    for name in "bc":
        with pytest.raises(Refusal, match="gone"):
            table.get(name)


class SessionTableMachine(RuleBasedStateMachine):
    """Sessions come, act, pause and fall silent; a dictionary of deadlines says which must still be there."""

    sessions = Bundle("sessions")
    CAPACITY = 3

    @initialize()
    def begin(self) -> None:
        self.table: SessionTable[str, str] = SessionTable(self.CAPACITY, LEASE_S, PAUSE_LEASE_S)
        self.now_s = 0.0
        self.count = 0
        self.alive: dict[str, Session[str, str]] = {}
        self.paused: dict[str, bool] = {}
        self.heard_s: dict[str, float] = {}
        self.busy: set[str] = set()
        self.played: dict[str, list[tuple[str, str]]] = {}

    def unique(self) -> str:
        self.count += 1
        return f"n{self.count}"

    @rule(target=sessions)
    def start(self) -> object:
        name = self.unique()
        if len(self.alive) == self.CAPACITY:
            with pytest.raises(Refusal) as refusal:
                self.table.recall_start(StartRequest(name, "env", "train", 0))
            assert refusal.value.kind is ErrorKind.CAPACITY
            return multiple()
        self.alive[name] = start(self.table, name, self.now_s)
        self.paused[name], self.heard_s[name], self.played[name] = False, self.now_s, []
        return name

    @rule(name=sessions, again=st.booleans(), skip=st.integers(-2, 2))
    def act(self, name: str, again: bool, skip: int) -> None:
        if name not in self.alive:
            return
        session, played = self.table.get(name), self.played[name]
        if again and played:
            request_id, answer = played[-1]
            assert session.recall(request_id, len(played) - 1, "go") == answer
            return
        request_id = self.unique()
        if skip:
            with pytest.raises(Refusal) as refusal:
                session.recall(request_id, len(played) + skip, "go")
            assert refusal.value.kind is ErrorKind.WRONG_TURN
            return
        assert session.recall(request_id, len(played), "go") is None
        session.record(request_id, len(played), "go", f"answer {request_id}")
        session.heard_s = self.heard_s[name] = self.now_s
        self.paused[name] = False
        played.append((request_id, f"answer {request_id}"))

    @rule(name=sessions, paused=st.booleans())
    def pause(self, name: str, paused: bool) -> None:
        if name in self.alive:
            self.table.get(name).set_paused(paused, self.unique(), self.now_s)
            self.paused[name], self.heard_s[name] = paused, self.now_s

    @rule(name=sessions, busy=st.booleans())
    def work(self, name: str, busy: bool) -> None:
        if name in self.alive:
            self.alive[name].num_in_progress = int(busy)
            self.busy.add(name) if busy else self.busy.discard(name)

    @rule(name=consumes(sessions))
    def end(self, name: str) -> None:
        if session := self.alive.pop(name, None):
            assert self.table.depart(session, GONE)
        with pytest.raises(Refusal):
            self.table.get(name)

    @rule(seconds=st.sampled_from([1.0, 5.0, 9.0, 10.0, 50.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        overdue = {
            name
            for name in self.alive
            if name not in self.busy
            and self.now_s - self.heard_s[name] >= (PAUSE_LEASE_S if self.paused[name] else LEASE_S)
        }
        assert {session.session_id for session in self.table.expire(self.now_s)} == overdue
        for name in overdue:
            del self.alive[name]

    @invariant()
    def the_counts_are_right(self) -> None:
        num_paused = sum(self.paused[name] for name in self.alive)
        assert (self.table.num_active, self.table.num_paused) == (len(self.alive) - num_paused, num_paused)
        assert {session.session_id for session in self.table.of_worker("worker")} == set(self.alive)


TestSessionTable = SessionTableMachine.TestCase
