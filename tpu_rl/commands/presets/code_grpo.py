"""GRPO on programming problems, with your own checkpoint and data:

    python launch/run.py code_grpo --model.path DIR --data.path train.jsonl
        [--data.evaluation-path test.jsonl]

A row has a `prompt` (text or messages) and `tests`: a list of {"input": ..., "output": ...} for
stdin and stdout and of texts with asserts, or {"inputs": [...], "outputs": [...]}, or either of
these as JSON. The program is the last fenced block of the answer, or the whole answer if it has no
block. The reward is 1 if it passes all tests. Programs run in a sandbox. If the kernel does not
support the sandbox, nothing runs unless you give --allow-unsandboxed-code.
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
    data=FileData(format="code", instruction="\nAnswer with one Python program in a fenced block."),
    model=ModelConfig(dtype="bfloat16"),
    reward=("python_tests",),
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, beta2=0.95),
    batch=BatchConfig(prompts=32, group_size=8, row_length=4096, micro_batch_rows=2),
    sampling=SamplingConfig(max_prompt_tokens=1024, max_new_tokens=1024, max_num_seqs=256),
    evaluation=EvaluationConfig(rows=200, interval=50),
    steps=200,
    checkpoint_every=50,
)
