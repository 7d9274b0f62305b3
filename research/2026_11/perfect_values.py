"""What a perfect q would give on arithmetic: Q# and CD with exact values, beside a learned q.

    python research/2026_11/perfect_values.py --run runs/q_sharp/unbiased_0 [--problems 60] [--least-mass 1e-4]

A run of research/2026_11/q_sharp.py has the reference and the q. The answers of the reference to a held-out
problem are a tree of tokens. It is followed as far as a prefix has at least `--least-mass` of the
probability; what is behind counts as wrong. In this tree the value of a prefix, the chance that the
reference ends right, is a sum. So are the accuracy and the KL of any guided policy: nothing is
sampled. Prints

- accuracy and KL of Q# and CD with exact values; with values from CONTINUATIONS continuations of
  the reference, which are drawn from the binomial distribution that they have; with those of q; and
  with exact values or q at the first token alone,
- the gain of Q# over CD at the same KL, paired over problems,
- what q knows of the differences between the tokens that may follow a prefix.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import arms
import fronts
import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from tpu_rl.commands import compose, config, evaluate_q_sharp, saved_run
from tpu_rl.commands.config import ExperimentConfig, MeshConfig
from tpu_rl.data import Row
from tpu_rl.environments import TASKS
from tpu_rl.evaluation.guided_accuracy import Guided
from tpu_rl.experience import tasks
from tpu_rl.experience.config import sampler_config
from tpu_rl.rollout import prompts
from tpu_rl.sampler.cache_ops import take_rows
from tpu_rl.types import Array, Params, Policy

COEFFICIENTS = (1.0, 0.5, 0.2, 0.1)
CONTINUATIONS = 256
LEAST_ROWS = 64
"""Prefixes are read together, in numbers that are this times a power of two."""


class Tree(NamedTuple):
    """The likely answers to one prompt. Node 0 is the empty answer; parents precede children."""

    parents: np.ndarray
    """[N]; -1 of node 0."""
    depths: np.ndarray
    """[N]: number of tokens."""
    chances: np.ndarray
    """[N]: the reference's probability of the last token, given the parent."""
    is_candidate: np.ndarray
    """[N]: whether q would score the last token."""
    rewards: np.ndarray
    """[N]: of answers that have ended, NaN of prefixes that go on."""
    learned: np.ndarray
    """[N]: the value that q gives."""

    def levels(self) -> list[slice]:
        """Return the nodes of each depth, from 1 on."""
        starts = np.searchsorted(self.depths, np.arange(1, self.depths[-1] + 2))
        return [slice(start, end) for start, end in itertools.pairwise(starts)]

    def values(self) -> np.ndarray:
        """Return [N]: the chance that the reference ends right behind each prefix."""
        values = np.nan_to_num(self.rewards)
        for level in reversed(self.levels()):
            terms = self.chances[level] * values[level]
            np.add.at(values, self.parents[level], terms)
        return values

    def reached(self, chances: np.ndarray) -> np.ndarray:
        """Return [N]: the probability of each prefix, for chances [N] of the last tokens."""
        reached = np.ones(len(chances))
        for level in self.levels():
            reached[level] = reached[self.parents[level]] * chances[level]
        return reached

    def outside(self) -> float:
        """Return the probability of answers that the tree does not have."""
        return float(1 - self.reached(self.chances)[np.isfinite(self.rewards)].sum())


