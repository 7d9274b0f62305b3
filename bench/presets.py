"""The arithmetic presets that no other script of this folder runs, with several seeds.

    python bench/presets.py --to runs/bench [--seeds 0 1 2] [--arms reinforce remax ...]

The accuracy of the two reward models is the share of held-out steps, or pairs, that they judge
correctly.
"""

from arms import main

ARMS = {
    "reinforce": ["arithmetic_reinforce"],
    "reinforce_baseline": [
        "arithmetic_reinforce",
        *("--algorithm.baseline", "group"),
        *("--batch.group-size", "8"),
        *("--batch.prompts", "32"),
    ],
    "remax": [
        "arithmetic_reinforce",
        *("--algorithm.baseline", "greedy"),
        "--algorithm.no-whiten",
        *("--algorithm.loss-aggregation", "constant_length"),
    ],
    "a_star_po": ["arithmetic_a_star_po"],
    "process_reward": ["arithmetic_process_reward"],
    "sentence_reward": ["arithmetic_sentence_reward"],
}

if __name__ == "__main__":
    main(__doc__, ARMS)
