"""The arithmetic presets that no other script of this folder runs, several seeds each.

python bench/presets.py --to runs/bench [--seeds 0 1 2] [--arms reinforce reinforce_baseline remax a_star_po ...]

Of the two reward models accuracy is the share of held-out steps, or pairs, that are judged rightly.
"""

from arms import main

ARMS = {
    "reinforce": ["arithmetic_reinforce"],
    "reinforce_baseline": [
        "arithmetic_reinforce", "--algorithm.baseline", "group", "--batch.completions", "8", "--batch.prompts", "32",
    ],
    "remax": [
        "arithmetic_reinforce", "--algorithm.baseline", "greedy", "--algorithm.no-whiten", "--algorithm.weights",
        "constant_length",
    ],
    "a_star_po": ["arithmetic_a_star_po"],
    "process_reward": ["arithmetic_process_reward"],
    "sentence_reward": ["arithmetic_sentence_reward"],
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__, ARMS)
