"""The model of the mini_shell presets: a small model learns from scratch to type commands, from the
transcripts of a careless user.

It learns what the shell prints too, which is part of the transcripts. The evaluation lets it use
the shell.
"""

from tpu_rl.algos import SftConfig
from tpu_rl.commands.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.environments import MiniShellData
from tpu_rl.environments.mini_shell import MAX_COMMANDS
from tpu_rl.train.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=SftConfig(),
    data=MiniShellData(),
    environment="mini_shell",
    model=ModelConfig(path="builtin:mini_shell", random_init=True, remat="none"),
    optimizer=OptimizerConfig(
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=50,
        final_share=0.02,
        weight_decay=0.01,
        beta2=0.98,
    ),
    batch=BatchConfig(prompts=128, group_size=1, row_length=128, micro_batch_rows=16),
    sampling=SamplingConfig(
        max_prompt_tokens=32,
        max_new_tokens=72,
        max_num_seqs=256,
        max_turns=MAX_COMMANDS,
        max_observation_tokens=32,
        stop_strings=("\n",),
    ),
    evaluation=EvaluationConfig(rows=500, interval=200),
    steps=600,
    checkpoint_every=200,
)
