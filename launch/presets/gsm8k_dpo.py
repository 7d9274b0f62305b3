"""DPO on labelled solutions of GSM8K problems (arXiv 2110.14168, example_model_solutions.jsonl): right against wrong.

    python launch/run.py gsm8k_dpo --data.path example_model_solutions.jsonl

The last problems are held out, a quarter at most; evaluations say how many of their pairs the implicit reward ranks
rightly, each problem counting once, beside a ranking by length alone; a constant guess ranks half of them rightly. A
model of half a million parameters that has read nothing else will not rank them well. Your own checkpoint:
--model.path DIR --model.no-random-init --model.dtype bfloat16 --optimizer.learning-rate 1e-6. The problems are those of
GSM8K's test set: judge what is trained here on other ones.
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
    data=FileData(format="gsm8k_solutions"),
    model=ModelConfig(path="builtin:gsm8k_scratch", random_init=True),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=20),
    batch=BatchConfig(prompts=32, completions=1, row_length=1024, micro_batch_rows=4),
    sampling=SamplingConfig(max_prompt_tokens=256, max_new_tokens=384),
    evaluation=EvaluationConfig(rows=500, every=20),
    steps=120,
    checkpoint_every=40,
)
