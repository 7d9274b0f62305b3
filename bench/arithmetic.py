"""The default run and its controls, with several seeds.

    python bench/arithmetic.py --to runs/bench [--seeds 0 1 2] [--arms grpo shuffled more_sft]

`shuffled` gives the right rewards to the wrong completions. `more_sft` trains the same model on the
data that it was made from, for as many steps as fit into the time of the default run.
"""

from arms import ROOT, main

ARMS = {
    "grpo": ["arithmetic_grpo"],
    "shuffled": [
        "arithmetic_grpo",
        *("--reward", str(ROOT / "bench/shuffled_reward.py:score")),
        *("--evaluation.reward", "arithmetic"),
    ],
    "more_sft": [
        "arithmetic_sft",
        "--model.no-random-init",
        *("--optimizer.learning-rate", "3e-4"),
        *("--steps", "400"),
        *("--evaluation.rows", "500"),
    ],
}

if __name__ == "__main__":
    main(__doc__, ARMS)
