"""The expert for the store: reads what the agent reads, and shops without detours. It warm-starts a model by imitation.

Invariants (tests/unit/test_envs_shop.py):

1. It knows only the instruction and the pages; it earns 1.0 on nearly every task.
"""

from __future__ import annotations

import random
import re

from tiderl.envs.builtin.shop_catalogue import words_of

_GOAL = re.compile(r"Find me a (?P<wanted>.+?), (?P<options>.+), price lower than (?P<price>\d+) dollars\.")
_RESULT = re.compile(r"^\[(?P<number>\d+)\] (?P<title>.+) \$(?P<price>\d+\.\d\d)$", re.MULTILINE)
_OPTION = re.compile(r"^(?P<name>\w+): (?P<values>\[.*\])(?: \(chosen: (?P<chosen>[^)]+)\))?$", re.MULTILINE)


class ShopExpert:
    """Plays one episode: `act` for each observation, in order."""

    def __init__(self, instruction: str, *, haste: float = 0.0, rng: random.Random | None = None) -> None:
        """`instruction` is any text with the goal's sentence in it. Raises `ValueError` if there is none.

        `haste` is how often it buys where it should choose an option first (0 .. 1); above 0 it needs `rng`.
        """
        if haste > 0 and rng is None:
            raise ValueError("a hasty expert needs an rng")
        self._haste, self._rng = haste, rng
        goal = _GOAL.search(instruction)
        if goal is None:
            raise ValueError(f"no goal of the store in {instruction[:200]!r}")
        self._query = f"{goal['wanted']}, {goal['options']}"
        self._wanted = set(words_of(goal["wanted"]))
        self._options = dict(option.split(" ", 1) for option in goal["options"].split(", "))
        self._max_price = float(goal["price"])
        #: Looked at already: the heading of the results page, and the number there.
        self._seen: set[tuple[str, str]] = set()

    def act(self, observation_text: str) -> str:
        """The next action, given the newest page."""
        if "[buy now]" in observation_text:
            return self._at_product(observation_text)
        if "[back to search]" in observation_text:
            return self._at_results(observation_text)
        return f"search[{self._query}]"

    def _at_results(self, page: str) -> str:
        heading = page.partition("\n")[0]
        for result in _RESULT.finditer(page):
            place = (heading, result["number"])
            fits = self._wanted <= set(words_of(result["title"])) and float(result["price"]) < self._max_price
            if fits and place not in self._seen:
                self._seen.add(place)
                return f"click[{result['number']}]"
        # Past the last page there is nothing better to do than to look again.
        return "click[next >]" if "[next >]" in page else "click[back to search]"

    def _at_product(self, page: str) -> str:
        offered = {option["name"]: option for option in _OPTION.finditer(page)}
        if any(
            name not in offered or f"[{value}]" not in offered[name]["values"] for name, value in self._options.items()
        ):
            return "click[< prev]"
        for name, value in self._options.items():
            if offered[name]["chosen"] != value:
                hasty = self._rng is not None and self._rng.random() < self._haste
                return "click[buy now]" if hasty else f"click[{value}]"
        return "click[buy now]"
