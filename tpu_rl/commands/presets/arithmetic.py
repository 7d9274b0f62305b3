"""Presets on arithmetic, with the shipped model."""

from __future__ import annotations

from dataclasses import replace

from tpu_rl import algos
from tpu_rl.commands.config import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    ModelConfig,
    Phase,
    Plateau,
    SamplingConfig,
)
from tpu_rl.tasks.arithmetic import ALPHABET, Arithmetic, ArithmeticData
from tpu_rl.train.optimizers import OptimizerConfig

LONG = Arithmetic(min_terms=5, max_terms=5, operators="+-*")
PRETRAINING = 50
"""Most steps of value pretraining. It ends earlier once the explained variance of fresh returns,
averaged over eight steps, is less than 0.02 above that of the eight steps before."""
VAPO_PRETRAINING = 20
TEACHER = "runs/arithmetic_grpo/model"
SEMICOLON = 4 + ALPHABET.index(";")
"""Id of the semicolon: the alphabet follows four control tokens."""


def _critic() -> algos.Critic:
    return algos.Critic(lam=1.0, learning_rate_scale=5.0)


def arithmetic_grpo() -> ExperimentConfig:
    """The default run: GRPO teaches the shipped model to calculate expressions of 5 terms. It takes
    minutes on two CPU cores.

    The model calculates best if it writes the calculation out, but it mostly does not: three in
    four of its training answers to questions of this length were bare results. The reward is 1 for
    the right result, whatever precedes it.
    """
    return ExperimentConfig(
        algorithm=algos.GrpoConfig(),
        data=ArithmeticData(train=LONG, evaluation=LONG),
        model=ModelConfig(path="builtin:arithmetic"),
        reward=("arithmetic",),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
        batch=BatchConfig(prompts=32, group_size=8, row_length=256, micro_batch_rows=8),
        sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_num_seqs=512),
        evaluation=EvaluationConfig(rows=500, interval=10),
        steps=100,
        checkpoint=CheckpointConfig(20),
    )


def arithmetic_sft() -> ExperimentConfig:
    """The training of the shipped model: supervised fine-tuning from random weights on solved
    expressions of 2 to 5 terms.

    The solutions of short expressions are mostly written out, and those of long ones mostly are
    not, because texts that people write are of both kinds. Sums alone would not do: a small
    network learns to add five numbers at a glance, while products within a sum must be computed
    one after the other. There are few of the longest expressions: with more of them the network
    learns to answer those at a glance, too.
    """
    return ExperimentConfig(
        algorithm=algos.SftConfig(),
        data=ArithmeticData(
            train=Arithmetic(min_terms=2, max_terms=5, operators="+-*", length_shares=(2, 3, 4, 1)),
            evaluation=Arithmetic(min_terms=5, max_terms=5, operators="+-*"),
            written_share=(0.7, 0.6, 0.5, 0.25),
        ),
        model=ModelConfig(path="builtin:arithmetic", random_init=True),
        reward=("arithmetic",),
        optimizer=OptimizerConfig(
            learning_rate=3e-3,
            schedule="cosine",
            warmup_steps=100,
            final_share=0.02,
            weight_decay=0.01,
            beta2=0.98,
        ),
        batch=BatchConfig(prompts=128, group_size=1, row_length=128, micro_batch_rows=16),
        sampling=SamplingConfig(max_prompt_tokens=24, max_new_tokens=64, max_num_seqs=512),
        evaluation=EvaluationConfig(rows=300, interval=500),
        steps=3000,
        checkpoint=CheckpointConfig(1000),
    )


def arithmetic_gspo() -> ExperimentConfig:
    """GSPO on the default run's problems: GRPO with one clipped ratio per completion."""
    return replace(arithmetic_grpo(), algorithm=algos.GspoConfig())


def arithmetic_cispo() -> ExperimentConfig:
    """CISPO on the default run's problems: REINFORCE with the ratio as a clipped weight."""
    return replace(arithmetic_grpo(), algorithm=algos.CispoConfig())


def arithmetic_sapo() -> ExperimentConfig:
    """SAPO on the default run's problems: GRPO with a soft gate in place of the clipped ratio.

    `--algorithm.surrogate` takes the other surrogates, such as gmpo or kl_cov.
    """
    algorithm = algos.SurrogatesConfig(surrogate="sapo", loss_aggregation="sequence_mean")
    return replace(arithmetic_grpo(), algorithm=algorithm)


