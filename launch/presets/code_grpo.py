"""GRPO on programming problems with your own checkpoint and data:

    python launch/run.py code_grpo --model.path DIR --data.path train.jsonl [--data.evaluation-path test.jsonl]

Rows have a `prompt` (text or messages) and `tests`: {"input": ..., "output": ...} of stdin and stdout and texts with
asserts in a list, {"inputs": [...], "outputs": [...]}, or either as JSON. The reward is 1 where the answer's last
fenced block, or all of an answer without one, passes all of them. Programs run in a sandbox; where the kernel refuses
it, nothing runs unless --allow-unsandboxed-code.
"""

from launch.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import GrpoConfig
from tpu_rl.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=GrpoConfig(clip_high=0.28),
    data=FileData(format="code", instruction="\nAnswer with one Python program in a fenced block."),
    model=ModelConfig(dtype="bfloat16"),
    reward=("python_tests",),
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, beta2=0.95),
    batch=BatchConfig(prompts=32, completions=8, row_length=4096, micro_batch_rows=2),
    sampling=SamplingConfig(max_prompt_tokens=1024, max_new_tokens=1024, max_rows=256),
    evaluation=EvaluationConfig(rows=200, every=50),
    steps=200,
    checkpoint_every=50,
)
