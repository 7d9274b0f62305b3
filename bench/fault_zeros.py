"""What would a reward of 0 for each fault of the machinery change, in place of no reward?

    python bench/fault_zeros.py [--problems 128] [--seeds 3] [--small]

The shipped model plays `arithmetic_multi_attempt` in groups of eight episodes, and nothing faults:
with one attempt, where an episode is long if it writes the calculation out, and with five, where it
is long if it is wrong. Then a tenth of the episodes is made to fault, many times at random:
whatever they did, or with the same chance at each token, so that long episodes fault more often.
Faults are dropped, as runs do, or scored zero. A right answer earns 1, another one 0 or what the
task says (-0.5, and -1 if it cannot be read).

Prints, as means over seeds with 95 % intervals of Student's t: the mean reward that a run would
report, the mean advantage (GRPO's) of right episodes that are longer than the mean and of those
that are not, their difference, that of wrong ones, and the correlation of the advantages with those
without faults. No model learns here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "bench"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from tpu_rl.commands import compose, config  # noqa: E402
from tpu_rl.evaluation.intervals import t_quantile  # noqa: E402
from tpu_rl.losses.advantages import group_scaled  # noqa: E402
from tpu_rl.rollout.engine import RolloutRequest  # noqa: E402

GROUP_SIZE = 8
SHARE = 0.1
DRAWS = 200
"""Draws of faults for each seed."""
COLUMNS = ("reward", "right, long", "right, short", "difference", "wrong", "correlation")
GAMES = (("one", 1, False), ("five", 5, False), ("five", 5, True))
"""Attempts, their number, and whether rewards are those of the task."""


def sampled(problems: int, seed: int, attempts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (rewards, tokens) [G, N] of the shipped model's episodes."""
    run_dir = Path("runs/fault_zeros")
    run_config = config.parse(
        [
            "arithmetic_multi_attempt",
            f"--batch.prompts={problems}",
            f"--batch.group-size={GROUP_SIZE}",
            f"--seed={seed}",
            f"--sampling.max-turns={attempts}",
            f"--run-dir={run_dir}",
        ]
    )
    mesh = compose.make_mesh(run_config.mesh)
    context, params = compose.make_context(run_config, run_dir, mesh)
    rows = next(compose.row_stream(context, run_config.stages[0]))[1]
    with jax.set_mesh(mesh):
        scored = compose.rollout_engine(context).roll_out(params, RolloutRequest(rows, step=1))
    return scored.rewards.reshape(-1, GROUP_SIZE), scored.lengths.reshape(-1, GROUP_SIZE)


@jax.jit
def advantages(rewards: np.ndarray) -> jax.Array:
    """Return GRPO's advantages of rewards [D, G, N]. NaN is an episode without a reward, whose
    advantage is 0."""
    draws, groups, _ = rewards.shape
    flat = rewards.reshape(draws, -1)
    group_id = jnp.repeat(jnp.arange(groups), GROUP_SIZE)
    scored = jnp.isfinite(flat)
    one = jax.vmap(group_scaled, (0, None, 0))
    scaled = one(jnp.nan_to_num(flat), group_id, scored.astype(jnp.int32))
    return jnp.where(scored, scaled, 0.0).reshape(rewards.shape)


def chances(tokens: np.ndarray, is_long: bool) -> np.ndarray:
    """Return the chance of a fault of each episode, SHARE on average."""
    if not is_long:
        return np.full(tokens.shape, SHARE)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        mean = (1 - (1 - middle) ** tokens).mean()
        low, high = (middle, high) if mean < SHARE else (low, middle)
    return 1 - (1 - low) ** tokens


def measured(
    rewards: np.ndarray, tokens: np.ndarray, chance: np.ndarray, fault: float, seed: int
) -> list[float]:
    """Return the numbers of COLUMNS, if faults get the reward `fault`, over DRAWS draws."""
    generator = np.random.default_rng(seed)
    is_right = rewards == 1
    is_long = tokens > tokens.mean()
    kinds = (is_right & is_long, is_right & ~is_long, ~is_right)
    has_fault = generator.random((DRAWS, *rewards.shape)) < chance
    seen = np.where(has_fault, fault, rewards).astype(np.float32)
    got = np.asarray(advantages(seen))
    whole = np.broadcast_to(np.asarray(advantages(rewards[None])), got.shape)
    scored = np.isfinite(seen)
    correlation = np.corrcoef(got[scored], whole[scored])[0, 1]
    # An episode without a reward adds nothing to what is learned of its kind.
    long, short, wrong = (float(got[:, kind].mean()) for kind in kinds)
    return [float(np.nanmean(seen)), long, short, long - short, wrong, float(correlation)]


def shown(values: np.ndarray) -> str:
    """Return the mean over seeds and its interval."""
    if len(values) < 2:
        return f"{values.mean():.3f}"
    half = t_quantile(len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.3f} ± {half:.3f}"


def main() -> None:
    import arms

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="8 problems, one seed")
    flags = parser.parse_args()
    if flags.small:
        flags.problems, flags.seeds = 8, 1
    found: dict[tuple[str, ...], list[list[float]]] = {}
    for seed in range(flags.seeds):
        episodes = {attempts: sampled(flags.problems, seed, attempts) for attempts in (1, 5)}
        for name, attempts, is_own in GAMES:
            rewards, tokens = episodes[attempts]
            rewards = rewards if is_own else (rewards == 1).astype(np.float32)
            shown_rewards = "1, -0.5, -1" if is_own else "1, 0"
            nothing = np.zeros(tokens.shape)
            for kind, chance in (
                ("none", nothing),
                ("at random", chances(tokens, False)),
                ("in long episodes", chances(tokens, True)),
            ):
                fates = (("dropped", np.nan), ("zero", 0.0)) if chance.any() else (("", np.nan),)
                for fate, value in fates:
                    numbers = measured(rewards, tokens, chance, value, seed)
                    found.setdefault((name, shown_rewards, kind, fate), []).append(numbers)
    arms.print_heading("attempts", "rewards", "faults", "they are", *COLUMNS)
    for names, numbers in found.items():
        arms.print_row(*names, *map(shown, np.transpose(numbers)))


if __name__ == "__main__":
    main()