def arithmetic_rft() -> ExperimentConfig:
    """Rejection-sampling fine-tuning on the default run's problems: the model imitates its own
    right answers, the first one of each problem.

    With all different right answers (`--algorithm.max-per-prompt None`) the model learns to give
    each of them equally often, the bare results included, and gains less. Expert iteration is
    `--algorithm.sampled-by reference --algorithm.round-steps 10`. The learning rate is twice that
    of GRPO, which learns from wrong answers, too.
    """
    return replace(
        arithmetic_grpo(),
        algorithm=algos.RftConfig(max_per_prompt=1),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=5),
    )


def arithmetic_multi_attempt() -> ExperimentConfig:
    """GRPO teaches the shipped model to solve problems in several attempts.

    A wrong answer is followed by another attempt, up to five. Compare one and two attempts:

        python launch/run.py arithmetic_multi_attempt --evaluation.turns 1 2

    The environment, tpu_rl/tasks/multi_attempt.py, says what the model reads, and gives the
    reward: 1 if an attempt is right, -0.5 if not, -1 if none could be read.
    """
    return replace(
        arithmetic_grpo(),
        environment="multi_attempt",
        reward=(),
        sampling=replace(
            arithmetic_grpo().sampling, max_new_tokens=192, max_turns=5, max_observation_tokens=8
        ),
    )


def arithmetic_ppo() -> ExperimentConfig:
    """PPO on the default run's problems, with a critic that starts with the policy's weights.

    In `arithmetic_vc_ppo` and `arithmetic_vapo` the critic is pretrained.
    """
    return replace(
        arithmetic_grpo(),
        algorithm=algos.PpoConfig(critic=algos.Critic(learning_rate_scale=5.0)),
        batch=BatchConfig(prompts=256, group_size=1, row_length=256, micro_batch_rows=8),
        steps=80,
    )


def arithmetic_nlpo() -> ExperimentConfig:
    """NLPO (arXiv 2210.01241): `arithmetic_ppo` within the top-p nucleus of an older policy."""
    base = arithmetic_ppo()
    assert isinstance(base.algorithm, algos.PpoConfig)
    return replace(base, algorithm=replace(base.algorithm, mask_top_p=0.9))


def arithmetic_vc_ppo() -> ExperimentConfig:
    """VC-PPO (arXiv 2503.01491): `arithmetic_ppo` with a critic that is fitted to Monte-Carlo
    returns.

    The critic is pretrained before the policy moves and keeps these targets, while advantages keep
    lambda 0.95.
    """
    return replace(
        arithmetic_ppo(),
        algorithm=algos.PpoConfig(critic=_critic(), lam=0.95),
        phases=(
            Phase(
                algos.ValuePretrainingConfig(_critic()),
                until=PRETRAINING,
                ends_when_flat=Plateau("value/explained_variance", over=8, gain=0.02),
            ),
        ),
        steps=PRETRAINING + 80,
    )


def arithmetic_vapo() -> ExperimentConfig:
    """VAPO (arXiv 2504.05118) on the default run's problems.

    It is `arithmetic_vc_ppo` with a lambda that depends on the length, a higher upper clip, the
    log-likelihood of right answers, and several completions per prompt. As in the paper, value
    pretraining takes a fixed number of steps. The paper's alpha is 0.05, for answers of thousands
    of tokens. Answers here have 5 to 60 tokens, for which alpha 0.5 gives lambda 0.6 to 0.97.
    """
    return replace(
        arithmetic_vc_ppo(),
        algorithm=algos.PpoConfig(
            critic=_critic(), lam_alpha=0.5, clip_high=0.28, positive_coef=0.1
        ),
        phases=(Phase(algos.ValuePretrainingConfig(_critic()), until=VAPO_PRETRAINING),),
        steps=VAPO_PRETRAINING + 80,
        batch=replace(arithmetic_vc_ppo().batch, prompts=32, group_size=8),
    )


def arithmetic_reinforce() -> ExperimentConfig:
    """REINFORCE++ on the default run's problems: PPO without a critic, with advantages whitened
    over the batch.

    REINFORCE++-baseline is `--algorithm.baseline group --batch.group-size 8 --batch.prompts 32`.
    ReMax is
    `--algorithm.baseline greedy --algorithm.no-whiten --algorithm.loss-aggregation constant_length`
    """
    return replace(arithmetic_ppo(), algorithm=algos.ReinforceConfig())


def arithmetic_nash_md() -> ExperimentConfig:
    """Nash-MD (arXiv 2312.00886) on the default run's problems: REINFORCE whose reward is the
    chance to win against the mixture of policy and reference.

    A right answer wins against a wrong one with the chance sigmoid(5).
    """
    algorithm = algos.ReinforceConfig(
        whiten=False, opponent_mix=0.5, loss_aggregation="sequence_sum", kl_reward_coef=0.01
    )
    return replace(arithmetic_ppo(), algorithm=algorithm, reward=("5*arithmetic",))


