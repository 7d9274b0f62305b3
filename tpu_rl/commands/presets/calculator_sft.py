"""A small model learns GSM8K's solutions from scratch, and is evaluated with a calculator, which
writes the results of its marks "<<16-3=13>>":

    python launch/run.py calculator_sft --data.path train.jsonl --data.evaluation-path test.jsonl

Without the calculator: python launch/evaluate.py RUN_DIR --environment "".
"""

from tpu_rl.algos import SftConfig
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
    algorithm=SftConfig(),
    data=FileData(format="gsm8k", instruction="\n"),
    environment="calculator",
    model=ModelConfig(path="builtin:gsm8k_scratch", random_init=True, remat="none"),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, schedule="cosine", warmup_steps=20, final_share=0.05, beta2=0.98
    ),
    batch=BatchConfig(prompts=32, group_size=1, row_length=512, micro_batch_rows=8),
    sampling=SamplingConfig(
        max_prompt_tokens=256,
        max_new_tokens=256,
        max_num_seqs=256,
        max_turns=32,
        max_observation_tokens=32,
        stop_strings=("=",),
    ),
    evaluation=EvaluationConfig(rows=200, interval=100, reward="gsm8k", metrics=("gsm8k_marks",)),
    steps=200,
    checkpoint_every=100,
)
