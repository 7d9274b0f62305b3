"""Evaluations of a run: answers to held-out problems, or accuracy on held-out pairs and steps."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax

from tpu_rl import rewards, wings
from tpu_rl.commands import compose, held_out_rows, roles
from tpu_rl.commands.config import ExperimentConfig, Stage
from tpu_rl.commands.roles import RunContext
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.evaluation import answer_accuracy, calibration
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.experience.config import sampler_config
from tpu_rl.experience.rows import tasks
from tpu_rl.rewards import registry
from tpu_rl.rewards import terms as reward_terms
from tpu_rl.rewards.worker_pool import IsolatedReward
from tpu_rl.rollout import scoring
from tpu_rl.rollout.engine import Decoding, Engine, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.sampler import Thinking, text_scorer
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Algorithm, Params, Purpose

Evaluate = Callable[[Params, bool], dict[str, float]]
"""(the whole params tree, True to evaluate in full) -> metrics named eval/. In full, problems are
also answered greedily, and accuracy is also given for each slice of the data."""


class Evaluations(NamedTuple):
    """The evaluations of a stage, by where the weights are that they read."""

    in_training: Evaluate
    """Judges given texts: the weights are where they train."""
    in_sampling: Evaluate
    """Answers problems: the weights are where evaluations sample."""

    @property
    def measure_nothing(self) -> bool:
        """True if no step of the run will have a metric of an evaluation."""
        return self == (_nothing, _nothing)


def evaluator(
    context: RunContext, stage: Stage, algorithm: Algorithm, params: Params
) -> Evaluations:
    """Return the evaluations that fit what the stage learns from.

    A reward model judges held-out pairs or steps; an algorithm that learns from given pairs ranks
    held-out pairs; every other stage answers held-out problems. Stages that imitate texts also
    report their loss on held-out texts.
    """
    if roles.reading(stage.algorithm) is not None or compose.learns_from_given_pairs(stage):
        from tpu_rl.commands import held_out_judges

        judge = held_out_judges.of_stage(context, stage, algorithm, params)
        if judge is None:
            print("note: nothing is evaluated: there are no held-out pairs", file=sys.stderr)
        return Evaluations(judge or _nothing, _nothing)
    exact = context.unrounded()
    if stage.algorithm.experience.policy == "guided":
        policy = exact.guided_policy(stage.algorithm)
    else:
        policy = exact.rollout_policy("policy")
    loss = _losses(context, stage, params)
    answers = _both(_answers(context, stage, policy), _harness(context, policy))
    if loss is None and answers is None:
        print(
            "note: nothing is evaluated: there are no held-out rows, or no reward that judges them",
            file=sys.stderr,
        )
    return Evaluations(loss or _nothing, answers or _nothing)


def before_training(context: RunContext, stage: Stage, evaluations: Evaluations) -> Evaluations:
    """Return the evaluations before the first step.

    Of a guided policy it is the reference alone, because nothing has learned to guide it.
    """
    if stage.algorithm.experience.policy != "guided":
        return evaluations
    policy = context.unrounded().rollout_policy("policy")
    alone = _both(_answers(context, stage, policy), _harness(context, policy))
    return evaluations._replace(in_sampling=alone or _nothing)


def _nothing(params: Params, in_full: bool) -> dict[str, float]:
    return {}


def _both(first: Evaluate | None, second: Evaluate | None) -> Evaluate | None:
    """Return the evaluation that measures what both do."""
    if first is None or second is None:
        return first or second
    return lambda params, in_full: first(params, in_full) | second(params, in_full)


# --- public benchmarks ---


def _harness(context: RunContext, policy: RolloutPolicy) -> Evaluate | None:
    """Return the evaluation by tasks of lm-evaluation-harness; None without such tasks."""
    config = context.config
    names = config.evaluation.tasks
    if not names or not config.evaluation.rows:
        return None
    harness = wings.MODULES["harness"]
    tasks_of_harness = harness.load_tasks(names)
    # Samplers with devices of their own read copies: the weights are where they train.
    mesh = context.mesh if context.sampler_devices else policy.mesh
    score = text_scorer(context.role("policy"), mesh)

    def evaluate(params: Params, in_full: bool) -> dict[str, float]:
        with jax.set_mesh(policy.mesh):
            sampled = policy.params(params)
        model = harness.HarnessModel(
            policy.policy,
            sampled,
            policy.mesh,
            functools.partial(score, params),
            context.language.tokenizer,
            context.models["policy"].config.vocab.size,
            context.max_length,
        )
        measured = harness.evaluate(
            model,
            tasks_of_harness,
            config.evaluation.rows,
            apply_chat_template=config.evaluation.apply_chat_template,
        )
        return harness.as_metrics(measured)

    return evaluate


# --- answers ---


def _answers(context: RunContext, stage: Stage, policy: RolloutPolicy) -> Evaluate | None:
    config = context.config
    tokenizer = context.language.tokenizer
    if config.evaluation_reward is None and not compose.is_judged(config):
        return None
    problems = {
        name: held_out_rows.problems(context, rows)
        for name, rows in held_out_rows.named_sets(context).items()
    }
    problems = {name: rows for name, rows in problems.items() if rows}
    if not problems:
        return None
    scorers = answer_scorers(config, tokenizer, problems)
    # Accuracy is the model's own, so nothing of its distribution is cut off.
    plain = replace(
        sampler_config(config.sampling, tokenizer, 1),
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=1.0,
        logit_bias=(),
    )

    def engines(temperature: float, max_turns: int | None = None) -> dict[str, Engine]:
        """Return the engine of each set of problems."""
        environment = compose.environment(config)
        if environment is not None and max_turns is not None:
            environment = environment._replace(max_turns=max_turns)

        def engine(name: str, rows: list[Row]) -> Engine:
            # The same random keys whatever the step or seed: what differs is the model.
            shapes = compose.evaluation_shapes(context, stage, len(rows))
            decoding = Decoding(
                policy._replace(drafter=None),
                replace(plain, temperature=temperature, shapes_of=shapes),
                config.sampling.max_prompt_tokens,
                purpose=Purpose.EVALUATION,
                stop_strings=config.sampling.stop_strings,
                environment=environment,
                thinking=limited(config.sampling.thinking),
            )
            return compose.engine(config, decoding, scorers[name])

        return {name: engine(name, rows) for name, rows in problems.items()}

    sampled = engines(temperature=1.0)
    greedy = engines(temperature=0.0)
    by_turns = {
        turns: (engines(1.0, turns), engines(0.0, turns)) for turns in config.evaluation.turns
    }
    names = {registry.display_name(name): name for name in config.evaluation_rewards}

    def measure(engines: dict[str, Engine], params: Params, kind: str) -> dict[str, float]:
        metrics = {}
        for name, rows in problems.items():
            correct = next(iter(scorers[name].reward_functions), "")
            readers = rewards.answer_readers(names.get(correct))
            result = answer_accuracy.evaluate(engines[name], params, rows, readers)
            further = further_rewards(scorers[name], result)
            metrics |= _answer_metrics(f"{_prefix(name)}{kind}", result, further)
        return metrics

    def evaluate(params: Params, in_full: bool) -> dict[str, float]:
        metrics = measure(sampled, params, "")
        if in_full and config.evaluation.greedy:
            metrics |= measure(greedy, params, "greedy_")
        for turns, (sampled_turns, greedy_turns) in by_turns.items() if in_full else ():
            metrics |= measure(sampled_turns, params, f"turns_{turns}_")
            if config.evaluation.greedy:
                metrics |= measure(greedy_turns, params, f"turns_{turns}_greedy_")
        return metrics

    return evaluate


def _prefix(name: str) -> str:
    """Return the beginning of the names of metrics of a set; "" is the run's own held-out rows."""
    return f"eval/{name}/" if name else "eval/"


