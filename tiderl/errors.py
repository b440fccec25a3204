"""The exception tree: every error names what was wrong, where, and what to do about it.

`TideError` is what TideRL raises on purpose; anything else that escapes is a bug. The command line turns `UserError`s into
one paragraph and exit code 2, everything else into a traceback and exit code 1.
"""

from __future__ import annotations


class TideError(Exception):
    """Base of all errors that TideRL raises on purpose."""


class UserError(TideError):
    """The user can mend this: a setting, a path, a server that isn't there. One paragraph, exit code 2."""


class ConfigError(UserError):
    """A setting is wrong. The message starts with its dotted path (`train.steps: …`) and says what would be right."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class ModelError(UserError):
    """A model folder is missing, broken, or does not fit the job."""


class EnvironmentUnreachable(UserError):
    """No environment server answers as it should at the start of a job."""


class IllegalEvent(TideError):
    """The scheduling core was sent an event that its state does not allow; the state is unchanged."""


class WireError(TideError):
    """A message could not be decoded or violates the protocol."""


class EngineError(TideError):
    """The generation engine failed, or was asked for something it cannot do."""


class TrainerError(TideError):
    """The trainer failed, or was asked for something it cannot do."""


class WeightMismatch(TideError):
    """Received weights differ from what was sent or expected: a name, a shape, a checksum or the log-prob canary."""


class WaitTimeout(TideError):
    """A bounded wait has passed its bound. The message says who waited for whom, and which setting is the bound."""

    def __init__(self, waiter: str, waited_for: str, bound_s: float, setting: str) -> None:
        super().__init__(f"{waiter} waited {bound_s:g} s for {waited_for} in vain (bound: {setting})")
        self.waiter = waiter
        self.waited_for = waited_for
        self.bound_s = bound_s
        self.setting = setting


class EnvironmentFailure(TideError):
    """An environment session failed. Never a zero reward: the trajectory is retried, then left out, and counted."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable
