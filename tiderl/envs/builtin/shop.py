"""A web store in text: search, look at products, choose options, buy what the instruction asks for.

After WebShop (Yao et al., 2022), whose products need a download; these are invented (`shop_catalogue.py`). Standard library only.

The reward is WebShop's. With the wanted attributes A, options O and price bound p, and the product bought:

    reward = type * (matched attributes + chosen options + [price < p]) / (|A| + |O| + 1)
    type   = 1 for the right kind of product, 0.5 for another kind of the same department, 0.1 otherwise

Invariants (tests/unit/test_envs_shop.py):

1. Same split and seed: same instruction, same answers. No instruction of one split occurs in the other.
2. Every task can be solved: a product exists that earns 1.0, and success is a reward of exactly 1.0.
3. An episode ends with `buy now` or after `max_turns` actions (reward 0.0), whatever text arrives.
4. A page has at most 250 words.
5. The results of a page are numbered from 1: a label is short enough to copy, and means nothing beyond its page.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiderl.envs.builtin.shop_catalogue import CATEGORIES, Product, catalogue
from tiderl.envs.protocol import Observation, Started, Stepped

NUM_TASKS = {"train": 20000, "test": 500}
MAX_TURNS = 20
PAGE_SIZE = 5
MAX_RESULTS = 40
#: Share of all possible instructions that is kept for the test split: one in this many.
TEST_SHARE = 8

RULES = (
    "You are shopping in a web store. Each turn, answer with one action: search[keywords] on the search page, "
    "or click[label] with a label that the page shows in brackets. Choose the options that are asked for, "
    "then click[buy now]."
)

_ACTION = re.compile(r"(search|click)\[([^\[\]]*)\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a task wants. Hidden but for its `text`."""

    category: str
    department: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    max_price_cents: int

    @property
    def text(self) -> str:
        options = "".join(f", {name} {value}" for name, value in self.options)
        wanted = " ".join([*self.attributes, self.category])
        return f"Find me a {wanted}{options}, price lower than {self.max_price_cents // 100} dollars."


