"""DPO on labelled solutions of GSM8K problems (arXiv 2110.14168): right against wrong, with your own checkpoint:

    python launch/run.py gsm8k_dpo --model.path DIR --data.path example_model_solutions.jsonl

The last quarter of the problems is held out; evaluations say how many of their pairs the implicit reward ranks rightly,
each problem counting once, beside a ranking by length alone. A constant guess ranks half of them rightly. The problems
are those of GSM8K's test set: judge what is trained here on other ones.
"""

from launch.config import (
    BatchConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.algos import DpoConfig
from tpu_rl.optimizers import OptimizerConfig

CONFIG = ExperimentConfig(
    algorithm=DpoConfig(beta=0.1),
    data=FileData(format="gsm8k_solutions", instruction="\n"),
    model=ModelConfig(dtype="bfloat16"),
    optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    batch=BatchConfig(prompts=32, completions=1, row_length=2048, micro_batch_rows=4),
    sampling=SamplingConfig(max_prompt_tokens=512, max_new_tokens=512),
    evaluation=EvaluationConfig(rows=500, every=20),
    steps=100,
    checkpoint_every=50,
)
