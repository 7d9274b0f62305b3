"""Presets in environments, and on other made-up tasks."""

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
from tpu_rl.tasks.mini_shell import MAX_COMMANDS, MiniShellData
from tpu_rl.tasks.puzzles import PuzzlesData
from tpu_rl.tasks.reasoning import SHORT, ReasoningGymData
from tpu_rl.tasks.reverse import ReverseData
from tpu_rl.tasks.search import MAX_SEARCHES, SearchData
from tpu_rl.train.optimizers import OptimizerConfig


def mini_shell_sft() -> ExperimentConfig:
    """The model of the mini_shell presets: a small model learns from scratch to type commands, from
    the transcripts of a careless user.

    It learns what the shell prints too, which is part of the transcripts. The evaluation lets it
    use the shell.
    """
    return ExperimentConfig(
        algorithm=algos.SftConfig(),
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
            max_turns=MAX_COMMANDS,
            max_observation_tokens=32,
            stop_strings=("\n",),
        ),
        evaluation=EvaluationConfig(rows=500, interval=200),
        steps=600,
        checkpoint=CheckpointConfig(200),
    )


def mini_shell_grpo() -> ExperimentConfig:
    """GRPO in a shell on a dict of files, from the model of mini_shell_sft: it learns to look
    where a file is before it acts."""
    return replace(
        mini_shell_sft(),
        algorithm=algos.GrpoConfig(),
        model=ModelConfig(path="runs/mini_shell_sft/model", remat="none"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
        batch=BatchConfig(prompts=32, group_size=8, row_length=128, micro_batch_rows=16),
        evaluation=EvaluationConfig(rows=500, interval=10),
        steps=40,
        checkpoint=CheckpointConfig(20),
    )


def mini_shell_ppo() -> ExperimentConfig:
    """PPO in a shell on a dict of files, from the model of mini_shell_sft, with as many episodes as
    mini_shell_grpo."""
    return replace(
        mini_shell_grpo(),
        algorithm=algos.PpoConfig(critic=algos.Critic(learning_rate_scale=5.0)),
        batch=BatchConfig(prompts=256, group_size=1, row_length=128, micro_batch_rows=16),
    )


def search_sft() -> ExperimentConfig:
    """The model of the search presets: a small model learns from scratch to search and to answer,
    from a careless user, who guesses in every other case.

    It learns what the index finds too, which is part of the demonstrations. The evaluation lets it
    use the index.
    """
    base = mini_shell_sft()
    return replace(
        base,
        data=SearchData(),
        environment="search",
        reward=("search_answer", "search_called", "search_format"),
        model=ModelConfig(path="builtin:search", random_init=True, remat="none"),
        batch=replace(base.batch, row_length=128),
        sampling=replace(
            base.sampling,
            max_prompt_tokens=16,
            max_new_tokens=64,
            max_turns=MAX_SEARCHES + 1,
            max_observation_tokens=16,
        ),
        evaluation=replace(base.evaluation, interval=100),
        steps=400,
    )


def search_calls() -> ExperimentConfig:
    """R1-Searcher's first stage (arXiv 2503.05592): the model of search_sft learns to call the
    search.

    The reward is one half for an episode with a well-formed search, and one half for an answer at
    its end, right or wrong. search_grpo is the second stage.
    """
    return replace(
        search_sft(),
        algorithm=algos.GrpoConfig(),
        model=ModelConfig(path="runs/search_sft/model", remat="none"),
        reward=("0.5*search_called", "0.5*search_format"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
        batch=BatchConfig(prompts=32, group_size=8, row_length=128, micro_batch_rows=16),
        evaluation=EvaluationConfig(rows=500, interval=10, reward="search_answer"),
        steps=20,
        checkpoint=CheckpointConfig(20),
    )


def search_grpo() -> ExperimentConfig:
    """R1-Searcher's second stage (arXiv 2503.05592): the model of search_calls learns to answer.

    The reward is 1 for the right answer, and 1 for an answer at the end of the episode. The
    control, an index that finds facts at random: --environment search_random.
    """
    return replace(
        search_calls(),
        model=ModelConfig(path="runs/search_calls/model", remat="none"),
        reward=("search_answer", "search_format"),
        evaluation=replace(
            search_calls().evaluation, reward="search_answer", metrics=("search_called",)
        ),
        steps=40,
    )


def reasoning_gym_grpo() -> ExperimentConfig:
    """GRPO on ten tasks of reasoning-gym with short questions, with a chat model of your own:

        pip install -e ".[environments]"
        python launch/run.py reasoning_gym_grpo --model.path DIR

    Rewards are those of the tasks' own scorers. Metrics have the mean of each task (`reward/gcd`,
    `eval/reward/gcd`). For other tasks change --data.tasks, and --environment
    reasoning_gym:NAME,NAME.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(),
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
        checkpoint=CheckpointConfig(20),
    )


def reverse_grpo() -> ExperimentConfig:
    """GRPO teaches the shipped arithmetic model another task: to reverse a string of digits.

    The model has never seen the task. The reward counts the digits that are right and in their
    place, so that a better answer earns more long before a whole one is right; the evaluation
    counts whole answers. It shows how little a new task needs: one file,
    `tpu_rl/tasks/reverse.py`, its row in the table of tasks, and this preset.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(),
        data=ReverseData(alphabet="0123456789", min_length=2, max_length=3),
        model=ModelConfig(path="builtin:arithmetic"),
        reward=("reverse_characters",),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
        batch=BatchConfig(prompts=32, group_size=8, row_length=128, micro_batch_rows=8),
        sampling=SamplingConfig(max_prompt_tokens=8, max_new_tokens=12, max_num_seqs=512),
        evaluation=EvaluationConfig(rows=500, interval=20, reward="reverse"),
        steps=200,
        checkpoint=CheckpointConfig(50),
    )


def puzzles_grpo() -> ExperimentConfig:
    """GRPO on puzzles that make and solve themselves, with a model of your own:

        python launch/run.py puzzles_grpo --model.path DIR --data.kinds countdown

    Kinds are countdown, traced_value, traced_next, graph_path, masked_step and ordered_steps. The
    model answers behind a "#": begin with puzzles_sft.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(),
        data=PuzzlesData(),
        reward=("puzzles",),
        model=ModelConfig(remat="none"),
        optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=0),
        batch=BatchConfig(prompts=16, group_size=8, row_length=512, micro_batch_rows=2),
        sampling=SamplingConfig(max_prompt_tokens=256, max_new_tokens=192, max_num_seqs=128),
        evaluation=EvaluationConfig(rows=200, interval=20),
        steps=100,
        checkpoint=CheckpointConfig(20),
    )


def puzzles_sft() -> ExperimentConfig:
    """SFT on the solutions of puzzles, such as countdown with a chosen number of backtracks:

    python launch/run.py puzzles_sft --model.path DIR --data.backtracks 2
    """
    base = puzzles_grpo()
    batch = replace(base.batch, group_size=1)
    return replace(base, algorithm=algos.SftConfig(), batch=batch)
