"""GRPO on ten tasks of reasoning-gym with short questions, with a chat model of your own:

    pip install -e ".[environments]"
    python launch/run.py reasoning_gym_grpo --model.path DIR

Rewards are those of the tasks' own scorers. Metrics have the mean of each task (`reward/gcd`,
`eval/reward/gcd`). For other tasks change --data.tasks, and --environment reasoning_gym:NAME,NAME.
"""

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.environments import ReasoningGymData
from tpu_rl.environments.reasoning import SHORT
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=GrpoConfig(),
    data=ReasoningGymData(),
    environment=f"reasoning_gym:{','.join(SHORT)}",
    model=ModelConfig(remat="none"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=0),
    batch=BatchConfig(prompts=20, group_size=8, row_length=256, micro_batch_rows=2),
    sampling=SamplingConfig(
        max_prompt_tokens=160, max_new_tokens=16, max_num_seqs=160, max_turns=1
    ),
    evaluation=EvaluationConfig(rows=200, interval=20),
    steps=40,
    checkpoint_every=20,
)