def arithmetic_a_star_po() -> ExperimentConfig:
    """A*-PO on the default run's problems.

    For each problem the policy samples one completion, and the reference eight to estimate its
    value.
    """
    return replace(
        arithmetic_ppo(),
        algorithm=algos.AStarPoConfig(beta=0.05),
        batch=BatchConfig(prompts=64, group_size=1, row_length=256, micro_batch_rows=8),
    )


def arithmetic_dpo() -> ExperimentConfig:
    """DPO on the shipped model's own completions: of eight per problem, a right one is preferred
    to a wrong one.

    The frozen reference samples them, so the reference log-probs of a pair are the sampler's and
    need no forward pass. The model learns the same as in arithmetic_grpo: to write the calculation
    out. Beta matters. At 0.1 calculations are written out, but they are right less often than
    before; at 0.3 they are right more often. `--algorithm.reverse` prefers the wrong completions,
    which gives a contrastive teacher. `--algorithm.pairs policy` samples from the policy itself
    (online DPO).
    """
    return replace(
        arithmetic_grpo(),
        algorithm=algos.DpoConfig(pairs="reference", beta=0.3),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=5),
        batch=BatchConfig(prompts=64, group_size=8, row_length=256, micro_batch_rows=8),
        evaluation=EvaluationConfig(rows=500, interval=20),
        steps=80,
    )


def arithmetic_xpo() -> ExperimentConfig:
    """XPO (arXiv 2405.21046) on the default run's problems: online DPO whose pairs are a completion
    of the policy and one of the reference, with an optimistic term."""
    algorithm = algos.DpoConfig(pairs="policy_and_reference", beta=0.3, optimism_coef=1e-3)
    return replace(arithmetic_dpo(), algorithm=algorithm)


def arithmetic_bco() -> ExperimentConfig:
    """BCO on the shipped model's own completions, each judged right or wrong by itself:
    arithmetic_dpo without pairs.

    Use `--algorithm.loss kto` or `apo_zero` for its relatives. KTO improves the greedy completions
    but not the sampled ones (docs/benchmarks/preferences.md): it pushes wrong completions so far
    away that right ones lose likelihood, too.
    """
    return replace(
        arithmetic_dpo(),
        algorithm=algos.KtoConfig(loss="bco", beta=0.3, pairs="reference"),
        batch=replace(arithmetic_dpo().batch, prompts=32),
        evaluation=replace(arithmetic_dpo().evaluation, rows=1000, interval=40),
        steps=160,
    )


def arithmetic_gkd() -> ExperimentConfig:
    """Generalized knowledge distillation (GKD, arXiv 2306.13649) on arithmetic.

    The shipped model learns, token by token and on its own completions, from the model that GRPO
    made of it. Train the teacher first:

        python launch/run.py arithmetic_grpo
        python launch/run.py arithmetic_gkd [--algorithm.teacher RUN/model]

    Flags for the other arms:

        --algorithm.on-policy 0                                 on the data's solutions, most of
                                                                which are bare results
        --algorithm.on-policy 0 --algorithm.off-policy teacher  on the teacher's own completions
        --algorithm.on-policy 0.5                               on half of each
        --algorithm.beta 0                                      forward KL
    """
    return replace(
        arithmetic_grpo(),
        algorithm=algos.DistillConfig(teacher=TEACHER, beta=1.0),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=5),
        batch=BatchConfig(prompts=64, group_size=1, row_length=256, micro_batch_rows=8),
        steps=60,
    )


def arithmetic_sequence_distil() -> ExperimentConfig:
    """Sequence-level distillation on arithmetic: the shipped model imitates samples of the teacher
    of arithmetic_gkd."""
    return replace(arithmetic_gkd(), algorithm=algos.SftConfig(teacher=TEACHER))


def arithmetic_mini_llm() -> ExperimentConfig:
    """MiniLLM (arXiv 2306.08543) on arithmetic: the reverse KL of whole completions to the teacher
    of arithmetic_gkd."""
    return replace(arithmetic_gkd(), algorithm=algos.MiniLlmConfig(teacher=TEACHER))