class Reader:
    """A reference and q, which read the same prefixes."""

    def __init__(self, guided: Guided, length: int):
        self.guided = guided
        self.length = length

    def start(self, prompt: list[int]) -> tuple[np.ndarray, Any]:
        """Read a prompt: (log-probabilities [1, V] of the first token, caches)."""
        tokens = jnp.array([prompt])
        caches = []
        for policy in (self.guided.reference, self.guided.q):
            cache = policy.init_cache(self.guided.params, 1, self.length)
            outputs, cache = _extend(policy, self.guided.params, cache, tokens, jnp.int32(0))
            caches.append((outputs, cache))
        (logits, reference_cache), (_, q_cache) = caches
        return _log_probs(logits), (reference_cache, q_cache)

    def extend(
        self, caches: Any, rows: np.ndarray, tokens: np.ndarray, position: int
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """Continue rows [B] of the caches with tokens [B].

        Returns (log-probabilities [B, V] of the next token, q's values [B], caches).
        """
        size = LEAST_ROWS
        while size < len(rows):
            size *= 2
        padded = np.zeros((2, size), np.int32)
        padded[:, : len(rows)] = rows, tokens
        results = []
        for policy, cache in zip((self.guided.reference, self.guided.q), caches, strict=True):
            taken = take_rows(cache, jnp.asarray(padded[0]))
            columns = jnp.asarray(padded[1][:, None])
            results.append(_extend(policy, self.guided.params, taken, columns, jnp.int32(position)))
        (logits, reference_cache), (outputs, q_cache) = results
        values = special.expit(np.asarray(outputs[: len(rows), 0], np.float64))
        return _log_probs(logits)[: len(rows)], values, (reference_cache, q_cache)


_take_rows = jax.jit(take_rows)


@functools.partial(jax.jit, static_argnames="policy")
def _extend(
    policy: Policy, params: Params, cache: Any, tokens: Array, position: Array
) -> tuple[Array, Any]:
    """Return (outputs [B, K] behind the last of tokens [B, T], the cache)."""
    positions = jnp.broadcast_to(position + jnp.arange(tokens.shape[1]), tokens.shape)
    commit = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    branches = jnp.zeros_like(tokens)
    outputs, cache = policy.extend(params, cache, tokens, positions, branches, commit)
    return outputs[:, -1], cache


def _log_probs(logits: Array) -> np.ndarray:
    return special.log_softmax(np.asarray(logits, np.float64), axis=-1)


class Ending(NamedTuple):
    """What ends an answer, and what an answer is worth."""

    stop_ids: tuple[int, ...]
    max_tokens: int
    reward: Callable[[list[int]], float]


def grow(
    reader: Reader, prompt: list[int], ending: Ending, candidates: int, least_mass: float
) -> Tree:
    """Return the tree of prefixes with at least `least_mass` of the probability."""
    log_probs, caches = reader.start(prompt)
    texts: list[list[int]] = [[]]
    columns: list[list[np.ndarray]] = [
        [np.array([value])] for value in (-1, 0, 1.0, True, np.nan, np.nan)
    ]
    frontier = np.array([0])
    # The row of each prefix of the frontier in the caches.
    places = np.array([0])
    masses = np.array([1.0])
    for depth in range(1, ending.max_tokens + 1):
        rows, tokens = np.nonzero(masses[:, None] * np.exp(log_probs) >= least_mass)
        if not len(rows):
            break
        likeliest = np.argsort(-log_probs, axis=1, kind="stable")[:, :candidates]
        is_candidate = (likeliest[rows] == tokens[:, None]).any(1)
        chances = np.exp(log_probs[rows, tokens])
        parents = frontier[rows]
        position = len(prompt) + depth - 1
        log_probs, learned, caches = reader.extend(caches, places[rows], tokens, position)
        has_ended = np.isin(tokens, ending.stop_ids) | (depth == ending.max_tokens)
        first = len(texts)
        texts += [
            [*texts[parent], int(token)] for parent, token in zip(parents, tokens, strict=True)
        ]
        rewards = [
            ending.reward(texts[first + index]) if ended else np.nan
            for index, ended in enumerate(has_ended)
        ]
        depths = np.full(len(rows), depth)
        added = (parents, depths, chances, is_candidate, np.array(rewards), learned)
        for column, values in zip(columns, added, strict=True):
            column.append(values)
        going_on = np.flatnonzero(~has_ended)
        frontier = first + going_on
        masses = (masses[rows] * chances)[going_on]
        log_probs = log_probs[going_on]
        places = going_on
    return Tree(*(np.concatenate(column) for column in columns))


# --- policies in a tree ---

METHODS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "Q#": lambda values, kl_coef: np.log1p(values * np.expm1(1 / kl_coef)),
    "CD": lambda values, kl_coef: values / kl_coef,
}
"""Name -> (values, kl_coef) -> offsets of the logits."""


def follow(tree: Tree, offsets: np.ndarray) -> tuple[float, float]:
    """Return (accuracy, KL to the reference) of the policy with offsets [N] of the logits.

    The offset of what is not in the tree, or not a candidate, is 0.
    """
    size = len(tree.parents)
    parents = tree.parents[1:]
    chances = tree.chances[1:]
    added = np.where(tree.is_candidate, offsets, 0.0)[1:]
    outside = np.maximum(1 - np.bincount(parents, chances, size), 0.0)
    weights = chances * np.exp(added)
    log_totals = np.log(np.bincount(parents, weights, size) + outside)
    policy = weights / np.exp(log_totals[parents])
    # KL of the next token, of prefixes that go on: E log(policy / reference).
    token_kl = np.bincount(parents, policy * added, size) - log_totals
    reached = tree.reached(np.append(1.0, policy))
    has_ended = np.isfinite(tree.rewards)
    goes_on = np.bincount(parents, minlength=size) > 0
    accuracy = reached[has_ended] @ tree.rewards[has_ended]
    return float(accuracy), float(reached[goes_on] @ token_kl[goes_on])