def limited(thinking: Thinking) -> Thinking:
    """Return the control of thoughts as evaluations have it: nothing is cut off a distribution."""
    return replace(thinking, answer_top_k=None)


def answer_scorer(config: ExperimentConfig, tokenizer: Tokenizer, rows: list[Row]) -> Scorer:
    """Return the scorer of held-out completions, with all rewards that evaluations measure.

    The first one says what is correct. Those of --reward are left out that need a column which
    held-out rows lack, and those for rows of other kinds. The total is that of --reward, unless a
    weight depends on the step: then totals of two steps would not compare. Without rewards, an
    environment or agent judges.
    """
    return answer_scorers(config, tokenizer, {"": rows})[""]


def answer_scorers(
    config: ExperimentConfig, tokenizer: Tokenizer, sets: dict[str, list[Row]]
) -> dict[str, Scorer]:
    """Return the scorer of each set of held-out rows; they share their functions."""
    functions = registry.reward_functions(
        config.evaluation_rewards, config.reward_limits, config.allow_unsandboxed_code
    )
    scorers = {
        name: _answer_scorer(config, tokenizer, functions, rows) for name, rows in sets.items()
    }
    used = {name for scorer in scorers.values() for name in scorer.reward_functions}
    for name, function in functions.items():
        if name not in used and isinstance(function, IsolatedReward):
            function.stop()
    return scorers


