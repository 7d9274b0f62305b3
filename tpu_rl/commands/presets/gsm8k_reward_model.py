"""A small reward model, from scratch, on labeled GSM8K solutions (arXiv 2110.14168,
example_model_solutions.jsonl):

    python launch/run.py gsm8k_reward_model --data.path example_model_solutions.jsonl

It compares right and wrong solutions of a problem. The last problems are held out, at most a
quarter. A model of half a million parameters that has read nothing else will not rank them well;
its accuracy is reported beside that of a rule that knows only their lengths. For your own
checkpoint: --model.path DIR --model.no-random-init.
"""

from dataclasses import replace

from tpu_rl.algos import RewardModelConfig
from tpu_rl.commands.presets import gsm8k_dpo
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = replace(
    gsm8k_dpo.CONFIG,
    algorithm=RewardModelConfig(centering_coef=0.01),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, warmup_steps=20, schedule="cosine", weight_decay=0.1, beta2=0.98
    ),
)
