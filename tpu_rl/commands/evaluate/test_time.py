"""Train on each problem before it is answered, and forget it again (LADDER, arXiv 2503.00735).

    python launch/test_time.py [--items N] [--steps K] [--samples S] [--variants] -- PRESET --flags

The flags after `--` are those of launch/run.py: the model, the held-out problems, the algorithm and
the rewards that it learns from. For each problem, K steps of the algorithm learn from it alone, or
from easier variants of it; the new weights answer it S times, before and after with the same random
keys; then the weights are those of the beginning, bit by bit. No step sees the answers that judge:
train on variants, which the task solves itself or which a row has in its column `variants`, or on
`--reward majority(of=NAME) --evaluation.reward NAME` (TTRL, arXiv 2504.16084).

LADDER lets a model write the variants. Here they come with the problem.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from tpu_rl import data, ranges
from tpu_rl.checkpoint import digests
from tpu_rl.commands import compose, micro_batches
from tpu_rl.commands import config as configuration
from tpu_rl.commands.checks import config_checks, preflight
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.commands.recipe import answers
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.commands.roles import Language, RunContext
from tpu_rl.commands.sources import of_rollouts
from tpu_rl.data import Row
from tpu_rl.environments import task_of
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.evaluation import intervals
from tpu_rl.experience.layout import pack_experience
from tpu_rl.experience.sources import rollouts
from tpu_rl.ranges import Count
from tpu_rl.report import markdown
from tpu_rl.runtime import compilation_cache
from tpu_rl.studies import comparison
from tpu_rl.train import update_step
from tpu_rl.types import TrainState

VARIANTS = "variants"
"""Column of rows that are easier variants of a row."""
RIGHT = "right"
"""The name of numbers whose rewards say which answers are right."""


@dataclass(frozen=True)
class Flags:
    items: Count = 20
    """Held-out problems."""
    steps: Count = 8
    """Steps of the algorithm on each."""
    samples: Count = 8
    """Answers to each, before and after."""
    variants: bool = False
    """Train on easier variants of the problem, and not on itself."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    argv, settings = answers.split(argv)
    prog = typed_command("test-time")
    flags = tyro.cli(Flags, args=argv, prog=prog, description=__doc__)
    require_one_run(settings)
    config = check(flags, configuration.parse(settings[0] if settings else []))
    compilation_cache.enable()
    print(run(flags, config))
    return 0


def require_one_run(settings: list[list[str]]) -> None:
    """Say which flags behind `--` have no effect. Raise InputError if there cannot be one run."""
    words = {word.partition("=")[0] for flags in settings for word in flags}
    if len(settings) > 1 or "--dry-run" in words:
        raise InputError(
            "several sets of flags" if len(settings) > 1 else "no dry run of test_time",
            where="--",
            why="there is one run, and it trains on each problem",
            fix="leave it out, or use tpu-rl run --dry-run",
        )
    for word in sorted(words & {"--steps", "--epochs", "--evaluation.rows"}):
        print(f"note: {word} behind -- has no effect: see --steps and --items", file=sys.stderr)