def _answer_scorer(
    config: ExperimentConfig,
    tokenizer: Tokenizer,
    every: dict[str, rewards.Reward],
    rows: list[Row],
) -> Scorer:
    limits = config.reward_limits
    if not every:
        return Scorer(tokenizer, max_fault_share=limits.fault_share)
    functions = rewards.of_rows(every, rows) or dict(every)
    correct = next(iter(functions))
    asked_for = {correct, *map(registry.display_name, config.evaluation.metrics)}
    columns = scoring.repeat_rows(rows, 1)[1]
    for name, function in list(functions.items()):
        if name in asked_for:
            continue
        try:
            rewards.require_columns(name, function, columns, rewards.ROLLOUT_COLUMNS)
        except InputError as error:
            print(f"note: evaluations leave out the reward {name}: {error.what}", file=sys.stderr)
            del functions[name]
    terms = registry.displayed(config.reward_terms)
    # With a likelihood as the only reward that counts, the weights of all terms are 0.
    counts = any(term.weight for term in terms)
    is_total = counts and not any(term.schedule for term in terms)
    if not is_total or not functions.keys() >= set(reward_terms.names_of(terms)):
        terms = (rewards.RewardTerm(correct),)
    return Scorer(tokenizer, functions, limits.fault_share, terms)


def further_rewards(scorer: Scorer, result: answer_accuracy.Evaluation) -> dict[str, Estimate]:
    """Return the mean of each reward, if there are several, and of the total if it is another."""
    measured = dict(result.rewards) if len(result.rewards) > 1 else {}
    correct = next(iter(scorer.reward_functions), None)
    if correct is not None and tuple(scorer.terms) != (rewards.RewardTerm(correct),):
        measured["total"] = result.total
    return measured


def _answer_metrics(
    prefix: str, result: answer_accuracy.Evaluation, further: dict[str, Estimate]
) -> dict[str, float]:
    if result.errors:
        print(
            f"note: evaluation: {len(result.errors)} completions were not judged; "
            f"the first: {result.errors[0]}",
            file=sys.stderr,
        )
    accuracy = result.accuracy.as_metrics(f"{prefix}accuracy", f"{prefix}n")
    measured = result.reward.as_metrics(f"{prefix}reward", f"{prefix}n") | {
        f"{prefix}well_formed": result.well_formed,
        f"{prefix}length_mean": result.mean_length,
        f"{prefix}n": result.accuracy.n,
    }
    measured = measured if result.is_graded else accuracy | measured
    if result.calibration is not None:
        measures = result.calibration._asdict()
        for name in calibration.MEASURES:
            value = measures[name]
            # AUROC is not defined where all answers are right.
            measured |= {f"{prefix}confidence_{name}": value} if math.isfinite(value) else {}
    for name, estimate in further.items():
        measured |= estimate.as_metrics(f"{prefix}reward/{name}")
    return measured


# --- texts to imitate ---


def _losses(context: RunContext, stage: Stage, params: Params) -> Evaluate | None:
    """Return the losses of held-out texts of the author whom the stage imitates.

    None without such texts. A teacher writes its texts here, once: it stays as it is.
    """
    from tpu_rl.evaluation import held_out_loss

    author = stage.algorithm.experience.imitates
    if author is None:
        return None
    tokenizer = context.language.tokenizer
    log_probs = compose.log_probs_of(context, "policy")
    losses = {}
    for name, rows in held_out_rows.named_sets(context).items():
        if author == "data":
            rows = [row for row in rows if tasks.brings_text(row)]
        else:
            rows = held_out_rows.problems(context, rows)
        if rows and author == "data":
            losses[name] = held_out_loss.held_out_loss(
                log_probs, rows, tokenizer, context.max_length
            )
        elif rows:
            decoding = compose.decoding(
                context, author, group_size=1, purpose=Purpose.EVALUATION, seed=0
            )
            engine = make_engine(decoding, Scorer(tokenizer))
            texts = engine.roll_out(params, RolloutRequest(rows, step=0)).rollout
            losses[name] = held_out_loss.sampled_loss(log_probs, rows, texts)
    if not losses:
        return None

    def evaluate(params: Params, in_full: bool) -> dict[str, float]:
        metrics = {}
        for name, loss in losses.items():
            estimate = loss(params)
            # None of the texts may have a token to learn.
            metrics |= estimate.as_metrics(f"{_prefix(name)}loss") if estimate.n else {}
        return metrics

    return evaluate


# --- given pairs ---
