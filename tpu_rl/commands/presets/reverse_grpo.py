"""GRPO teaches the shipped arithmetic model another task: to reverse a string of digits.

The model has never seen the task. The reward counts the digits that are right and in their place,
so that a better answer earns more long before a whole one is right; the evaluation counts whole
answers. It shows how little a new task needs: one file, `tpu_rl/environments/reverse.py`, its row
in the table of tasks, and this preset.
"""

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.environments import ReverseData
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=GrpoConfig(),
    data=ReverseData(alphabet="0123456789", min_length=2, max_length=3),
    model=ModelConfig(path="builtin:arithmetic"),
    reward=("reverse_characters",),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    batch=BatchConfig(prompts=32, group_size=8, row_length=128, micro_batch_rows=8),
    sampling=SamplingConfig(max_prompt_tokens=8, max_new_tokens=12, max_num_seqs=512),
    evaluation=EvaluationConfig(rows=500, interval=20, reward="reverse"),
    steps=200,
    checkpoint_every=50,
)
