"""When a request to an environment server is sent again.

Invariants (tests/integration/test_env_client.py):

1. The pause before the next attempt grows up to a bound, is spread so that many clients don't come back at once, and is never
   shorter than what the server asks for with Retry-After, up to a bound.
2. The pause is the same for the same request id and attempt.

Source: paper Appendix B.1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to send a request again."""

    #: With the pauses below, a server that is restarted in ten seconds goes unnoticed.
    max_attempts: int = 8
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    #: Retry-After is honoured up to this.
    max_retry_after_s: float = 30.0

    def pause_s(self, request_id: str, attempt: int, retry_after_s: float) -> float:
        """The pause after the failed `attempt` (from 0): exponential, spread by up to half; the same for the same id."""
        ceiling_s = min(self.first_pause_s * 2.0**attempt, self.max_pause_s)
        digest = hashlib.blake2b(f"{request_id}/{attempt}".encode(), digest_size=4).digest()
        jitter = int.from_bytes(digest, "big") / 2**32
        return max(ceiling_s * (0.5 + 0.5 * jitter), min(retry_after_s, self.max_retry_after_s))


class AttemptFailed(Exception):
    """One attempt came to nothing. `status` is 0 where there was no answer."""

    def __init__(self, status: int, message: str, *, again: bool, retryable: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.again = again
        self.retryable = retryable
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.args[0]}" if self.status else self.args[0]
