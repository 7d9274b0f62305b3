"""The share of held-out pairs that a model ranks rightly, with intervals over problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_rl import data
from tpu_rl.data import Row
from tpu_rl.evaluation import intervals
from tpu_rl.experience.sources.pairs import ToPairs
from tpu_rl.experience.text_log_probs import TextLogProbs
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.train import packing, sharding, update_step
from tpu_rl.types import Algorithm, Experience, Pairs, Params

ROWS_AT_ONCE = 1024
MAX_ROWS = 1024
"""Training rows whose lengths are counted, evenly spaced among all."""
"""Rows that are encoded at once where only their lengths count."""


def problems_of(rows: Sequence[Row]) -> list[int]:
    """Return the problem of each row: its column `problem`, or a problem of its own."""
    return [row.get("problem", row["row"]) for row in rows]


def ranking_accuracy(
    algorithm: Algorithm,
    train_lengths: np.ndarray,
    held_out: Pairs,
    problems: list[int],
    mesh: Mesh,
    context_devices: int = 1,
    share_prefixes: bool = True,
) -> Callable[[Params], dict[str, float]]:
    """Return a function that computes the share of held-out pairs that the algorithm ranks as their
    labels say.

    A problem counts once, whatever the number of its pairs. The metrics also tell how well the
    lengths of completions alone rank them.

    Args:
        algorithm: its loss reports the metric preference/accuracy. Each pair is an optimizer step
            of its own, so that the metric is that of one pair.
        train_lengths: `lengths_of` training pairs, from which the rule about lengths is learned.
        problems: the problem of each held-out pair.
        context_devices: devices that share the tokens of a packed row.
        share_prefixes: see `BatchConfig`.
    """
    mask = np.asarray(held_out.action_mask)
    prompts = 1 if share_prefixes else 2
    pair_lengths = prompts * mask.argmax(-1)[::2] + mask.sum(-1).reshape(-1, 2).sum(-1)
    # A length that devices, or tiles of attention, can share.
    unit = 256 * context_devices if context_devices > 1 else 64
    row_length = -(-int(pair_lengths.max()) // unit) * unit
    experience = one_pair_per_step(held_out, row_length, share_prefixes)
    length_rule = by_problem(longer_or_shorter(train_lengths, mask.sum(-1)), problems)
    measure = metrics_of_pairs(algorithm, ["preference/accuracy"], mesh)

    def evaluate(params: Params) -> dict[str, float]:
        (right,) = sharding.to_host(measure(params, experience)).values()
        return beside_lengths(by_problem(right, problems), length_rule)

    return evaluate


def one_pair_per_step(pairs: Pairs, row_length: int, share_prefixes: bool) -> Experience:
    """Return each pair in a packed row and an optimizer step of its own."""
    mask = np.asarray(pairs.action_mask)
    layout = packing.assign_slots(
        mask,
        np.asarray(pairs.group_id),
        row_length=row_length,
        micro_batch_rows=1,
        minibatches=len(mask) // 2,
        placement="whole",
        share_prefixes=share_prefixes,
    )
    return Experience(pairs, layout)


def metrics_of_pairs(
    algorithm: Algorithm, names: Sequence[str], mesh: Mesh | None = None
) -> Callable[[Params, Experience], dict[str, jax.Array]]:
    """Return a function that computes metrics of the algorithm's loss of each pair, [pairs].

    Each pair of the experience is an optimizer step of its own.
    """
    options = None if mesh is None else update_step.compiler_options(mesh)

    @partial(jax.jit, compiler_options=options)
    def measure(params: Params, experience: Experience) -> dict[str, jax.Array]:
        batch, _ = algorithm.make_batch(experience, params, algorithm.init_state(params))

        def of_pair(minibatches: Any) -> dict[str, jax.Array]:
            _, metrics = algorithm.loss(params, update_step.minibatch(minibatches, 0))
            return update_step.reduce_metrics({name: metrics[name] for name in names})

        return jax.lax.map(of_pair, batch)

    return measure


def graded_accuracy(
    log_probs: TextLogProbs,
    train_lengths: np.ndarray,
    train_good: np.ndarray,
    held_out: Sequence[Row],
    to_pairs: ToPairs,
) -> Callable[[Params], dict[str, float]]:
    """Return a function that computes how often a good held-out completion is ahead of a bad one.

    Completions are ranked by the log-ratio of policy and reference. Nothing else of the loss
    counts, so that the measure is the same for KTO and its relatives.

    Args:
        log_probs: of the policy.
        train_lengths: `lengths_of` training completions, from which the rule about lengths is
            learned.
        train_good: their labels.
        held_out: rows of judged completions of both labels.
        to_pairs: encodes rows, with the reference's log-probs.
    """
    pairs = to_pairs(held_out)
    good = np.asarray(pairs.preferred)
    mask = np.asarray(pairs.action_mask)
    reference = np.where(mask, np.asarray(pairs.reference_log_probs), 0).sum(-1, dtype=np.float64)
    both_in_training = train_good.any() and not train_good.all()
    longer_is_better = not both_in_training or (
        good_above_bad(train_lengths, train_good).value >= 0.5
    )
    lengths = mask.sum(-1) if longer_is_better else -mask.sum(-1)
    length_rule = good_above_bad(lengths, good)

    def evaluate(params: Params) -> dict[str, float]:
        texts = [text for of_row in log_probs(params, held_out, to_pairs) for text in of_row]
        policy = np.array([text.sum(dtype=np.float64) for text in texts])
        return beside_lengths(good_above_bad(policy - reference, good), length_rule)

    return evaluate


def good_above_bad(scores: np.ndarray, good: np.ndarray) -> intervals.Estimate:
    """Return the chance that a good completion scores above a bad one: the area under the ROC.

    A tie counts one half. The interval, and n, count the completions of the rarer label; the area
    varies at most as much as a share of so many trials, so that the interval is conservative (D.
    van Dantzig, Proc. Kon. Ned. Akad. Wet. A 54, 1951).

    Args:
        scores: [completions].
        good: [completions] bool, with both values.
    """

    def shares_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
        # Sorted, because an array of all pairs may not fit in memory.
        others = np.sort(others)
        num_below = np.searchsorted(others, values, "left")
        num_not_above = np.searchsorted(others, values, "right")
        return (num_below + num_not_above) / (2 * len(others))

    if good.sum() <= (~good).sum():
        shares = shares_below(scores[good], scores[~good])
    else:
        shares = 1 - shares_below(scores[~good], scores[good])
    return intervals.estimate(shares.tolist())


def lengths_of(
    rows: Sequence[Row], tokenizer: Tokenizer, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each completion of pairs, [N], and if it is a good one, [N] bool.

    Of many rows, `MAX_ROWS` stand for all. A part of the rows is encoded at a time, because arrays
    of all of them may not fit in memory.
    """
    lengths = []
    good = []
    if len(rows) > MAX_ROWS:
        rows = data.take(rows, np.linspace(0, len(rows) - 1, MAX_ROWS).astype(int))
    for first in range(0, len(rows), ROWS_AT_ONCE):
        pairs = data.pairs(rows[first : first + ROWS_AT_ONCE], tokenizer, max_length)
        lengths.append(np.asarray(pairs.action_mask).sum(-1))
        good.append(np.asarray(pairs.preferred))
    return np.concatenate(lengths), np.concatenate(good)


