"""GRPO on your own prompts and rewards:

    python launch/run.py grpo --model.path DIR --data.path rows.jsonl --reward my_reward.py:score

A row has a `prompt`, which is a text or a list of messages, and any columns that the reward reads.
The other presets that are named after a method use the same defaults. They are not tuned to any
data: set `--sampling.max-new-tokens` to the length of your answers and try several learning rates.
On TPUs and GPUs use `--model.dtype bfloat16`.
"""

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    SamplingConfig,
)
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=GrpoConfig(),
    data=FileData(),
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    batch=BatchConfig(prompts=32, group_size=8, row_length=2048, micro_batch_rows=4),
    sampling=SamplingConfig(max_prompt_tokens=512, max_new_tokens=512),
    evaluation=EvaluationConfig(rows=100, interval=20),
    steps=200,
    checkpoint_every=20,
)
