"""Latency that an environment server adds to its steps, so that fast environments can stand in for slow ones.

Invariants (tests/unit/test_envs_latency.py):

1. The delay of a turn depends on the latency's seed, the session's seed and the turn alone: a run can be repeated.
2. `lognormal:MEDIAN_S,SIGMA,MAX_S` has that median, sigma is the standard deviation of its logarithm, and no delay exceeds MAX_S.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from tiderl.errors import ConfigError

FORMS = "none, constant:SECONDS or lognormal:MEDIAN_S,SIGMA,MAX_S"


@dataclass(frozen=True, slots=True)
class Latency:
    """A capped log-normal; `sigma` 0.0 is a constant."""

    median_s: float = 0.0
    sigma: float = 0.0
    max_s: float = 0.0
    seed: int = 0

    def delay_s(self, session_seed: int, turn: int) -> float:
        """Seconds to wait before the answer to `turn` of a session that was started with `session_seed`."""
        if self.sigma == 0.0:
            return self.median_s
        # Seeding with text goes through SHA-512: equal on every machine, and no two neighbours are alike.
        normal = random.Random(f"{self.seed}/{session_seed}/{turn}").gauss(0.0, 1.0)
        # Compared as logarithms: a wide sigma would overflow exp.
        exponent = min(math.log(self.median_s) + self.sigma * normal, math.log(self.max_s))
        return min(math.exp(exponent), self.max_s)


def parse(text: str, seed: int = 0) -> Latency:
    """Read `none`, `constant:S` or `lognormal:MEDIAN_S,SIGMA,MAX_S`. Raises `ConfigError` (path `latency`)."""
    form, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        raise ConfigError("latency", f"cannot read the numbers of {text!r}; it is {FORMS}") from None
    if not all(math.isfinite(number) and number >= 0.0 for number in numbers):
        raise ConfigError("latency", f"the numbers of {text!r} must be finite and not negative")
    match form, numbers:
        case "none", []:
            return Latency(seed=seed)
        case "constant", [constant_s]:
            return Latency(constant_s, 0.0, constant_s, seed)
        case "lognormal", [median_s, sigma, max_s]:
            if not 0.0 < median_s <= max_s:
                raise ConfigError("latency", f"{text!r} needs 0 < MEDIAN_S <= MAX_S")
            return Latency(median_s, sigma, max_s, seed)
    raise ConfigError("latency", f"cannot read {text!r}; it is {FORMS}")