def arithmetic_align_distil() -> ExperimentConfig:
    """AlignDistil (arXiv 2503.02832) on arithmetic.

    The shipped model learns, token by token, from a DPO model pushed away from its opposite. The
    more the two models disagree, the further the target goes. Train both first:

        python launch/run.py arithmetic_dpo
        python launch/run.py arithmetic_dpo --algorithm.reverse \\
            --run-dir runs/arithmetic_dpo_reverse
        python launch/run.py arithmetic_align_distil

    Flags for the other arms:

        --algorithm.no-adaptive      a constant alpha of 1
        --algorithm.no-adaptive --algorithm.target extrapolated --algorithm.alpha 2
                                     theorem 1: no reverse model
        --algorithm.no-tvd-half      the authors' code: twice the alpha
        --algorithm.beta0 None       all tokens weigh the same
        --algorithm.on-policy 0      off policy

    beta0 is a third of the teachers' beta. It scales the whole loss, which hardly matters with
    Adam.
    """
    return replace(
        arithmetic_gkd(),
        algorithm=algos.DistillConfig(
            teacher="runs/arithmetic_dpo/model",
            teacher_reverse="runs/arithmetic_dpo_reverse/model",
            target="contrastive",
            alpha=1.0,
            adaptive=True,
            beta0=0.1,
        ),
    )


def arithmetic_reward_model() -> ExperimentConfig:
    """A reward model for arithmetic: of the shipped model's own completions, a right one is better
    than a wrong one.

    The frozen shipped model completes each problem eight times. A copy of it with an ensemble of
    three heads on one trunk learns which completion is right. Use it as a reward:

        python launch/run.py arithmetic_ppo --reward runs/arithmetic_reward_model/model \\
            --evaluation.reward arithmetic
    """
    return replace(
        arithmetic_grpo(),
        algorithm=algos.RewardModelConfig(
            pairs="reference", heads=3, penalty=1.0, margin_coef=0.0, centering_coef=0.01
        ),
        data=ArithmeticData(
            train=LONG, evaluation=Arithmetic(min_terms=3, max_terms=5, operators="+-*")
        ),
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup_steps=20, schedule="cosine", beta2=0.98
        ),
        batch=BatchConfig(prompts=64, group_size=8, row_length=256, micro_batch_rows=8),
        evaluation=EvaluationConfig(rows=500, interval=50),
        steps=200,
        checkpoint=CheckpointConfig(50),
    )


def arithmetic_process_reward() -> ExperimentConfig:
    """A process reward model for arithmetic: is each step that the shipped model writes right?

    The true calculation is known, so steps are labeled for free: a step is right if it equals the
    one at the same place of the written solution. As a reward (--reward
    runs/arithmetic_process_reward/model) the score of a completion is the log-probability of its
    weakest step.
    """
    return replace(
        arithmetic_reward_model(),
        algorithm=algos.ProcessRewardConfig(steps="reference", separators=(SEMICOLON,)),
        data=arithmetic_grpo().data,
        batch=BatchConfig(prompts=64, group_size=4, row_length=256, micro_batch_rows=8),
        evaluation=EvaluationConfig(rows=300, interval=50),
        steps=150,
    )


def arithmetic_sentence_reward() -> ExperimentConfig:
    """A sentence-level reward model for arithmetic: it learns the worth of each step from
    comparisons of whole completions.

    It learns from the pairs of arithmetic_reward_model. A sentence ends at a semicolon. The
    evaluation has twice as many held-out problems, because even before training it ranks better
    than chance, by length.
    """
    return replace(
        arithmetic_reward_model(),
        algorithm=algos.SentenceRewardConfig(
            (SEMICOLON,), margin_coef=0.0, centering_coef=0.01, pairs="reference"
        ),
        evaluation=replace(arithmetic_reward_model().evaluation, rows=1000),
    )


def arithmetic_q_sharp() -> ExperimentConfig:
    """Q# guides the shipped model, which stays frozen: a small q learns from the model's rollouts
    which answers will be right.

    There are two rounds. The second adds examples whose prefixes were sampled from the policy that
    the first q guides, and q is trained again on all of them. One q then serves every coefficient:

        python launch/evaluate.py builtin:arithmetic --guide runs/arithmetic_q_sharp \\
            --kl-coef 1 0.5 0.2 0.1 0.05
    """
    # The paper's weights and its filter, with which docs/benchmarks/q_sharp.md was measured.
    algorithm = algos.QSharpConfig(
        layers=1,
        prompts=256,
        candidates=8,
        loss_aggregation="sequence_mean",
        drop_equal_returns=True,
    )
    return replace(
        arithmetic_grpo(),
        algorithm=algorithm,
        phases=(Phase(algorithm, until=60, reset_roles=("q",)),),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="cosine", warmup_steps=10),
        batch=BatchConfig(prompts=16, group_size=16, row_length=128, micro_batch_rows=16),
        evaluation=EvaluationConfig(rows=500, interval=60),
        steps=180,
        checkpoint=CheckpointConfig(60),
    )
