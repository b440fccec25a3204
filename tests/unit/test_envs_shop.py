"""The store: rewards worked out by hand, tasks that can all be solved, and an expert that solves them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.envs.builtin.shop import MAX_RESULTS, MAX_TURNS, PAGE_SIZE, Goal, Shop, goal_of, reward_of
from tiderl.envs.builtin.shop_catalogue import CATEGORIES, Category, Product, catalogue, words_of
from tiderl.envs.builtin.shop_expert import ShopExpert
from tiderl.envs.protocol import Stepped

SHIRT = next(category for category in CATEGORIES if category.name == "shirt")
DRESS = next(category for category in CATEGORIES if category.name == "dress")
LAMP = next(category for category in CATEGORIES if category.name == "lamp")
GOAL = Goal("shirt", "clothing", ("cotton", "slim fit"), (("size", "m"), ("colour", "red")), 4000)


def product(category: Category, attributes: tuple[str, ...], price_cents: int) -> Product:
    return Product(0, category, "Arvo", attributes, (("size", ("s", "m")), ("colour", ("red",))), price_cents)


# Five points to win: two attributes, two options, the price.
@pytest.mark.parametrize(
    ("bought", "chosen", "reward"),
    [
        (product(SHIRT, ("cotton", "slim fit", "long sleeve"), 3999), {"size": "m", "colour": "red"}, 1.0),
        (product(SHIRT, ("cotton", "slim fit", "long sleeve"), 4000), {"size": "m", "colour": "red"}, 4 / 5),
        (product(SHIRT, ("cotton", "slim fit", "long sleeve"), 3999), {"size": "s", "colour": "red"}, 4 / 5),
        (product(SHIRT, ("cotton", "slim fit", "long sleeve"), 3999), {}, 3 / 5),
        (product(SHIRT, ("linen", "loose fit", "long sleeve"), 4001), {}, 0.0),
        (product(DRESS, ("cotton", "mini", "floral"), 3999), {"size": "m", "colour": "red"}, 0.5 * 4 / 5),
        (product(LAMP, ("brass", "dimmable", "desk"), 3999), {"colour": "red"}, 0.1 * 2 / 5),
    ],
)
def test_reward_by_hand(bought: Product, chosen: dict[str, str], reward: float) -> None:
    assert reward_of(GOAL, bought, chosen) == pytest.approx(reward)


def test_the_goals_text() -> None:
    assert GOAL.text == "Find me a cotton slim fit shirt, size m, colour red, price lower than 40 dollars."


def played(split: str, seed: int, actions: list[str]) -> list[Stepped]:
    shop = Shop()
    shop.start(split, seed, {})
    return [shop.step(action) for action in actions]


def test_buying_pays_what_the_product_and_the_choices_are_worth() -> None:
    goal = goal_of("train", 0)
    fitting = next(
        p for p in catalogue().products if _offers(p, goal) and reward_of(goal, p, dict(goal.options)) == 1.0
    )
    values = [value for _, value in goal.options]
    # The search for a product's own title finds it, maybe not on the first page.
    query = f"{fitting.title} {' '.join(values)}"
    page, place = divmod(catalogue().search(query, MAX_RESULTS).index(fitting), PAGE_SIZE)
    route = [f"search[{query}]", *["click[next >]"] * page, f"click[{place + 1}]"]
    assert played("train", 0, route)[-1].observation.text.startswith(fitting.title)
    full = played("train", 0, [*route, *[f"click[{value}]" for value in values], "click[Buy Now]"])[-1]
    assert (full.reward, full.done, full.success) == (1.0, True, True)
    bare = played("train", 0, [*route, "click[buy now]"])[-1]
    num_points = len(goal.attributes) + len(goal.options) + 1
    assert bare.reward == pytest.approx((num_points - len(goal.options)) / num_points)
    assert (bare.done, bare.success) == (True, False)


def test_every_task_can_be_solved_and_the_type_is_known_before() -> None:
    for split in ("train", "test"):
        for seed in range(200):
            goal = goal_of(split, seed)
            assert any(reward_of(goal, p, dict(goal.options)) == 1.0 and _offers(p, goal) for p in catalogue().products)
            assert Shop.task_type(split, seed) == goal.category == Shop().start(split, seed, {}).task_type


def _offers(product: Product, goal: Goal) -> bool:
    return all(value in dict(product.options).get(name, ()) for name, value in goal.options)


def test_no_instruction_is_in_both_splits() -> None:
    train = {goal_of("train", seed).text for seed in range(3000)}
    test = {goal_of("test", seed).text for seed in range(Shop.num_tasks("test"))}
    assert not train & test
    assert len(test) > 0.95 * Shop.num_tasks("test"), "hardly any task is there twice"


def test_same_seed_same_episode_in_another_process() -> None:
    program = (
        "from tiderl.envs.builtin.shop import Shop; s = Shop(); print(s.start('train', 17, {}).instruction);"
        "print(s.step('search[cotton red m]').observation.text)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    shop = Shop()
    here = [shop.start("train", 17, {}).instruction, shop.step("search[cotton red m]").observation.text]
    assert done.stdout == "\n".join(here) + "\n"


def test_the_expert_earns_everything_within_the_turns_and_pages_are_short() -> None:
    solved, num_words = 0, []
    for seed in range(150):
        shop = Shop()
        started = shop.start("test", seed, {})
        expert, text = ShopExpert(started.instruction), started.observation.text
        for _ in range(MAX_TURNS):
            stepped = shop.step(expert.act(text))
            text = stepped.observation.text
            num_words.append(len(text.split()))
            if stepped.done:
                break
        assert stepped.done
        solved += stepped.reward == 1.0
    assert solved >= 0.98 * 150
    assert max(num_words) <= 250


def test_the_expert_needs_a_goal() -> None:
    with pytest.raises(ValueError, match="no goal"):
        ShopExpert("Go to the red ball")


fragments = [
    "search[",
    "click[",
    "]",
    "red shirt",
    "next >",
    "< prev",
    "back to search",
    "buy now",
    "m",
    "0",
    "1",
    "9",
    "\n",
    "[",
]
actions = st.lists(st.sampled_from(fragments), max_size=4).map("".join) | st.text(max_size=30)


@given(st.lists(actions, max_size=MAX_TURNS + 2), st.integers(0, 50))
def test_whatever_the_agent_says_the_episode_goes_on_and_ends(texts: list[str], seed: int) -> None:
    shop = Shop()
    shop.start("train", seed, {})
    for number, text in enumerate(texts, start=1):
        if text.lower().count("click[") == 0 and (numbers := _numbers_shown(shop)):
            text = f"click[{numbers[-1]}]"  # so that product pages are reached too
        stepped = shop.step(text)
        assert 0.0 <= stepped.reward <= 1.0
        assert stepped.success == (stepped.reward == 1.0)
        assert len(stepped.observation.text.split()) <= 250
        assert stepped.done or number < MAX_TURNS


def _numbers_shown(shop: Shop) -> list[str]:
    return re.findall(r"^\[(\d+)\]", shop._view(), re.MULTILINE)


def test_results_are_numbered_from_one_on_every_page_and_a_number_opens_its_line() -> None:
    for num_next in (0, 1):
        route = ["search[cotton shirt]", *["click[next >]"] * num_next]
        page = played("train", 0, route)[-1].observation.text
        lines = re.findall(r"^\[(\d+)\] (.+)$", page, re.MULTILINE)
        assert [number for number, _ in lines] == ["1", "2", "3", "4", "5"]
        for number, line in lines:
            assert played("train", 0, [*route, f"click[{number}]"])[-1].observation.text.split("\n")[0] == line
    assert "There is nothing called '6' to click" in played("train", 0, [*route, "click[6]"])[-1].observation.text
    assert "There is nothing called '0' to click" in played("train", 0, [*route, "click[0]"])[-1].observation.text


def test_the_turn_limit_ends_it_without_reward() -> None:
    shop = Shop()
    shop.start("train", 0, {"max_turns": 2})
    assert not shop.step("hm").done
    last = shop.step("hm")
    assert (last.done, last.reward, last.success) == (True, 0.0, False)


def test_the_last_action_of_a_text_counts_and_buttons_lead_back() -> None:
    first, results, second_page, back, search = played(
        "train",
        0,
        [
            "nothing",
            "I could search[lamp], no: Search[ red  SHIRT ]",
            "click[Next >]",
            "click[< prev]",
            "click[back to search]",
        ],
    )
    assert "No action found" in first.observation.text
    assert results.observation.text.startswith("Results for 'red shirt', page 1 of 8")
    assert "page 2 of 8" in second_page.observation.text
    assert back.observation.text == results.observation.text
    assert search.observation.text == "Search page. Use search[keywords]."


@pytest.mark.parametrize(("split", "options"), [("moon", {}), ("train", {"colour": 1}), ("train", {"max_turns": 0})])
def test_a_bad_start_is_the_callers_mistake(split: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"split|option|max_turns"):
        Shop().start(split, 0, options)


def test_search_ranks_by_shared_words() -> None:
    one = catalogue().products[5]
    found = catalogue().search(" ".join(one.words()), 1000)
    assert one in found[:5]
    assert all(set(words_of("brass lamp")) & set(p.words()) for p in catalogue().search("brass lamp", 1000))
    assert {p.category.name for p in catalogue().search("brass lamp", 20)} == {"lamp"}
    assert catalogue().search("zzz", 10) == []


def test_labels_of_a_product_page_are_never_ambiguous() -> None:
    assert len(catalogue().products) == 3000
    for category in CATEGORIES:
        values = [value for _, values in category.options for value in values]
        assert len(set(values)) == len(values)
        assert not set(values) & ({"buy now", "< prev", "next >", "back to search"})