def goal_of(split: str, seed: int) -> Goal:
    """The task's goal: drawn until the instruction belongs to the split. Raises `ValueError` for an unknown split."""
    _check_split(split)
    category = CATEGORIES[seed % len(CATEGORIES)]
    rng = random.Random(f"{split}/{seed}")
    while True:
        product = rng.choice(catalogue().by_category[category.name])
        attributes = [attribute for attribute in product.attributes if rng.random() < 0.7] or [product.attributes[0]]
        options = tuple((name, rng.choice(values)) for name, values in product.options)
        max_price_cents = (product.price_cents // 100 + 1 + rng.randint(0, 3) * 10) * 100
        goal = Goal(category.name, category.department, tuple(attributes), options, max_price_cents)
        if (zlib.crc32(goal.text.encode()) % TEST_SHARE == 0) == (split == "test"):
            return goal


def reward_of(goal: Goal, product: Product, chosen: Mapping[str, str]) -> float:
    """WebShop's reward for buying `product` with the `chosen` option values."""
    matched = sum(attribute in product.attributes for attribute in goal.attributes)
    matched += sum(chosen.get(name) == value for name, value in goal.options)
    matched += product.price_cents < goal.max_price_cents
    share = matched / (len(goal.attributes) + len(goal.options) + 1)
    if product.category.name == goal.category:
        return share
    return share * (0.5 if product.category.department == goal.department else 0.1)


class Shop:
    """One visit to the store. Options: `max_turns` (20)."""

    @staticmethod
    def num_tasks(split: str) -> int:
        _check_split(split)
        return NUM_TASKS[split]

    @staticmethod
    def task_type(split: str, seed: int) -> str:
        _check_split(split)
        return CATEGORIES[seed % len(CATEGORIES)].name

    def start(self, split: str, seed: int, options: Mapping[str, Any]) -> Started:
        unknown = sorted(set(options) - {"max_turns"})
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; there is max_turns")
        max_turns = options.get("max_turns", MAX_TURNS)
        if type(max_turns) is not int or max_turns < 1:
            raise ValueError(f"max_turns must be an integer of at least 1, got {max_turns!r}")
        self._max_turns = max_turns
        self._goal = goal_of(split, seed)
        self._turns = 0
        self._done = False
        self._query = ""
        self._results: list[Product] = []
        self._page = 0
        self._product: Product | None = None
        self._chosen: dict[str, str] = {}
        observation = Observation(f"{self._goal.text}\n{self._search_page()}")
        return Started(f"{RULES}\n{self._goal.text}", observation, self._goal.category)

    def step(self, action: str) -> Stepped:
        if self._done:
            return Stepped(Observation("The episode is over."), 0.0, True, False)
        self._turns += 1
        matches = _ACTION.findall(action)
        if not matches:
            return self._show("No action found. Answer with search[keywords] or click[label].")
        # Models think aloud before they act: the last action counts.
        verb, argument = matches[-1][0].lower(), " ".join(matches[-1][1].lower().split())
        return self._search(argument) if verb == "search" else self._click(argument)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _search(self, query: str) -> Stepped:
        if self._query:
            return self._show("There is no search box here; click[back to search] first.")
        if not query:
            return self._show("The search box is empty.")
        self._results = catalogue().search(query, MAX_RESULTS)
        if not self._results:
            return self._show(f"Nothing found for '{query[:60]}'.")
        self._query, self._page = query[:60], 0
        return self._show()

    def _click(self, label: str) -> Stepped:
        if label not in self._labels():
            return self._show(f"There is nothing called '{label[:60]}' to click here.")
        match label:
            case "buy now":
                return self._buy()
            case "back to search":
                self._query, self._results, self._product = "", [], None
            case "next >":
                self._page += 1
            case "< prev" if self._product is not None:
                self._product = None
            case "< prev":
                self._page -= 1
            case _ if self._product is not None:
                self._chosen |= {name: label for name, values in self._product.options if label in values}
            case _:
                self._product, self._chosen = self._shown()[int(label) - 1], {}
        return self._show()

    def _buy(self) -> Stepped:
        assert self._product is not None, "only a product page has the button"
        self._done = True
        reward = reward_of(self._goal, self._product, self._chosen)
        return Stepped(Observation("Thank you for your purchase."), reward, True, reward == 1.0)

    def _show(self, notice: str = "") -> Stepped:
        if self._turns >= self._max_turns:
            self._done = True
            return Stepped(Observation("The store has closed; nothing was bought."), 0.0, True, False)
        text = f"{notice}\n{self._view()}" if notice else self._view()
        return Stepped(Observation(text), 0.0, False, False)

    def _labels(self) -> list[str]:
        if self._product is not None:
            values = [value for _, values in self._product.options for value in values]
            return [*values, "buy now", "< prev", "back to search"]
        if not self._query:
            return []
        labels = [str(number) for number in range(1, len(self._shown()) + 1)]
        labels += ["next >"] if (self._page + 1) * PAGE_SIZE < len(self._results) else []
        labels += ["< prev"] if self._page > 0 else []
        return [*labels, "back to search"]

    def _shown(self) -> list[Product]:
        return self._results[self._page * PAGE_SIZE : (self._page + 1) * PAGE_SIZE]

    def _view(self) -> str:
        if self._product is not None:
            return self._product_page(self._product)
        return self._results_page() if self._query else self._search_page()

    def _search_page(self) -> str:
        return "Search page. Use search[keywords]."

    def _results_page(self) -> str:
        num_pages = -(-len(self._results) // PAGE_SIZE)
        lines = [f"Results for '{self._query}', page {self._page + 1} of {num_pages}"]
        lines += [f"[{number}] {p.title} {_dollars(p)}" for number, p in enumerate(self._shown(), start=1)]
        buttons = [label for label in self._labels() if label in ("next >", "< prev", "back to search")]
        return "\n".join([*lines, " ".join(f"[{label}]" for label in buttons)])

    def _product_page(self, product: Product) -> str:
        lines = [f"{product.title} {_dollars(product)}"]
        for name, values in product.options:
            chosen = f" (chosen: {self._chosen[name]})" if name in self._chosen else ""
            lines.append(f"{name}: {' '.join(f'[{value}]' for value in values)}{chosen}")
        return "\n".join([*lines, "[buy now] [< prev] [back to search]"])


def _dollars(product: Product) -> str:
    return f"${product.price_cents // 100}.{product.price_cents % 100:02d}"


def _check_split(split: str) -> None:
    if split not in NUM_TASKS:
        raise ValueError(f"unknown split {split!r}; there are train and test")
