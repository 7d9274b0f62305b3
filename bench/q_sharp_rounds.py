"""Do further rounds of Q# help where q cannot be right everywhere? Exact, on random trees: no sampling, no network.

    python bench/q_sharp_rounds.py [--trees 60]

Deterministic trees with a Bernoulli return at each leaf. q is logistic in features too few to tell all prefixes apart,
one of them a noisy hint at the truth. It is fitted to the infinite data of each round (roll-in, uniform cut, the
reference's continuation; rounds aggregated, fitted anew), and judged by J = return - eta KL of the policy it guides.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.optimize import minimize

TOKENS, DEPTH, RIGHT, ROUNDS = 3, 5, 0.15, 5

Levels = list[np.ndarray]
"""One array a depth: [V ** h] of prefixes, or [V ** h, V] of what follows them."""


def reached(policy: Levels) -> Levels:
    """How likely each prefix is."""
    found = [np.ones(1)]
    for step in policy:
        found.append((found[-1][:, None] * step).ravel())
    return found


def chances(reference: Levels, right: np.ndarray) -> Levels:
    """How likely the reference ends rightly, from each prefix."""
    found = [right]
    for step in reversed(reference):
        found.insert(0, (step * found[0].reshape(-1, TOKENS)).sum(1))
    return found


def guided(reference: Levels, logits: Levels, kl_coef: float) -> Levels:
    policy = []
    for step, of_next in zip(reference, logits[1:], strict=True):
        logit = of_next.reshape(-1, TOKENS)
        offset = np.logaddexp(0, 1 / kl_coef + logit) - np.logaddexp(0, logit)
        weight = np.exp(np.log(step) + offset - offset.max(1, keepdims=True))
        policy.append(weight / weight.sum(1, keepdims=True))
    return policy


def objective(policy: Levels, reference: Levels, right: np.ndarray, kl_coef: float) -> float:
    at = reached(policy)
    kl = sum(
        float((here[:, None] * step * np.log(np.maximum(step, 1e-300) / base)).sum())
        for here, step, base in zip(at, policy, reference, strict=False)
    )
    return float(at[-1] @ right) - kl_coef * kl


def labelled(roll_in: Levels, reference: Levels) -> Levels:
    """What each prefix weighs in a round's loss: a sequence's labelled tokens share its weight."""
    weights = [np.zeros(TOKENS**h) for h in range(DEPTH + 1)]
    starts = reached(roll_in)
    for cut in range(1, DEPTH + 1):
        here, share = starts[cut], 1 / DEPTH / (DEPTH - cut + 1)
        weights[cut] += share * here
        for h in range(cut, DEPTH):
            here = (here[:, None] * reference[h]).ravel()
            weights[h + 1] += share * here
    return weights


def fitted(features: Levels, weights: Levels, chance: Levels) -> Levels:
    """Logits of the logistic model of least cross-entropy."""
    x, w, p = (np.concatenate(levels[1:]) for levels in (features, weights, chance))

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        z = x @ theta
        slope = w * (1 / (1 + np.exp(-z)) - p)
        return w @ (np.logaddexp(0, z) - p * z) + 1e-4 * theta @ theta, x.T @ slope + 2e-4 * theta

    theta = minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x
    return [level @ theta for level in features]


def rounds_of(seed: int, size: int, kl_coef: float) -> list[float]:
    """J of the reference and after each round, less the optimum's."""
    random = np.random.default_rng(seed)
    reference = [random.dirichlet(np.ones(TOKENS), size=TOKENS**h) for h in range(DEPTH)]
    right = (random.random(TOKENS**DEPTH) < RIGHT).astype(float)
    chance = chances(reference, right)
    features = [random.normal(size=(TOKENS**h, size)) for h in range(DEPTH + 1)]
    for level, p in zip(features, chance, strict=True):
        p = np.clip(p, 1e-3, 1 - 1e-3)
        level[:, 0] = 1
        level[:, 1] = 0.3 * np.log(p / (1 - p)) + 0.7 * random.normal(size=len(p))
    policy, total = reference, [np.zeros(TOKENS**h) for h in range(DEPTH + 1)]
    optimum = kl_coef * np.log1p(chance[0][0] * np.expm1(1 / kl_coef))
    found = [objective(reference, reference, right, kl_coef) - optimum]
    for _ in range(ROUNDS):
        total = [a + b for a, b in zip(total, labelled(policy, reference), strict=True)]
        policy = guided(reference, fitted(features, total, chance), kl_coef)
        found.append(objective(policy, reference, right, kl_coef) - optimum)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=int, default=60)
    flags = parser.parse_args()
    print("J less the optimum's, mean over trees; then round by round its gain over round 1 with a 95 % interval\n")
    print(f"| features | eta | reference | round 1 | {' | '.join(f'round {k}' for k in range(2, ROUNDS + 1))} |")
    print("|---|---|---|---|" + "---|" * (ROUNDS - 1))
    for size in (6, 16):
        for kl_coef in (0.1, 0.3):
            found = np.array([rounds_of(seed, size, kl_coef) for seed in range(flags.trees)])
            gains = found[:, 2:] - found[:, 1:2]
            half = 1.96 * gains.std(0, ddof=1) / np.sqrt(len(gains))
            cells = [f"{gain:+.4f} ± {width:.4f}" for gain, width in zip(gains.mean(0), half, strict=True)]
            start, first = found.mean(0)[:2]
            print(f"| {size} | {kl_coef} | {start:.4f} | {first:.4f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