def check(flags: Flags, config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration that a problem's steps have.

    Raises:
        InputError: if a setting is impossible, or the algorithm does not learn from rollouts alone.
    """
    ranges.check(flags, "--")
    why = "each problem has a few steps of its own, with rollouts of the latest policy"
    others = ("--phases", "--rollout.partial", "--batch.staleness", "--rollout.curriculum")
    refused = {setting: why for setting in (config_checks.NOT_ROLLOUTS, *others)}
    config_checks.refuse_with("learning from a problem alone", config, refused)
    if config.evaluation_reward is None:
        raise compose.without_judgment()
    evaluation = replace(config.evaluation, rows=flags.items)
    config = replace(config, steps=flags.steps, evaluation=evaluation)
    for warning in preflight.check(config):
        print(f"warning: {warning}", file=sys.stderr)
    return config


def run(flags: Flags, config: ExperimentConfig) -> str:
    """Train on each problem and answer it; return the report."""
    rows = answers.problems_of(config, is_whole=False)[: flags.items]
    training = [variants_of(row, config) if flags.variants else [row] for row in rows]
    mesh = compose.make_mesh(config.mesh)
    config = micro_batches.fit_micro_batch(config, mesh)
    with jax.set_mesh(mesh):
        context, params = compose.make_context(config, Path(config.run_dir), mesh)
        before = digests.of_tree(params)
        stage = config.stages[0]
        algorithm = compose.build_algorithm(context, stage)
        first, update = compose.learner(context, stage, algorithm, params)
        make_batch = update_step.make_batch_step(algorithm, compose.training_options(config, mesh))
        engine = compose.rollout_engine(context)
        transforms = of_rollouts.batch_transforms(context, stage)
        known: list[tuple[Answers, Answers]] = []
        for index, row in enumerate(rows):
            untrained = answer(context, first, row, flags.samples)
            # Steps donate their state, so that they get copies.
            state: TrainState = jax.tree.map(jnp.copy, first)
            stream = data.stream(training[index], config.seed, compose.rows_at_once(config))
            source = rollouts.rollout_source(
                engine,
                stream,
                config.batch,
                config.rollout.dynamic_sampling_rounds,
                transforms,
                config.rollout.dynamic_sampling_size == "needed",
            )
            for step in range(1, flags.steps + 1):
                experience = source.draw(index * flags.steps + step, state)
                packed = pack_experience(
                    config.batch,
                    experience.data,
                    mesh,
                    context.attention_index,
                    context.language.tokenizer.images,
                )
                batch, algorithm_state = make_batch(packed, state.params, state.algorithm_state)
                state = replace(state, algorithm_state=algorithm_state)
                for _ in range(config.batch.ppo_epochs):
                    for part in range(config.batch.num_minibatches):
                        state, _ = update(state, update_step.minibatch(batch, part))
            known.append((untrained, answer(context, state, row, flags.samples)))
            before_and_after, what = rates_of(known[-1:])
            print(
                f"problem {index + 1} of {len(rows)}: {before_and_after[0, 0]:.2f} -> "
                f"{before_and_after[1, 0]:.2f} {what}, of {len(training[index])} rows",
                flush=True,
            )
        after = digests.of_tree(first.params)
    rates, what = rates_of(known)
    is_judged = np.isfinite(rates).all(0)
    of = intervals.estimate if what == RIGHT else intervals.mean_estimate
    estimates = [of(rate[is_judged].tolist()) for rate in rates]
    gain = comparison.paired_difference(rates[0][is_judged], rates[1][is_judged])
    lines = [["before", markdown.of(estimates[0])], ["after", markdown.of(estimates[1])]]
    lines.append(["gain", markdown.of(gain, signed=True)])
    table = markdown.table(["", f"{what}, {flags.samples} answers to a problem"], lines)
    verdict = "restored bit by bit" if before == after else "CHANGED"
    return f"{table}\n\nweights before {before}\nweights after  {after}: {verdict}"


def answer(context: RunContext, state: TrainState, row: Row, samples: int) -> Answers:
    """Return the answers to a problem."""
    language = Language(context.models["policy"], context.language.tokenizer)
    policy = context.params_of("policy")(state.params)
    return answers.evaluate(context.config, language, policy, [row], samples)


def rates_of(known: list[tuple[Answers, Answers]]) -> tuple[np.ndarray, str]:
    """Return ([2, problems], what they are): shares of right answers before and after, or their
    mean rewards if one is graded. NaN where none was judged."""
    is_graded = any(item.is_graded for pair in known for item in pair)
    rates = [[item.values(is_graded)[0] for item in items] for items in zip(*known, strict=True)]
    return np.array(rates), "mean reward" if is_graded else RIGHT


def variants_of(row: Row, config: ExperimentConfig) -> list[Row]:
    """Return the easier variants of a problem: those of its column, or of its task.

    Raises InputError if there are none.
    """
    task = task_of(config.data)
    given: Any = row.get(VARIANTS)
    if given is None and task is not None and task.variants is not None:
        given = task.variants(row)
    if not isinstance(given, list) or not given or not all(isinstance(v, dict) for v in given):
        raise InputError(
            "a problem has no variants",
            where=f"--variants, the problem {str(row['prompt'])[:60]!r}",
            why=f"its column `{VARIANTS}` is {given!r}"[:100],
            fix="give each row a list of rows there, use a task that has them (arithmetic), or "
            "train on the problem itself",
        )
    return [{name: value for name, value in row.items() if name != VARIANTS} | v for v in given]
