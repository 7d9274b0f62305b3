"""Presets for your own data, one per method, with neutral defaults."""

from __future__ import annotations

from dataclasses import replace

from tpu_rl import algos
from tpu_rl.commands.config import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    FileData,
    Phase,
    SamplingConfig,
)
from tpu_rl.train.optimizers import OptimizerConfig


def grpo() -> ExperimentConfig:
    """GRPO on your own prompts and rewards:

        python launch/run.py grpo --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    A row has a `prompt`, which is a text or a list of messages, and any columns that the reward
    reads. The other presets that are named after a method use the same defaults. They are not
    tuned to any data: set `--sampling.max-new-tokens` to the length of your answers and try
    several learning rates. On TPUs and GPUs use `--model.dtype bfloat16`.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(),
        data=FileData(),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
        batch=BatchConfig(prompts=32, group_size=8, row_length=2048, micro_batch_rows=0),
        sampling=SamplingConfig(max_prompt_tokens=512, max_new_tokens=512),
        evaluation=EvaluationConfig(rows=100, interval=20),
        steps=200,
        checkpoint=CheckpointConfig(20),
    )


def mixed() -> ExperimentConfig:
    """GRPO whose groups also learn from your solutions of the prompts (CHORD, ReLIFT, LUFFY).

        python launch/run.py mixed --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    Rows are those of the preset grpo, with a column `solution`: a text, as the model should write
    it. `--algorithm.method` selects what is learned from it.
    """
    return replace(grpo(), algorithm=algos.MixedConfig())


def prime() -> ExperimentConfig:
    """PRIME on your own prompts and rewards: process rewards that outcomes alone teach.

        python launch/run.py prime --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    Rows are those of the preset grpo. Completions with a reward of at least
    `--algorithm.min-reward` are successes, from which a second model learns what each token is
    worth.
    """
    algorithm = algos.PrimeConfig(advantages="leave_one_out")
    return replace(grpo(), algorithm=algorithm)


def self_distill() -> ExperimentConfig:
    """Self-distillation on your own prompts and solutions: no reward is needed (SDFT, OPSD).

        python launch/run.py self_distill --model.path DIR --data.path rows.jsonl

    Rows are those of the preset grpo, with a column `solution`: a text that the teacher, which is
    the same model, sees in its prompt and the policy does not. `--evaluation.metrics` measures.
    """
    base = grpo()
    return replace(
        base,
        algorithm=algos.SelfDistillConfig(),
        batch=replace(base.batch, group_size=1),
        reward=(),
    )


def direct_advantage() -> ExperimentConfig:
    """Regression on the advantages of steps, by a process reward model (DAPO, 2412.18279).

        python launch/run.py direct_advantage --model.path DIR --data.path rows.jsonl \\
            --reward "dense(of=runs/process_reward, values=true)" --algorithm.separators 198

    Rows are those of the preset grpo. The separators are the ids of the tokens that end a step, as
    in the training of the process reward model.
    """
    return replace(grpo(), algorithm=algos.DirectAdvantageConfig())


def sft() -> ExperimentConfig:
    """Supervised fine-tuning on your own demonstrations:

        python launch/run.py sft --model.path DIR --data.path rows.jsonl

    A row has `messages`, or a `prompt` and a `completion`. Evaluations report the loss of held-out
    rows and, with `--reward NAME`, sample answers and judge them.
    """
    base = grpo()
    return replace(
        base,
        algorithm=algos.SftConfig(),
        optimizer=replace(base.optimizer, learning_rate=2e-5, schedule="cosine"),
        batch=replace(base.batch, group_size=1),
    )


def unlearn() -> ExperimentConfig:
    """Unlearning on your own rows: forget those that are marked, and learn the others.

        python launch/run.py unlearn --model.path DIR --data.path rows.jsonl

    A row is one of the preset sft with a column `forget`, true or false. Give it some rows to keep:
    without them nothing holds the rest of the model. `--algorithm.loss gradient_ascent` is the
    control.
    """
    return replace(sft(), algorithm=algos.UnlearnConfig())


def rft() -> ExperimentConfig:
    """Rejection-sampling fine-tuning on your own prompts and rewards: imitate what the reward
    accepts.

        python launch/run.py rft --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    Rows are those of the preset grpo. Completions with a reward of at least
    `--algorithm.min-reward` are accepted. For expert iteration use
    `--algorithm.sampled-by reference --algorithm.round-steps 10`. To imitate a stronger model use
    `--algorithm.sampled-by teacher --algorithm.teacher DIR`.
    """
    base = grpo()
    return replace(
        base, algorithm=algos.RftConfig(), optimizer=replace(base.optimizer, learning_rate=1e-5)
    )


def dpo() -> ExperimentConfig:
    """DPO on your own pairs:

        python launch/run.py dpo --model.path DIR --data.path pairs.jsonl

    A row has a `prompt`, a `chosen` and a `rejected` completion, as texts or messages.
    `--algorithm.loss` selects another pairwise loss. `--algorithm.pairs policy` with
    `--reward` is online DPO.
    """
    base = grpo()
    return replace(base, algorithm=algos.DpoConfig(), batch=replace(base.batch, group_size=1))


def scored_completions() -> ExperimentConfig:
    """RRHF on your own completions with scores; also A-LoL, PRDP and TPO.

        python launch/run.py scored_completions --model.path DIR --data.path scored.jsonl

    A row has a `prompt`, `completions`, a list of two or more, and `scores`, a number for each.
    `--batch.group-size` is the largest number of completions of a prompt. `--algorithm.loss`
    selects the method. `--algorithm.scores policy` with `--reward` samples the completions.

    A-LoL with a critic takes rows with a single completion, also as `completion` and `score`. The
    first of two runs fits the critic to the same rows:

        python launch/run.py scored_completions --model.path DIR --data.path scored.jsonl \\
            --algorithm value_pretraining --algorithm.scores given --run-dir runs/critic
        python launch/run.py scored_completions --model.path DIR --data.path scored.jsonl \\
            --algorithm.loss a_lol --algorithm.critic runs/critic/model --algorithm.priority 1
    """
    base = grpo()
    return replace(
        base, algorithm=algos.ScoredCompletionsConfig(), batch=replace(base.batch, group_size=4)
    )


def kto() -> ExperimentConfig:
    """KTO on your own judged completions:

        python launch/run.py kto --model.path DIR --data.path judged.jsonl

    A row has a `prompt`, a `completion` and a `label`, true or false. `--algorithm.loss bco`
    and `--algorithm.loss apo_zero` are its relatives.
    """
    base = grpo()
    return replace(base, algorithm=algos.KtoConfig(), batch=replace(base.batch, group_size=1))


def ppo() -> ExperimentConfig:
    """PPO with a critic, on your own prompts and rewards:

        python launch/run.py ppo --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    Rows are those of the preset grpo. The critic starts with the policy's weights.
    """
    base = grpo()
    return replace(
        base, algorithm=algos.PpoConfig(), batch=replace(base.batch, prompts=256, group_size=1)
    )


def reinforce() -> ExperimentConfig:
    """REINFORCE++ on your own prompts and rewards: PPO without a critic.

        python launch/run.py reinforce --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    Rows are those of the preset grpo. To use the mean reward of a prompt's completions as
    the baseline, add `--algorithm.baseline group --batch.group-size 8 --batch.prompts 32`.
    """
    base = grpo()
    return replace(
        base,
        algorithm=algos.ReinforceConfig(),
        batch=replace(base.batch, prompts=256, group_size=1),
    )


def distill() -> ExperimentConfig:
    """On-policy distillation (GKD) from a teacher, on your own prompts:

        python launch/run.py distill --model.path DIR --data.path rows.jsonl --algorithm.teacher DIR

    A row has a `prompt`. The teacher must have the policy's tokenizer, and may have any size.
    """
    base = grpo()
    return replace(
        base,
        algorithm=algos.DistillConfig(teacher=""),
        optimizer=replace(base.optimizer, learning_rate=1e-5),
        batch=replace(base.batch, group_size=1),
    )


def reward_model() -> ExperimentConfig:
    """A reward model from your own pairs:

        python launch/run.py reward_model --model.path DIR --data.path pairs.jsonl

    A row has a `prompt`, a `chosen` and a `rejected` completion. With `--algorithm.pairs rated` it
    has a `prompt`, a `completion` and a `score`. Scores and margins may be sums of other columns:
    `--data.columns completion=response score=0.65*helpfulness+0.8*correctness`, or
    `margin=score_chosen-score_rejected`. Use the model folder of the run as a reward: `--reward
    RUN_DIR/model`.
    """
    base = grpo()
    return replace(
        base,
        algorithm=algos.RewardModelConfig(centering_coef=0.01),
        optimizer=replace(base.optimizer, learning_rate=1e-5),
        batch=replace(base.batch, group_size=1),
    )


def process_reward() -> ExperimentConfig:
    """A process reward model from your own labeled steps:

        python launch/run.py process_reward --model.path DIR --data.path steps.jsonl

    As in TRL, a row has a `prompt`, `completions` (the steps of an answer, in order), and `labels`
    (true for each right step). To use the model as a reward, give the ids of the tokens that end a
    step with `--algorithm.separators`.
    """
    base = grpo()
    return replace(
        base,
        algorithm=algos.ProcessRewardConfig(),
        optimizer=replace(base.optimizer, learning_rate=1e-5),
        batch=replace(base.batch, group_size=1),
    )


def q_sharp() -> ExperimentConfig:
    """Q# on your own prompts and rewards: a value model guides the frozen policy.

        python launch/run.py q_sharp --model.path DIR --data.path rows.jsonl \\
            --reward my_reward.py:score

    Rows are those of the preset grpo. Rewards must lie in [0, 1]. A run has two rounds. In the
    second, the policy guided by the first q writes the prefixes, and q is trained again.
    """
    base = grpo()
    algorithm = algos.QSharpConfig()
    return replace(
        base,
        algorithm=algorithm,
        phases=(Phase(algorithm, until=100, reset_roles=("q",)),),
        optimizer=replace(base.optimizer, learning_rate=1e-5),
        batch=replace(base.batch, prompts=16, group_size=16),
        evaluation=replace(base.evaluation, interval=100),
        checkpoint=CheckpointConfig(100),
    )
