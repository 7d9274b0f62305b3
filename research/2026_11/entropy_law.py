"""The law between entropy and reward, R = -a exp(H) + b (arXiv 2505.22617), in finished runs.

    python research/2026_11/entropy_law.py RUN [RUN ...]

R and H are reward and entropy of the training batches. b - a is the ceiling that the law gives for
no entropy. The last columns fit the law to the first third of the steps and foretell the mean
reward of the last ten from their entropy.
"""

from __future__ import annotations

from pathlib import Path

import arms
import numpy as np


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    arms.print_heading(
        "run", "entropy, first and last 5", "a", "b", "b - a", "R^2", "foretold", "last 10 steps"
    )
    for run_dir in parser.parse_args().runs:
        rows = [row for row in arms.read_metrics(run_dir) if row["step"] > 0]
        entropy = np.array([row["policy/entropy"] for row in rows])
        reward = np.array([row["reward/mean"] for row in rows])
        x = np.exp(entropy)
        slope, b = np.polyfit(x, reward, 1)
        explained = 1 - np.var(reward - slope * x - b) / np.var(reward)
        third = len(rows) // 3
        early = np.polyfit(x[:third], reward[:third], 1)
        foretold = np.polyval(early, x[-10:]).mean()
        numbers = (-slope, b, b + slope, explained, foretold, reward[-10:].mean())
        ends = f"{entropy[:5].mean():.3f}, {entropy[-5:].mean():.3f}"
        arms.print_row(run_dir.name, ends, *(f"{number:.2f}" for number in numbers))


if __name__ == "__main__":
    main()
