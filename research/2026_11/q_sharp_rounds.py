"""Do more rounds of Q# help when q cannot be right everywhere? Computed exactly, on random trees.

    python research/2026_11/q_sharp_rounds.py [--trees 60]

The trees are deterministic and have a Bernoulli return at each leaf. q is logistic in features that
are too few to tell all prefixes apart; one of them is a noisy hint at the true value. In each round
q is fitted again to the infinite data of all rounds so far (roll-in, uniform cut, continuation by
the reference). It is judged by J = return - eta KL of the policy that it guides.
"""

from __future__ import annotations

import arms
import numpy as np
from scipy.optimize import minimize

TOKENS = 3
DEPTH = 5
RIGHT_SHARE = 0.15
ROUNDS = 5

Levels = list[np.ndarray]
"""One array per depth h: [V ** h] over prefixes, or [V ** h, V] over the tokens after them."""


def prefix_probabilities(policy: Levels) -> Levels:
    """Return the probability of each prefix."""
    levels = [np.ones(1)]
    for step in policy:
        levels.append((levels[-1][:, None] * step).ravel())
    return levels


def success_probabilities(reference: Levels, right: np.ndarray) -> Levels:
    """Return the probability that the reference ends at a right leaf, from each prefix."""
    levels = [right]
    for step in reversed(reference):
        levels.insert(0, (step * levels[0].reshape(-1, TOKENS)).sum(1))
    return levels


def guide(reference: Levels, logits: Levels, kl_coef: float) -> Levels:
    """Return the reference guided by a Bernoulli q with these logits."""
    policy = []
    for step, level in zip(reference, logits[1:], strict=True):
        next_logits = level.reshape(-1, TOKENS)
        offset = np.logaddexp(0, 1 / kl_coef + next_logits) - np.logaddexp(0, next_logits)
        weight = np.exp(np.log(step) + offset - offset.max(1, keepdims=True))
        policy.append(weight / weight.sum(1, keepdims=True))
    return policy


def objective(policy: Levels, reference: Levels, right: np.ndarray, kl_coef: float) -> float:
    """Return J of a policy."""
    probabilities = prefix_probabilities(policy)
    kl = sum(
        float((prefix[:, None] * step * np.log(np.maximum(step, 1e-300) / base)).sum())
        for prefix, step, base in zip(probabilities, policy, reference, strict=False)
    )
    return float(probabilities[-1] @ right) - kl_coef * kl


def round_weights(roll_in: Levels, reference: Levels) -> Levels:
    """Return the weight of each prefix in a round's loss.

    The labeled tokens of a sequence share its weight.
    """
    weights = [np.zeros(TOKENS**h) for h in range(DEPTH + 1)]
    starts = prefix_probabilities(roll_in)
    for cut in range(1, DEPTH + 1):
        probability = starts[cut]
        share = 1 / DEPTH / (DEPTH - cut + 1)
        weights[cut] += share * probability
        for h in range(cut, DEPTH):
            probability = (probability[:, None] * reference[h]).ravel()
            weights[h + 1] += share * probability
    return weights


def fit(features: Levels, weights: Levels, success: Levels) -> Levels:
    """Return the logits of the logistic model with the least cross-entropy."""
    x, w, p = (np.concatenate(levels[1:]) for levels in (features, weights, success))

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        z = x @ theta
        slope = w * (1 / (1 + np.exp(-z)) - p)
        return w @ (np.logaddexp(0, z) - p * z) + 1e-4 * theta @ theta, x.T @ slope + 2e-4 * theta

    theta = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x
    return [level @ theta for level in features]


def run_rounds(seed: int, num_features: int, kl_coef: float) -> list[float]:
    """Return J minus the optimal J, of the reference and after each round, on one random tree."""
    random = np.random.default_rng(seed)
    reference = [random.dirichlet(np.ones(TOKENS), size=TOKENS**h) for h in range(DEPTH)]
    right = (random.random(TOKENS**DEPTH) < RIGHT_SHARE).astype(float)
    success = success_probabilities(reference, right)
    features = [random.normal(size=(TOKENS**h, num_features)) for h in range(DEPTH + 1)]
    for level, p in zip(features, success, strict=True):
        p = np.clip(p, 1e-3, 1 - 1e-3)
        level[:, 0] = 1
        level[:, 1] = 0.3 * np.log(p / (1 - p)) + 0.7 * random.normal(size=len(p))
    policy = reference
    weights = [np.zeros(TOKENS**h) for h in range(DEPTH + 1)]
    optimum = kl_coef * np.log1p(success[0][0] * np.expm1(1 / kl_coef))
    gaps = [objective(reference, reference, right, kl_coef) - optimum]
    for _ in range(ROUNDS):
        new_weights = round_weights(policy, reference)
        weights = [a + b for a, b in zip(weights, new_weights, strict=True)]
        policy = guide(reference, fit(features, weights, success), kl_coef)
        gaps.append(objective(policy, reference, right, kl_coef) - optimum)
    return gaps


def main() -> None:
    parser = arms.make_parser(__doc__)
    parser.add_argument("--trees", type=int, default=60)
    flags = parser.parse_args()
    print(
        "J minus the optimal J, mean over trees; then the gain of each round over round 1,"
        " with a 95 % interval\n"
    )
    rounds = [f"round {number}" for number in range(2, ROUNDS + 1)]
    arms.print_heading("features", "eta", "reference", "round 1", *rounds)
    for num_features in (6, 16):
        for kl_coef in (0.1, 0.3):
            gaps = np.array(
                [run_rounds(seed, num_features, kl_coef) for seed in range(flags.trees)]
            )
            gains = gaps[:, 2:] - gaps[:, 1:2]
            half = 1.96 * gains.std(0, ddof=1) / np.sqrt(len(gains))
            cells = [
                f"{gain:+.4f} ± {width:.4f}"
                for gain, width in zip(gains.mean(0), half, strict=True)
            ]
            reference, first = gaps.mean(0)[:2]
            arms.print_row(num_features, kl_coef, f"{reference:.4f}", f"{first:.4f}", *cells)


if __name__ == "__main__":
    main()
