"""Which sessions an environment server holds, whose turn it is in each, and when one has been silent for too long.

Bookkeeping only: no clock (every method that needs one takes `now_s`), no sockets, no processes. `service.py` drives it.

Invariants (tests/unit/test_envs_session.py):

1. Live sessions and starts in progress never exceed `capacity`; paused sessions count, for they hold an environment.
2. A request id that was seen gives its recorded answer and has no second effect. Held are: the answer to a live session's
   start, to its last action, and the ids of its last `MAX_CONTROL_IDS` pauses and resumes: memory is bounded by the capacity.
3. A turn is played once: an action for any turn but the next one, under a new request id, is refused.
4. A session that hears nothing for `lease_s` ends, a paused one after `pause_lease_s`. While a request is in progress no
   lease runs. An action resumes a paused session; a pause that arrives a second time, after a resume, does nothing.
5. A request to a session that has ended is refused with the reason of its end (the last `MAX_DEPARTED` are remembered).

Source: paper §4.1, Appendix B.1 (pause and resume of the inactivity clock).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tiderl.envs.payload import ErrorKind, Refusal, StartRequest

WorkerT = TypeVar("WorkerT")
AnswerT = TypeVar("AnswerT")

MAX_CONTROL_IDS = 8
MAX_DEPARTED = 4096


@dataclass(frozen=True, slots=True)
class _Recorded(Generic[AnswerT]):
    request_id: str
    turn: int
    action: str
    answer: AnswerT


@dataclass(slots=True, eq=False)
class Session(Generic[WorkerT, AnswerT]):
    """One live episode. `AnswerT` is what stands for an answer that may still be in the making."""

    session_id: str
    start_request_id: str
    seed: int
    worker: WorkerT
    heard_s: float
    paused: bool = False
    done: bool = False
    num_in_progress: int = 0
    next_turn: int = 0
    _last: _Recorded[AnswerT] | None = None
    _control_ids: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_CONTROL_IDS))

    def recall(self, request_id: str, turn: int, action: str) -> AnswerT | None:
        """The recorded answer, or None if the action is to be played now. Raises `Refusal`."""
        last = self._last
        if last is not None and last.request_id == request_id:
            if (last.turn, last.action) != (turn, action):
                raise Refusal(
                    ErrorKind.BAD_REQUEST,
                    f"request {request_id} was turn {last.turn} with another action: a new request needs a new request_id",
                )
            return last.answer
        if turn != self.next_turn:
            raise Refusal(
                ErrorKind.WRONG_TURN,
                f"session {self.session_id} expects turn {self.next_turn}, got {turn}; "
                "an earlier turn is answered again only to the request_id that played it last",
            )
        if self.done:
            raise Refusal(ErrorKind.BAD_REQUEST, f"session {self.session_id}: the episode is over; send /end")
        return None

    def record(self, request_id: str, turn: int, action: str, answer: AnswerT) -> None:
        """The action is being played: its answer takes the place of the last one. Resumes a paused session."""
        self._last = _Recorded(request_id, turn, action, answer)
        self.next_turn = turn + 1
        self.paused = False

    def set_paused(self, paused: bool, request_id: str, now_s: float) -> None:
        """Pause or resume, once per request id; either way the session has been heard."""
        self.heard_s = now_s
        if request_id not in self._control_ids:
            self._control_ids.append(request_id)
            self.paused = paused


class SessionTable(Generic[WorkerT, AnswerT]):
    """All sessions of one server."""

    def __init__(self, capacity: int, lease_s: float, pause_lease_s: float) -> None:
        self.capacity = capacity
        self.lease_s = lease_s
        self.pause_lease_s = pause_lease_s
        self._sessions: dict[str, Session[WorkerT, AnswerT]] = {}
        self._starts: dict[str, tuple[Hashable, AnswerT]] = {}
        #: Why a session ended, by ("session", its id) and ("start", the request id of its start).
        self._departed: OrderedDict[tuple[str, str], Refusal] = OrderedDict()

    @property
    def num_paused(self) -> int:
        return sum(session.paused for session in self._sessions.values())

    @property
    def num_active(self) -> int:
        """Sessions that are not paused, those included that are being started."""
        return len(self._starts) - self.num_paused

    def recall_start(self, request: StartRequest) -> AnswerT | None:
        """The recorded answer to a start, or None if there is to be a new session. Raises `Refusal`."""
        reason = self._departed.get(("start", request.request_id))
        if reason is not None:
            raise reason
        recorded = self._starts.get(request.request_id)
        if recorded is not None:
            if recorded[0] != _fingerprint(request):
                raise Refusal(
                    ErrorKind.BAD_REQUEST,
                    f"request {request.request_id} started another task: a new request needs a new request_id",
                )
            return recorded[1]
        if len(self._starts) >= self.capacity:
            raise Refusal(
                ErrorKind.CAPACITY,
                f"all {self.capacity} sessions are in use ({self.num_paused} of them paused); "
                "end some, add servers, or raise --capacity",
            )
        return None

    def record_start(self, request: StartRequest, answer: AnswerT) -> None:
        """A session is being started: it holds its place from now on, until `abandon_start` or `depart`."""
        assert len(self._starts) < self.capacity, "recall_start comes first"
        self._starts[request.request_id] = (_fingerprint(request), answer)

    def abandon_start(self, request: StartRequest) -> None:
        """No session came of it; the same request id may try again."""
        del self._starts[request.request_id]

    def add(self, session: Session[WorkerT, AnswerT]) -> None:
        assert session.start_request_id in self._starts, "record_start comes first"
        self._sessions[session.session_id] = session

    def get(self, session_id: str) -> Session[WorkerT, AnswerT]:
        """The live session of that id. Raises `Refusal`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise self._departed.get(("session", session_id)) or Refusal(
                ErrorKind.UNKNOWN_SESSION, f"there is no session {session_id} here: was the server restarted?"
            )
        return session

    def depart(self, session: Session[WorkerT, AnswerT], reason: Refusal) -> bool:
        """Take the session out; later requests to it are refused with `reason`. False if it was out already."""
        if self._sessions.pop(session.session_id, None) is None:
            return False
        del self._starts[session.start_request_id]
        self._departed["session", session.session_id] = reason
        self._departed["start", session.start_request_id] = reason
        while len(self._departed) > 2 * MAX_DEPARTED:
            self._departed.popitem(last=False)
        return True

    def of_worker(self, worker: WorkerT) -> list[Session[WorkerT, AnswerT]]:
        return [session for session in self._sessions.values() if session.worker is worker]

    def expire(self, now_s: float) -> list[Session[WorkerT, AnswerT]]:
        """Take out all sessions whose lease has run out, and return them."""
        expired = []
        for session in list(self._sessions.values()):
            bound_s = self.pause_lease_s if session.paused else self.lease_s
            if session.num_in_progress == 0 and now_s - session.heard_s >= bound_s:
                setting = "--pause-lease-s" if session.paused else "--lease-s"
                message = f"session {session.session_id} heard nothing for {bound_s:g} s ({setting}) and was ended"
                self.depart(session, Refusal(ErrorKind.UNKNOWN_SESSION, message))
                expired.append(session)
        return expired


def _fingerprint(request: StartRequest) -> Hashable:
    return (request.env, request.split, request.seed, repr(request.options))
