"""The goods of the store: some thousands of invented products, the same on every machine, and a search over them.

Invariants (tests/unit/test_envs_shop.py):

1. The catalogue is a function of `CATALOGUE_SEED` alone.
2. A search ranks by BM25 over a product's words; equal scores rank by product number; it returns only products that share a
   word with the query.
3. Values of different options of a product never coincide, nor with a button of the store: `click[…]` is never ambiguous.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass

CATALOGUE_SEED = 20260
PRODUCTS_PER_CATEGORY = 250

COLOURS = ("red", "blue", "green", "black", "white", "grey", "navy", "pink", "yellow", "purple", "brown", "orange")
LETTER_SIZES = ("xs", "s", "m", "l", "xl", "xxl")
SHOE_SIZES = ("6", "7", "8", "9", "10", "11", "12")
BRANDS = (
    "Arvo", "Belmer", "Cintra", "Dovano", "Elmhurst", "Fjorde", "Garnet", "Halden", "Ivora", "Juno", "Kestrel", "Lumo",
    "Marlow", "Norvik", "Oakley", "Pella", "Quill", "Rowan", "Solano", "Tarn", "Umber", "Vesta", "Wexford", "Zephyr",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of product. Each product has one attribute of each group, and some values of each option."""

    name: str
    department: str
    attribute_groups: tuple[tuple[str, ...], ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    #: Bounds of the price, in cents.
    prices: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Product:
    number: int
    category: Category
    brand: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    price_cents: int

    @property
    def title(self) -> str:
        return f"{self.brand} {' '.join(self.attributes)} {self.category.name}"

    def words(self) -> list[str]:
        """What the search finds it by."""
        return words_of(" ".join([self.title, *(value for _, values in self.options for value in values)]))


_GARMENT = (("size", LETTER_SIZES), ("colour", COLOURS))
_SHOE = (("size", SHOE_SIZES), ("colour", COLOURS))
_PLAIN = (("colour", COLOURS),)
_RUG = (("width", ("60cm", "90cm", "120cm", "160cm")), ("colour", COLOURS))
_BED = (("bed", ("twin", "full", "queen", "king")), ("colour", COLOURS))
_BOTTLE = (("volume", ("350ml", "500ml", "750ml", "1000ml")), ("colour", COLOURS))
_BAG = (("volume", ("15l", "20l", "30l", "40l")), ("colour", COLOURS))
_CLOTH = ("cotton", "linen", "wool", "polyester")

CATEGORIES = (
    Category(
        "shirt",
        "clothing",
        (_CLOTH, ("slim fit", "loose fit", "regular fit"), ("long sleeve", "short sleeve")),
        _GARMENT,
        (1200, 6000),
    ),
    Category(
        "dress",
        "clothing",
        (_CLOTH, ("knee length", "ankle length", "mini"), ("floral", "striped", "checked")),
        _GARMENT,
        (2000, 12000),
    ),
    Category(
        "jacket",
        "clothing",
        (("leather", "denim", "fleece", "nylon"), ("waterproof", "windproof"), ("hooded", "collared", "quilted")),
        _GARMENT,
        (3000, 20000),
    ),
    Category(
        "sneakers",
        "shoes",
        (("mesh", "canvas", "suede"), ("lightweight", "cushioned", "wide"), ("low top", "high top")),
        _SHOE,
        (2500, 15000),
    ),
    Category(
        "boots",
        "shoes",
        (("leather", "rubber", "suede"), ("insulated", "waterproof", "unlined"), ("lace up", "zip up")),
        _SHOE,
        (4000, 22000),
    ),
    Category(
        "headphones",
        "electronics",
        (("wireless", "wired"), ("noise cancelling", "bass boost", "open back"), ("over ear", "on ear", "foldable")),
        _PLAIN,
        (2000, 30000),
    ),
    Category(
        "speaker",
        "electronics",
        (("bluetooth", "wifi", "radio"), ("waterproof", "shockproof", "dustproof"), ("portable", "bookshelf")),
        _PLAIN,
        (2500, 25000),
    ),
    Category(
        "lamp",
        "home",
        (
            ("ceramic", "brass", "bamboo", "glass"),
            ("dimmable", "rechargeable", "clip on"),
            ("desk", "bedside", "floor"),
        ),
        _PLAIN,
        (1500, 15000),
    ),
    Category(
        "rug",
        "home",
        (("wool", "jute", "cotton"), ("washable", "non slip", "shaggy"), ("round", "rectangular", "runner")),
        _RUG,
        (2500, 30000),
    ),
    Category(
        "blanket",
        "home",
        (("fleece", "wool", "cotton"), ("weighted", "heated", "quilted"), ("striped", "plain", "fringed")),
        _BED,
        (1500, 12000),
    ),
    Category(
        "bottle",
        "kitchen",
        (
            ("steel", "glass", "plastic"),
            ("insulated", "leakproof", "collapsible"),
            ("straw lid", "flip lid", "screw lid"),
        ),
        _BOTTLE,
        (900, 5000),
    ),
    Category(
        "backpack",
        "luggage",
        (("canvas", "nylon", "leather"), ("waterproof", "foldable", "padded"), ("laptop", "hiking", "school")),
        _BAG,
        (2500, 18000),
    ),
)


class Catalogue:
    """All products, and their inverted index with the BM25 weights worked out."""

    K1 = 1.2
    B = 0.75

    def __init__(self, products: tuple[Product, ...]) -> None:
        self.products = products
        self.by_category: dict[str, list[Product]] = defaultdict(list)
        counts = []
        for product in products:
            self.by_category[product.category.name].append(product)
            counts.append(Counter(product.words()))
        mean_length = sum(count.total() for count in counts) / len(counts)
        frequency = Counter(word for count in counts for word in count)
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, count in enumerate(counts):
            norm = self.K1 * (1.0 - self.B + self.B * count.total() / mean_length)
            for word, times in count.items():
                rarity = math.log(1.0 + (len(products) - frequency[word] + 0.5) / (frequency[word] + 0.5))
                self._weights[word].append((number, rarity * times * (self.K1 + 1.0) / (times + norm)))

    def search(self, query: str, max_results: int) -> list[Product]:
        """The best products for the query, best first; empty if no word of it is known."""
        scores: dict[int, float] = defaultdict(float)
        for word in sorted(set(words_of(query))):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        best = heapq.nsmallest(max_results, scores, key=lambda number: (-scores[number], number))
        return [self.products[number] for number in best]


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


@functools.cache
def catalogue() -> Catalogue:
    """The store's goods; made on the first call (a fraction of a second), then shared by all episodes of the process."""
    rng = random.Random(CATALOGUE_SEED)
    products = []
    for number in range(len(CATEGORIES) * PRODUCTS_PER_CATEGORY):
        category = CATEGORIES[number % len(CATEGORIES)]
        options = tuple((name, _some(rng, values)) for name, values in category.options)
        products.append(
            Product(
                number=number,
                category=category,
                brand=rng.choice(BRANDS),
                attributes=tuple(rng.choice(group) for group in category.attribute_groups),
                options=options,
                price_cents=rng.randrange(*category.prices) // 100 * 100 + 99,
            )
        )
    return Catalogue(tuple(products))


def _some(rng: random.Random, values: tuple[str, ...]) -> tuple[str, ...]:
    """Two to five of the values, in their order."""
    chosen = set(rng.sample(values, rng.randint(2, min(5, len(values)))))
    return tuple(value for value in values if value in chosen)
