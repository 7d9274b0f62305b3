"""The metrics that the report draws, with their titles and notes."""

from __future__ import annotations

from typing import NamedTuple

from tpu_rl.report.axes import RESOLUTION


class Chart(NamedTuple):
    """A chart of the page. It is drawn if the run has one of its metrics."""

    title: str
    note: str
    metrics: dict[str, str]
    """Metric -> label of its line."""
    percent: bool = False
    log: bool = False
    resolution: float = RESOLUTION
    """The least height of its vertical axis: smaller differences are drawn as flat."""
    has_band: bool = False
    """Draw the limits of the metrics, if the run has them."""


LOSSES = ("sft/loss", "distill/loss", "q/loss", "optim/loss")
"""The first of these that a run has is its headline if nothing was evaluated."""
BEHAVIOR = (
    Chart(
        "Completions with little to learn from",
        "Shares: cut off at the length limit; in groups whose rewards are all equal.",
        {"rollout/truncated": "cut off", "reward/zero_std_groups": "equal rewards"},
        percent=True,
    ),
    Chart(
        "Length",
        "Tokens per completion.",
        {"rollout/length_mean": "mean", "rollout/length_max": "longest"},
    ),
    Chart("Entropy", "Of the next-token distribution, nats per token.", {"policy/entropy": ""}),
    Chart(
        "Distance from the reference",
        "KL divergence, nats per token.",
        {"policy/kl_reference": ""},
        resolution=1e-6,
    ),
)
OPTIMIZATION = (
    Chart(
        "Clipped tokens",
        "Share of tokens whose probability ratio left the trust region, below and above.",
        {"policy/clip_low": "low", "policy/clip_high": "high"},
        percent=True,
    ),
    Chart(
        "Probability ratio",
        "New to old policy, extremes over the tokens of a step.",
        {"policy/ratio_max": "largest", "policy/ratio_min": "smallest"},
    ),
    Chart(
        "KL to the old policy",
        "Nats per token, over the updates of a step.",
        {"policy/kl_old": ""},
        resolution=1e-6,
    ),
    Chart(
        "Sampler against trainer",
        "Absolute difference of their log-probs of the same tokens.",
        {"policy/log_prob_gap_max": "largest", "policy/log_prob_gap_mean": "mean"},
        log=True,
    ),
    Chart("Gradient norm", "Over all trained weights, before clipping.", {"optim/grad_norm": ""}),
    Chart("Learning rate", "", {"optim/learning_rate": ""}, resolution=0.0),
)
THROUGHPUT = Chart(
    "Throughput",
    "Tokens per second while sampling and while training.",
    {
        "perf/rollout_tokens_per_second": "sampled",
        "perf/read_tokens_per_second": "read",
        "perf/train_tokens_per_second": "learned",
    },
)
