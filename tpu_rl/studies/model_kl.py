"""The KL divergence of a model to another one, on completions that it sampled itself.

    KL(p || q) = E_p[sum over the tokens of a completion of log p - log q]

Per token it is the sum of the differences over the number of tokens (a ratio of means). Intervals
count problems, since completions of one problem depend on each other.
"""

from __future__ import annotations

import numpy as np

from tpu_rl.evaluation.intervals import Estimate, ratio_estimate
from tpu_rl.sampler.text_scores import Score
from tpu_rl.types import Rollout


def per_token(rollout: Rollout, score: Score) -> Estimate:
    """Return the KL in nats per token of the model that sampled to the one that scores.

    Args:
        rollout: single turns, sampled from the whole distribution at temperature 1.
        score: scores texts by the other model; see `sampler.text_scorer`.
    """
    mask = np.asarray(rollout.action_mask)
    tokens = np.asarray(rollout.tokens)
    texts = [
        row[: actions.nonzero()[0][-1] + 1].tolist()
        for row, actions in zip(tokens, mask, strict=True)
    ]
    sampled = np.asarray(rollout.log_probs, np.float64)
    totals: dict[int, float] = {}
    counts: dict[int, int] = {}
    for row, scores in enumerate(score(texts, 1)):
        columns = mask[row].nonzero()[0]
        problem = int(np.asarray(rollout.group_id)[row])
        # The first token of a text has no log-prob.
        difference = float((sampled[row, columns] - scores.log_probs[columns - 1]).sum())
        totals[problem] = totals.get(problem, 0.0) + difference
        counts[problem] = counts.get(problem, 0) + len(columns)
    return ratio_estimate([*totals.values()], [*counts.values()])
