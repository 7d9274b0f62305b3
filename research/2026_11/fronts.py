"""Shared by q_sharp.py, steering.py and perfect_values.py: reward against KL, paired over prompts.

All methods answer the same prompts. The gain of one over another is that of the means over prompts,
with a bootstrap over prompts, so what makes a prompt easy or hard for both does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import arms
import numpy as np
from scipy import stats

from tpu_rl.evaluation.answer_accuracy import mean_estimate

RESAMPLES = 2000


class Answers(NamedTuple):
    """One way to answer the prompts: numbers per prompt [P], the mean of its completions."""

    name: str
    setting: str
    rewards: np.ndarray
    exact: np.ndarray
    """Share of completions with the full reward."""
    kl: np.ndarray
    """Nats per completion, to the reference."""


def percent(values: np.ndarray) -> str:
    """Format the mean of one number per prompt, with its interval, in percent."""
    estimate = mean_estimate(values.tolist())
    return f"{100 * estimate.value:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def mean_of_seeds(lines_of_seeds: Sequence[Sequence[Answers]]) -> list[Answers]:
    """Return the means over seeds, prompt by prompt, of the lines that all seeds have."""
    by_name = [{line[:2]: line for line in lines} for lines in lines_of_seeds]
    shared = [key for key in by_name[0] if all(key in lines for lines in by_name)]
    means = []
    for key in shared:
        same = [lines[key] for lines in by_name]
        means.append(
            same[0]._replace(
                rewards=np.mean([line.rewards for line in same], axis=0),
                exact=np.mean([line.exact for line in same], axis=0),
                kl=np.mean([line.kl for line in same], axis=0),
            )
        )
    return means


def front(lines: Sequence[Answers], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (KL, reward) [lines, P] of a method over its settings, from the reference on."""
    chosen = [line for line in lines if line.name in ("reference", name)]
    return np.array([line.kl for line in chosen]), np.array([line.rewards for line in chosen])


def show_gains(lines: Sequence[Answers], others: Sequence[Answers]) -> None:
    """Print the gain of the Q# of `lines` over other methods, at the KL of each of their settings.

    Between two coefficients Q# is interpolated linearly: choosing one of the two at random for each
    answer reaches that, at no more KL. Intervals are from a bootstrap over prompts, of rewards and
    of KLs.
    """
    arms.print_heading("against", "setting", "KL, nats", "its reward, %", "Q#, %", "gain of Q#")
    kl, rewards = front(lines, "Q#")

    def q_sharp_at(line: Answers, rows: np.ndarray) -> float:
        levels, values = kl[:, rows].mean(1), rewards[:, rows].mean(1)
        order = np.argsort(levels)
        return float(np.interp(line.kl[rows].mean(), levels[order], values[order]))

    everyone = np.arange(len(lines[0].kl))
    for line in others:
        if line.name in ("reference", "Q#") or line.kl.mean() > kl.mean(1).max():
            continue

        def gain(rows: np.ndarray, line: Answers = line) -> float:
            return q_sharp_at(line, rows) - float(line.rewards[rows].mean())

        low, high = stats.bootstrap(
            (everyone,),
            gain,
            n_resamples=RESAMPLES,
            vectorized=False,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
        arms.print_row(
            line.name,
            line.setting,
            f"{line.kl.mean():.3f}",
            f"{100 * line.rewards.mean():.1f}",
            f"{100 * q_sharp_at(line, everyone):.1f}",
            f"{100 * gain(everyone):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
        )


def show_all_gains(lines_of_seeds: Mapping[int, Sequence[Answers]]) -> None:
    """Print the gains of Q# of each seed, and of the mean of all seeds."""
    for seed, lines in lines_of_seeds.items():
        print(f"\nseed {seed}\n")
        show_gains(lines, lines)
    if len(lines_of_seeds) > 1:
        lines = mean_of_seeds(list(lines_of_seeds.values()))
        print(f"\nmean of {len(lines_of_seeds)} seeds\n")
        show_gains(lines, lines)
