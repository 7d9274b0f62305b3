"""DPO and related losses on the default problems, from the model's own right and wrong answers.

python bench/dpo.py --to runs/dpo [--seeds 0 1 2] [--arms dpo rpo online ...]
"""

from arms import main

ARMS = {
    "dpo": ["arithmetic_dpo"],
    "rpo": ["arithmetic_dpo", "--algorithm.rpo-coef", "1"],
    "online": ["arithmetic_dpo", "--algorithm.pairs", "policy"],
    "reverse": ["arithmetic_dpo", "--algorithm.reverse"],
    "ipo": ["arithmetic_dpo", "--algorithm.loss", "ipo"],
    "worst_case": ["arithmetic_dpo", "--algorithm.robust-radius", "0.2"],
    "bco": ["arithmetic_bco"],
    "kto": ["arithmetic_bco", "--algorithm.loss", "kto"],
}

if __name__ == "__main__":
    main(__doc__, ARMS)
