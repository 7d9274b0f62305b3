"""A small reward model from scratch on labelled GSM8K solutions (arXiv 2110.14168, example_model_solutions.jsonl):

    python launch/run.py gsm8k_reward_model --data.path example_model_solutions.jsonl

Right against wrong solutions of a problem; every fourth problem is held out. A model of half a million parameters that
has read nothing else will not rank them well: its accuracy stands beside that of a rule that knows their lengths only.
Your own checkpoint: --model.path DIR --model.no-random-init.
"""

from launch.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import RewardModelConfig
from tpu_rl.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=RewardModelConfig(centring_coef=0.01),
    data=FileData(format="gsm8k_solutions"),
    model=ModelConfig(path="builtin:gsm8k_scratch", random_init=True),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, schedule="cosine", weight_decay=0.1, beta2=0.98),
    batch=BatchConfig(prompts=32, completions=1, row_length=1024, micro_batch_rows=4),
    sampling=SamplingConfig(max_prompt_tokens=256, max_new_tokens=384),
    evaluation=EvaluationConfig(rows=500, every=20),
    steps=120,
    checkpoint_every=40,
)
