"""The default run and its controls, several seeds each.

python bench/arithmetic.py --to runs/bench [--seeds 0 1 2] [--arms grpo shuffled more_sft]
"""

from arms import ROOT, main

ARMS = {
    "grpo": ["arithmetic_grpo"],
    "shuffled": [
        "arithmetic_grpo", "--reward", str(ROOT / "bench/shuffled_reward.py:score"),
        "--evaluation.reward", "arithmetic",
    ],
    # As many steps as take the default run's time, from the same model, on the data that it was made from.
    "more_sft": [
        "arithmetic_sft", "--model.no-random-init", "--optimizer.learning-rate", "3e-4", "--steps", "400",
        "--evaluation.rows", "500",
    ],
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, ARMS)
