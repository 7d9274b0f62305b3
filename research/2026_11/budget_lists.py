"""The task of steering.py: spend a budget on a shop's prices, as much of it as possible.

A prompt is a budget and four prices, "37/4,7,9,12=". An answer is a list of prices, with
repetition: "9 9 4 12". It earns the share of the budget that it spends, and nothing if it spends
more than the budget or names a price that the shop does not have.

The reference imitates lists that know nothing of the budget (`demonstration`): one price after
another, each with the same chance, and after each the list ends with chance STOP. Such lists are a
Markov chain in (number of items, sum), so what follows a prefix is known exactly (`Exact`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

PRICES = range(2, 16)
SHOP_SIZE = 4
BUDGETS = range(12, 50)
STOP = 0.2
MAX_ITEMS = 12


class Shop(NamedTuple):
    budget: int
    prices: tuple[int, ...]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", text))


def parse(prompt: str) -> Shop:
    budget, *prices = numbers(prompt)
    return Shop(budget, tuple(prices))


def prompt_of(shop: Shop) -> str:
    return f"{shop.budget}/{','.join(map(str, shop.prices))}="


def all_prompts(seed: int = 0) -> list[str]:
    """Return all prompts, shuffled."""
    shops = itertools.product(BUDGETS, itertools.combinations(PRICES, SHOP_SIZE))
    prompts = [prompt_of(Shop(budget, prices)) for budget, prices in shops]
    order = np.random.default_rng(seed).permutation(len(prompts))
    return [prompts[index] for index in order]


def demonstration(prompt: str, generator: np.random.Generator) -> str:
    """Return a random list of the shop's prices."""
    length = min(int(generator.geometric(STOP)), MAX_ITEMS)
    return " ".join(map(str, generator.choice(parse(prompt).prices, length)))


def spent(prompt: str, completion: str) -> float:
    """Return the share of the budget that a list spends; 0 if the list is not possible."""
    shop = parse(prompt)
    items = numbers(completion)
    total = sum(items)
    if total > shop.budget or not set(items) <= set(shop.prices):
        return 0.0
    return total / shop.budget


def reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return `spent` of each completion."""
    del columns
    return [spent(*pair) for pair in zip(prompts, completions, strict=True)]


# --- exact values ---


class Point(NamedTuple):
    """A way to answer one prompt, computed exactly."""

    reward: float
    exact: float
    """Chance that the whole budget is spent."""
    kl: float
    """Nats per completion, to the chain."""


class Exact:
    """The lists that demonstrations are drawn from, for one shop.

    A sum above the budget is state budget + 1, which cannot be left.
    """

    def __init__(self, shop: Shop):
        self.shop = shop
        over = shop.budget + 1
        self.returns = np.append(np.arange(over) / shop.budget, 0.0)
        """[S]: what a list with this sum earns."""
        sums = np.arange(over + 1)
        self.next_sums = np.minimum(sums[:, None] + np.array(shop.prices), over)
        """[S, prices]"""
        self.final = [np.eye(over + 1)]
        """[S, S] for each number of items: the distribution of the final sum."""
        for items in reversed(range(MAX_ITEMS)):
            *buy, stop = self.chances(items)
            after = self.final[0]
            pairs = zip(buy, self.next_sums.T, strict=True)
            mean = sum(chance * after[next_sum] for chance, next_sum in pairs)
            self.final.insert(0, stop * np.eye(over + 1) + mean)
        self.at_start = self.final[0][0]
        """[S]: the distribution of the final sum of a whole list."""

    def chances(self, items: int) -> np.ndarray:
        """Return the chance of each price, and of the end, after so many items."""
        stop = 0.0 if items == 0 else 1.0 if items == MAX_ITEMS else STOP
        return np.append(np.full(SHOP_SIZE, (1 - stop) / SHOP_SIZE), stop)

    def reference(self) -> Point:
        return self._point(self.at_start, 0.0)

    def q_sharp(self, kl_coef: float) -> Point:
        """Return the optimum of reward - kl_coef KL: lists weighted by exp(reward / kl_coef)."""
        weights = self.at_start * np.exp((self.returns - self.returns.max()) / kl_coef)
        final = weights / weights.sum()
        return self._point(final, _kl(final, self.at_start))

    def mean_guided(self, kl_coef: float) -> Point:
        """Return CD: each step is weighted by exp(mean of the reward that follows / kl_coef)."""
        return self.guided(lambda final: final @ self.returns / kl_coef)

    def guided(self, offset: Callable[[np.ndarray], np.ndarray]) -> Point:
        """Return the chain with `offset`, of the distribution of what follows, added to logits."""
        size = len(self.returns)
        mass = np.eye(size)[0]
        final = np.zeros(size)
        kl = 0.0
        if_ended = offset(np.eye(size))
        for items in range(MAX_ITEMS):
            reference = self.chances(items)
            if_bought = offset(self.final[items + 1])[self.next_sums]
            offsets = np.column_stack([if_bought, if_ended])
            weights = reference * np.exp(offsets - offsets.max(1, keepdims=True))
            policy = weights / weights.sum(1, keepdims=True)
            kl += mass @ _kl(policy, reference)
            final += mass * policy[:, -1]
            bought = np.zeros(size)
            np.add.at(bought, self.next_sums, mass[:, None] * policy[:, :-1])
            mass = bought
        return self._point(final + mass, kl)

    def best_of(self, n: int) -> Point:
        """Return the best of n lists by reward, the first of equal ones."""
        levels, places = np.unique(self.returns, return_inverse=True)
        chances = np.bincount(places, weights=self.at_start)
        below_or_at = np.cumsum(chances)
        chosen = below_or_at**n - (below_or_at - chances) ** n
        return Point(float(chosen @ levels), float(chosen[-1]), float(_kl(chosen, chances)))

    def _point(self, final: np.ndarray, kl: Any) -> Point:
        return Point(float(final @ self.returns), float(final[self.shop.budget]), float(kl))


def nominal_kl(n: int) -> float:
    """Return the KL of best of n without ties, an upper bound of that with ties."""
    return math.log(n) - (n - 1) / n


def _kl(policy: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the KL [...] of distributions [..., K]."""
    return special.rel_entr(policy, reference).sum(-1)
