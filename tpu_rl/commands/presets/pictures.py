"""Presets on drawn pictures, with a small model that reads images."""

from __future__ import annotations

from dataclasses import replace

from tpu_rl import algos
from tpu_rl.commands.config import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    SamplingConfig,
)
from tpu_rl.tasks.pictures import PicturesData
from tpu_rl.train.optimizers import OptimizerConfig


def pictures_sft() -> ExperimentConfig:
    """SFT on questions about drawn pictures: a small model with a vision tower learns from scratch
    to look.

    It ends while most questions still have several likely answers, so that a reward has something
    to choose from. `--data.control blank` and `--data.control shuffled` are the controls.
    """
    return ExperimentConfig(
        algorithm=algos.SftConfig(),
        data=PicturesData(),
        model=ModelConfig(path="builtin:pictures", random_init=True),
        reward=("pictures",),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=50, beta2=0.98),
        batch=BatchConfig(prompts=64, group_size=1, row_length=128, micro_batch_rows=32),
        sampling=SamplingConfig(max_prompt_tokens=44, max_new_tokens=8, max_num_seqs=256),
        evaluation=EvaluationConfig(rows=500, interval=100),
        steps=400,
        checkpoint=CheckpointConfig(100),
    )


def pictures_grpo() -> ExperimentConfig:
    """GRPO on questions about drawn pictures, from the model of pictures_sft.

    A picture is encoded once for all answers of its group, when they are sampled and when they are
    learned from.
    """
    base = pictures_sft()
    return replace(
        base,
        algorithm=algos.GrpoConfig(),
        model=ModelConfig(path="runs/pictures_sft/model"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=20),
        # With 32 prompts, accuracy fell by 10 points in the first 20 steps.
        batch=BatchConfig(prompts=128, group_size=8, row_length=128, micro_batch_rows=32),
        evaluation=EvaluationConfig(rows=500, interval=20),
        steps=60,
        checkpoint=CheckpointConfig(40),
    )


def pictures_look_sft() -> ExperimentConfig:
    """SFT on the steps of a question in two looks: where to look in a coarse picture, and what the
    enlarged cell shows.

    The evaluation lets the model look. The run ends when half of the held-out questions are
    answered, and one in three would be by chance: after 500 steps GRPO has nothing left to teach.
    """
    base = pictures_sft()
    return replace(
        base,
        data=PicturesData(questions="look"),
        environment="picture_look",
        reward=(),
        sampling=replace(
            base.sampling,
            max_new_tokens=64,
            max_turns=3,
            max_observation_tokens=20,
            stop_strings=("\n",),
        ),
        evaluation=EvaluationConfig(rows=200, interval=200),
        steps=350,
    )


def pictures_look_grpo() -> ExperimentConfig:
    """GRPO with images that the environment returns, from the model of pictures_look_sft.

    The first picture does not tell the answer: the policy writes "look 2,3", and sees that cell
    enlarged.
    """
    base = pictures_grpo()
    look = pictures_look_sft()
    return replace(
        base,
        data=look.data,
        environment=look.environment,
        reward=(),
        model=ModelConfig(path="runs/pictures_look_sft/model"),
        batch=replace(base.batch, row_length=256),
        sampling=look.sampling,
        evaluation=replace(look.evaluation, interval=20),
    )