def answers(trees: Sequence[Tree]) -> dict[str, list[fronts.Answers]]:
    """Return the accuracy and KL of each method, problem by problem, for values of each kind."""
    generator = np.random.default_rng(0)
    # Rounding may leave values outside of [0, 1].
    exact = [np.clip(tree.values(), 0.0, 1.0) for tree in trees]
    drawn = [generator.binomial(CONTINUATIONS, values) / CONTINUATIONS for values in exact]
    learned = [tree.learned for tree in trees]
    is_first = [tree.depths == 1 for tree in trees]
    everywhere = [np.ones(len(tree.depths), bool) for tree in trees]
    kinds = {
        "exact": (exact, everywhere),
        f"{CONTINUATIONS} continuations": (drawn, everywhere),
        "exact, first token alone": (exact, is_first),
        "q": (learned, everywhere),
        "q, first token alone": (learned, is_first),
    }

    def line(name: str, setting: str, offsets: Iterable[np.ndarray]) -> fronts.Answers:
        points = np.array([follow(*pair) for pair in zip(trees, offsets, strict=True)])
        return fronts.Answers(name, setting, points[:, 0], points[:, 0], points[:, 1])

    reference = line("reference", "", [np.zeros(len(tree.depths)) for tree in trees])
    lines = {kind: [reference] for kind in kinds}
    for kind, (values, places) in kinds.items():
        for method, offset in METHODS.items():
            for kl_coef in COEFFICIENTS:
                pairs = zip(values, places, strict=True)
                offsets = [np.where(place, offset(value, kl_coef), 0.0) for value, place in pairs]
                lines[kind].append(line(method, f"{kl_coef:g}", offsets))
    return lines


def show_differences(trees: Sequence[Tree]) -> None:
    """Print what q knows of the differences that steer: values of tokens that may follow a prefix.

    Each is compared with the mean of its siblings under the reference. Tokens count as often as the
    reference chooses them.
    """
    arms.print_heading("token", "spread of exact values", "spread of q", "correlation")
    for name, is_first in (("first", True), ("later", False)):
        exact, learned, weights = [], [], []
        for tree in trees:
            size = len(tree.parents)
            parents, chances = tree.parents[1:], tree.chances[1:]
            chosen = (tree.depths[1:] == 1) == is_first
            totals = np.bincount(parents, chances, size)
            for column, values in ((exact, tree.values()), (learned, tree.learned)):
                sums = np.bincount(parents, chances * values[1:], size)
                column.append((values[1:] - sums[parents] / totals[parents])[chosen])
            weights.append(tree.reached(tree.chances)[1:][chosen])
        differences = np.array([np.concatenate(exact), np.concatenate(learned)])
        covariance = np.cov(differences, aweights=np.concatenate(weights), bias=True)
        spreads = np.sqrt(np.diag(covariance))
        correlation = covariance[0, 1] / spreads.prod()
        arms.print_row(name, f"{spreads[0]:.3f}", f"{spreads[1]:.3f}", f"{correlation:.2f}")


# --- all of it ---


def grow_all(run_config: ExperimentConfig, num_problems: int, least_mass: float) -> list[Tree]:
    """Return the trees of held-out problems."""
    algorithm: Any = run_config.algorithm
    rows = tasks.evaluation_rows(run_config.data, algorithm.experience, num_problems)
    language, params = saved_run.load_language(run_config.model.path or "", run_config)
    guided, _ = evaluate_q_sharp.load(run_config.run_dir, language, params)
    tokenizer = language.tokenizer
    settings = sampler_config(run_config.sampling, tokenizer, 1)
    is_right = TASKS["arithmetic"].rewards["arithmetic"]
    encoded = prompts.encode(rows, tokenizer, run_config.sampling.max_prompt_tokens)
    reader = Reader(guided, max(map(len, encoded)) + settings.max_new_tokens)
    trees = []
    for row, prompt in zip(rows, encoded, strict=True):

        def reward(tokens: list[int], row: Row = row) -> float:
            text = tokenizer.decode([token for token in tokens if token not in settings.stop_ids])
            return is_right([row["prompt"]], [text], answer=[row["answer"]])[0]

        ending = Ending(settings.stop_ids, settings.max_new_tokens, reward)
        trees.append(grow(reader, prompt, ending, algorithm.candidates, least_mass))
    return trees


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="a run of Q#")
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--least-mass", type=float, default=1e-4)
    flags = parser.parse_args()
    run_config = replace(config.load(flags.run / "config.yaml"), run_dir=str(flags.run))
    with jax.set_mesh(compose.make_mesh(MeshConfig())):
        trees = grow_all(run_config, flags.problems, flags.least_mass)
    size = np.mean([len(tree.parents) for tree in trees])
    outside = np.mean([tree.outside() for tree in trees])
    print(f"{len(trees)} trees, {size:.0f} prefixes each, {100 * outside:.2f} % outside\n")
    lines = answers(trees)
    arms.print_heading("values", "method", "kl_coef", "pass@1, %", "KL, nats")
    for kind, lines_of_kind in lines.items():
        for line in lines_of_kind:
            percent = fronts.percent(line.rewards)
            arms.print_row(kind, line.name, line.setting, percent, f"{line.kl.mean():.3f}")
    for kind, lines_of_kind in lines.items():
        print(f"\ngain of Q# at the same KL, values: {kind}\n")
        fronts.show_gains(lines_of_kind, lines_of_kind)
    print()
    show_differences(trees)


if __name__ == "__main__":
    main()