def longer_or_shorter(train_lengths: np.ndarray, held_out_lengths: np.ndarray) -> np.ndarray:
    """Return [pairs] how well one rule ranks the held-out pairs: 1 right, 0 wrong, 0.5 a tie.

    The rule is "the longer completion is better" or its opposite, whichever is right more often in
    training. Lengths are [2 * pairs], with that of the chosen completion first.
    """

    def longer_wins(lengths: np.ndarray) -> np.ndarray:
        chosen, rejected = lengths.reshape(-1, 2).T
        return (chosen > rejected) + 0.5 * (chosen == rejected)

    right = longer_wins(held_out_lengths)
    return right if longer_wins(train_lengths).mean() >= 0.5 else 1 - right


def beside_lengths(measured: intervals.Estimate, by_length: intervals.Estimate) -> dict[str, float]:
    """Return the metrics of an accuracy, and of the one that lengths alone have."""
    metrics = {}
    for prefix, estimate in (("eval/", measured), ("eval/length_only_", by_length)):
        metrics |= estimate.as_metrics(f"{prefix}accuracy", f"{prefix}n")
    return metrics


def by_problem(shares: np.ndarray, problems: Sequence[int]) -> intervals.Estimate:
    """Return the mean over problems of each problem's mean, with its interval."""
    of_row = np.array(problems)
    return intervals.estimate(
        [float(np.mean(shares[of_row == problem])) for problem in sorted(set(problems))]
    )
