"""GRPO on grade-school mathematics (GSM8K, arXiv 2110.14168), with your own checkpoint and data:

    python launch/run.py gsm8k_grpo --model.path DIR --data.path train.jsonl
        [--data.evaluation-path test.jsonl]

The reward is 1 if the number after "####", or in the last box, is right. `--reward math` compares
with math-verify instead (pip install -e ".[math]"), and `--reward FILE.py:function` with your own
function.
"""

from tpu_rl.algos import GrpoConfig
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
    algorithm=GrpoConfig(clip_high=0.28),
    data=FileData(
        format="gsm8k",
        instruction="\nReason step by step and end with #### and the final number.",
    ),
    model=ModelConfig(dtype="bfloat16"),
    reward=("gsm8k",),
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, beta2=0.95),
    batch=BatchConfig(prompts=32, group_size=8, row_length=2048, micro_batch_rows=4),
    sampling=SamplingConfig(max_prompt_tokens=512, max_new_tokens=512, max_num_seqs=256),
    evaluation=EvaluationConfig(rows=500, interval=50),
    steps=200,
    checkpoint_every=50,
)
