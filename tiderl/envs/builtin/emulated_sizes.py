"""What emulated environments and agents write where real ones write text: small JSON objects of sizes.

An instruction and an observation say how many tokens they stand for, an action says what the engine drew. `agent/emulated_chat.py`
expands the former into token ids and reads the latter off an answer; `envs/builtin/emulated.py` is the other end.

Invariants (tests/unit/test_emulated_sizes.py):

1. `read` gives back what `text` wrote.
2. Reading is strict: whatever else the text is, a `PayloadError` says what is wrong with it, and no other exception leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiderl.envs import payload
from tiderl.envs.payload import PayloadError, take

#: Seeds of fillers and rolls are below.
MAX_SEED = 2**63
#: Longest text that one size stands for; more than any context.
MAX_TOKENS = 2**24
#: Longest answer that can be called for, and the spread of those of about a length: the emulated language's (`engines`), which
#: environments don't import. `SPREAD` is the sigma of the length's logarithm, whose median the call says.
MAX_ANSWER_TOKENS = 65_535
SPREAD = 0.4


@dataclass(frozen=True, slots=True)
class InstructionSizes:
    """`num_tokens` ids drawn from the seed `filler`. `time_scale`: emulated seconds in a real one, as the server has it."""

    filler: int
    num_tokens: int
    time_scale: float

    def text(self) -> str:
        return _text({"filler": self.filler, "tokens": self.num_tokens, "time_scale": self.time_scale})

    @classmethod
    def read(cls, text: str) -> InstructionSizes:
        """Raises `PayloadError`."""
        fields = _fields(text, "filler", "tokens", "time_scale")
        filler, num_tokens = _take_in(fields, "filler", 0, MAX_SEED - 1), _take_in(fields, "tokens", 0, MAX_TOKENS)
        time_scale = take(fields, "time_scale", float)
        if time_scale <= 0.0:
            raise PayloadError(f"time_scale: must be more than 0, got {time_scale:g}")
        return cls(filler, num_tokens, time_scale)


@dataclass(frozen=True, slots=True)
class ObservationSizes:
    """`num_tokens` ids drawn from the seed `filler`, the last of which calls for an answer of `answer_tokens`.

    `exact`: of just so many, or of about so many. `error`: what was wrong with the last action; for people, it has no tokens.
    """

    filler: int
    num_tokens: int
    answer_tokens: int
    exact: bool
    error: str = ""

    def text(self) -> str:
        fields = {
            "filler": self.filler,
            "tokens": self.num_tokens,
            "answer": self.answer_tokens,
            "exact": self.exact,
        }
        return _text(fields | {"error": self.error} if self.error else fields)

    @classmethod
    def read(cls, text: str) -> ObservationSizes:
        """Raises `PayloadError`."""
        fields = {"error": ""} | _fields(text, "filler", "tokens", "answer", "exact", "error")
        return cls(
            _take_in(fields, "filler", 0, MAX_SEED - 1),
            _take_in(fields, "tokens", 1, MAX_TOKENS),
            _take_in(fields, "answer", 1, MAX_ANSWER_TOKENS),
            take(fields, "exact", bool),
            take(fields, "error", str),
        )


@dataclass(frozen=True, slots=True)
class ActionSizes:
    """What the engine drew for an answer: `skill` in [0, 1], the share of the training behind the model, and a random `roll`."""

    skill: float
    roll: int

    def text(self) -> str:
        return _text({"skill": self.skill, "roll": self.roll})

    @classmethod
    def read(cls, text: str) -> ActionSizes:
        """Raises `PayloadError`."""
        fields = _fields(text, "skill", "roll")
        skill = take(fields, "skill", float)
        if not 0.0 <= skill <= 1.0:
            raise PayloadError(f"skill: must be between 0 and 1, got {skill:g}")
        return cls(skill, _take_in(fields, "roll", 0, MAX_SEED - 1))


def _text(fields: dict[str, Any]) -> str:
    return payload.dump(fields).decode("ascii")


def _fields(text: str, *names: str) -> dict[str, Any]:
    # Surrogates, which a text may hold though UTF-8 does not, are for the JSON to refuse.
    fields = payload.load(text.encode("utf-8", "surrogatepass"))
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise PayloadError(f"{unknown[0][:80]!r}: no such field here; there are {', '.join(names)}")
    return fields


def _take_in(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = take(fields, name, int)
    if not low <= value <= high:
        raise PayloadError(f"{name}: must be between {low} and {high}, got {value}")
    return value
