"""Which metrics of a run the report draws, and in which words."""

from __future__ import annotations

from typing import NamedTuple


class Chart(NamedTuple):
    """A chart of the page, drawn if the run has one of its metrics (metric -> label)."""

    title: str
    note: str
    metrics: dict[str, str]
    percent: bool = False
    log: bool = False


LOSSES = ("sft/loss", "distill/loss", "q/loss", "optim/loss")
"""The first that a run has is its headline picture where nothing was evaluated."""
BEHAVIOUR = (
    Chart(
        "Completions that teach little",
        "Shares: cut off at the length limit; in groups whose rewards are all equal.",
        {"rollout/truncated": "cut off", "reward/zero_std_groups": "equal rewards"},
        percent=True,
    ),
    Chart("Length", "Tokens of a completion.", {"rollout/length_mean": "mean", "rollout/length_max": "longest"}),
    Chart("Entropy", "Of the next-token distribution, nats a token.", {"policy/entropy": ""}),
    Chart("Distance from the reference", "KL divergence, nats a token.", {"policy/kl_reference": ""}),
)
OPTIMIZATION = (
    Chart(
        "Clipped tokens",
        "Share whose probability ratio left the trust region downwards and upwards.",
        {"policy/clip_low": "low", "policy/clip_high": "high"},
        percent=True,
    ),
    Chart(
        "Probability ratio",
        "New to old policy, extremes over a step's tokens.",
        {"policy/ratio_max": "largest", "policy/ratio_min": "smallest"},
    ),
    Chart("KL to the old policy", "Nats a token, over a step's updates.", {"policy/kl_old": ""}),
    Chart(
        "Sampler against trainer",
        "Absolute gap of the log-probs that both give the same tokens.",
        {"policy/log_prob_gap_max": "largest", "policy/log_prob_gap_mean": "mean"},
        log=True,
    ),
    Chart("Gradient norm", "Over all trained weights, before clipping.", {"optim/grad_norm": ""}),
    Chart("Learning rate", "", {"optim/learning_rate": ""}),
)
THROUGHPUT = Chart(
    "Throughput",
    "Tokens a second while sampling and while training.",
    {"perf/rollout_tokens_per_second": "sampled", "perf/train_tokens_per_second": "trained"},
)
