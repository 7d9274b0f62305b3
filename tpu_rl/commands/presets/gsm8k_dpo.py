"""DPO on labeled solutions of GSM8K problems (arXiv 2110.14168, example_model_solutions.jsonl).

Right solutions are preferred to wrong ones:

    python launch/run.py gsm8k_dpo --data.path example_model_solutions.jsonl

The last problems are held out, at most a quarter. Evaluations report the share of their pairs that
the implicit reward ranks rightly, with equal weight for each problem, beside a ranking by length
alone. A constant guess has one half. A model of half a million parameters that has read nothing
else will not rank them well. For your own checkpoint:
--model.path DIR --model.no-random-init --model.dtype bfloat16 --optimizer.learning-rate 1e-6. The
problems are those of GSM8K's test set, so evaluate the trained model on other problems.
"""

from tpu_rl.algos import DpoConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=DpoConfig(beta=0.1),
    data=FileData(format="gsm8k_solutions"),
    model=ModelConfig(path="builtin:gsm8k_scratch", random_init=True),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=20),
    batch=BatchConfig(prompts=32, group_size=1, row_length=1024, micro_batch_rows=4),
    sampling=SamplingConfig(max_prompt_tokens=256, max_new_tokens=384),
    evaluation=EvaluationConfig(rows=500, interval=20),
    steps=120,
    checkpoint_every=40,
)
