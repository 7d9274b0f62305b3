"""Presets for published problems, whose files you bring: GSM8K and programming."""

from __future__ import annotations

from dataclasses import replace

from tpu_rl import algos
from tpu_rl.commands.config import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.models import LoraConfig
from tpu_rl.train.optimizers import OptimizerConfig


def gsm8k_grpo() -> ExperimentConfig:
    """GRPO on grade-school mathematics (GSM8K, arXiv 2110.14168), with your own checkpoint and
    data:

        python launch/run.py gsm8k_grpo --model.path DIR --data.path train.jsonl
            [--data.evaluation-path test.jsonl]

    The reward is 1 if the number after "####", or in the last box, is right. `--reward math`
    compares with math-verify instead (pip install -e ".[math]"), and `--reward FILE.py:function`
    with your own function.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(clip_high=0.28),
        data=FileData(
            format="gsm8k",
            instruction="\nReason step by step and end with #### and the final number.",
        ),
        model=ModelConfig(dtype="bfloat16"),
        reward=("gsm8k",),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, beta2=0.95),
        batch=BatchConfig(prompts=32, group_size=8, row_length=2048, micro_batch_rows=0),
        sampling=SamplingConfig(max_prompt_tokens=512, max_new_tokens=512),
        evaluation=EvaluationConfig(rows=500, interval=50),
        steps=200,
        checkpoint=CheckpointConfig(50),
    )


def gsm8k_lora() -> ExperimentConfig:
    """gsm8k_grpo with adapters over frozen bfloat16 weights, sized for one chip with 16 GiB, as in
    Colab. By the plan, Gemma-2-2B takes at most 10.8 GiB of a v5e, with 32 completions at once.

        python launch/run.py gsm8k_lora --model.path DIR --data.path train.jsonl
        python launch/plan.py gsm8k_lora --model.path Gemma-2-2B --topology v5e:1x1
    """
    base = gsm8k_grpo()
    return replace(
        base,
        model=replace(base.model, param_dtype="bfloat16", lora=LoraConfig(rank=16)),
        optimizer=replace(base.optimizer, learning_rate=1e-5),
        batch=replace(base.batch, micro_batch_rows=1),
    )


def gsm8k_dpo() -> ExperimentConfig:
    """DPO on labeled solutions of GSM8K problems (arXiv 2110.14168, example_model_solutions.jsonl).

    Right solutions are preferred to wrong ones:

        python launch/run.py gsm8k_dpo --data.path example_model_solutions.jsonl

    The last problems are held out, at most a quarter. Evaluations report the share of their pairs
    that the implicit reward ranks rightly, with equal weight for each problem, beside a ranking by
    length alone. A constant guess has one half. A model of half a million parameters that has read
    nothing else will not rank them well. For your own checkpoint: --model.path DIR
    --model.no-random-init --model.dtype bfloat16 --optimizer.learning-rate 1e-6. The problems are
    those of GSM8K's test set, so evaluate the trained model on other problems.
    """
    return ExperimentConfig(
        algorithm=algos.DpoConfig(beta=0.1),
        data=FileData(format="gsm8k_solutions"),
        model=ModelConfig(path="builtin:gsm8k_scratch", random_init=True),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=20),
        batch=BatchConfig(prompts=32, group_size=1, row_length=1024, micro_batch_rows=4),
        sampling=SamplingConfig(max_prompt_tokens=256, max_new_tokens=384),
        evaluation=EvaluationConfig(rows=500, interval=20),
        steps=120,
        checkpoint=CheckpointConfig(40),
    )


def gsm8k_reward_model() -> ExperimentConfig:
    """A small reward model, from scratch, on labeled GSM8K solutions (arXiv 2110.14168,
    example_model_solutions.jsonl):

        python launch/run.py gsm8k_reward_model --data.path example_model_solutions.jsonl

    It compares right and wrong solutions of a problem. The last problems are held out, at most a
    quarter. A model of half a million parameters that has read nothing else will not rank them
    well; its accuracy is reported beside that of a rule that knows only their lengths. For your
    own checkpoint: --model.path DIR --model.no-random-init.
    """
    return replace(
        gsm8k_dpo(),
        algorithm=algos.RewardModelConfig(centering_coef=0.01),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=20, schedule="cosine", weight_decay=0.1, beta2=0.98
        ),
    )


def calculator_sft() -> ExperimentConfig:
    """A small model learns GSM8K's solutions from scratch, and is evaluated with a calculator,
    which writes the results of its marks "<<16-3=13>>":

        python launch/run.py calculator_sft --data.path train.jsonl \\
            --data.evaluation-path test.jsonl

    Without the calculator: python launch/evaluate.py RUN_DIR --environment "".
    """
    return ExperimentConfig(
        algorithm=algos.SftConfig(),
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
            max_turns=32,
            max_observation_tokens=32,
            stop_strings=("=",),
        ),
        evaluation=EvaluationConfig(
            rows=200, interval=100, reward="gsm8k", metrics=("gsm8k_marks",)
        ),
        steps=200,
        checkpoint=CheckpointConfig(100),
    )


def code_grpo() -> ExperimentConfig:
    """GRPO on programming problems, with your own checkpoint and data:

        python launch/run.py code_grpo --model.path DIR --data.path train.jsonl
            [--data.evaluation-path test.jsonl]

    A row has a `prompt` (text or messages) and `tests`: a list of {"input": ..., "output": ...}
    for stdin and stdout and of texts with asserts, or {"inputs": [...], "outputs": [...]}, or
    either of these as JSON. The program is the last fenced block of the answer, or the whole
    answer if it has no block. The reward is 1 if it passes all tests. Programs run in a sandbox.
    If the kernel does not support the sandbox, nothing runs unless you give
    --allow-unsandboxed-code.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(clip_high=0.28),
        data=FileData(
            format="code", instruction="\nAnswer with one Python program in a fenced block."
        ),
        model=ModelConfig(dtype="bfloat16"),
        reward=("python_tests",),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10, beta2=0.95),
        batch=BatchConfig(prompts=32, group_size=8, row_length=4096, micro_batch_rows=2),
        sampling=SamplingConfig(max_prompt_tokens=1024, max_new_tokens=1024),
        evaluation=EvaluationConfig(rows=200, interval=50),
        steps=200,
        checkpoint=CheckpointConfig(50),
    )
