"""What an environment is (for those who write one) and what its server and client say to each other over HTTP.

An `Environment` plays one episode. It is created by its class's constructor in a worker process of the environment server,
used by one session, and thrown away. It is synchronous and knows nothing of HTTP, leases or retries.

The wire is JSON over HTTP (`server.py` and `client.py` are its two ends): POST `/start`, `/observation`, `/end`, `/pause`,
`/resume`; GET `/health`, `/capacity`, `/tasks`, `/task_types`. Errors are `{"error": {"kind", "message", "retryable"}}`.

Source: paper Appendix B.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as the environment shows it."""

    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent sees: text, and images in the order in which they are shown before the text."""

    text: str
    images: tuple[ImagePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A fresh episode. `instruction` goes into the system message, `observation` is the first user message."""

    instruction: str
    observation: Observation
    task_type: str
    #: Seconds that the server waits before it answers: how an environment stands in for a slower one. Not part of the answer.
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stepped:
    """The answer to one action. `reward` is the episode's reward so far: the last one stated counts."""

    observation: Observation
    reward: float
    done: bool
    success: bool
    #: As in `Started`.
    delay_s: float = 0.0


class Environment(Protocol):
    """One episode of one environment. Same `split` and `seed`: same initial state, same answers to the same actions."""

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        """Set the episode up. Raises `ValueError` for an unknown split or option (the client's mistake)."""

    def step(self, action: str) -> Stepped:
        """Play the agent's text. A malformed action is an observation that says so, not an exception."""

    def close(self) -> None:
        """Free what the episode holds."""


class EnvironmentClass(Protocol):
    """The class behind a name: makes episodes, and says what tasks there are."""

    def __call__(self) -> Environment: ...

    def num_tasks(self, split: str) -> int:
        """How many seeds the split has (seeds 0 .. n-1; splits never share an initial state on purpose). A static method."""

    def task_type(self, split: str, seed: int) -> str:
        """The type of a task, known without starting it. A static method; must be cheap."""
