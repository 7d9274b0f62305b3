"""What settings must have to do with each other; each function raises InputError where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpu_rl import stores
from tpu_rl.algos import DistillConfig, QSharpConfig
from tpu_rl.errors import InputError
from tpu_rl.needs import Needs
from tpu_rl.types import Pairs, Rollout

if TYPE_CHECKING:
    from launch.config import AlgorithmConfig, ExperimentConfig


def run_dir(run_dir: str) -> None:
    if stores.is_address(run_dir):
        stores.split(run_dir)
    elif "://" in run_dir:
        fix = "give a local folder, or one in a bucket of Google Cloud Storage, as in gs://bucket/name"
        raise InputError(f"the run folder {run_dir} is neither local nor gs://", where="--run-dir", fix=fix)


def sampling(config: ExperimentConfig) -> None:
    how = config.sampling
    if how.stop_strings and any(isinstance(one.algorithm, QSharpConfig) for one in config.stages):
        why = "its answers are continued from the middle, where half of such a string may stand"
        raise InputError("Q# knows no stop strings", where="--sampling.stop-strings", why=why, fix="drop them")
    if "" in how.stop_strings:
        raise InputError("a stop string is empty", where="--sampling.stop-strings", fix="drop it")
    for stage in config.stages:
        _completions(config, stage.algorithm)


def _completions(config: ExperimentConfig, algorithm: AlgorithmConfig) -> None:
    how, needs = config.sampling, algorithm.needs
    grouped = "completions of one prompt are compared with each other"
    if config.batch.completions < needs.smallest_group:
        raise InputError(
            f"a group of {config.batch.completions} completion teaches nothing: its advantage is always 0",
            where="--batch.completions", why=grouped, fix="use at least 2; 8 is usual",
        )  # fmt: skip
    if needs.smallest_group > 1 and how.temperature <= 0:
        raise InputError(
            f"sampling temperature {how.temperature} makes all completions of a prompt equal",
            where="--sampling.temperature",
            why=grouped,
            fix="use 1.0",
        )


def _staleness(config: ExperimentConfig) -> None:
    batch, where = config.batch, "--batch.carry-over" if config.batch.carry_over else "--batch.ahead"
    if not 0 <= batch.carry_over < batch.prompts:
        fix = f"use 0 to {batch.prompts - 1}; an eighth of --batch.prompts is a beginning"
        raise InputError(f"{batch.carry_over} of {batch.prompts} groups cannot be carried over", where=where, fix=fix)
    if batch.carry_over and batch.ahead:
        why = "together they would learn from what is two steps old"
        raise InputError("a batch is partial or sampled ahead", where=f"{where}, --batch.ahead", why=why, fix="use one")
    if batch.refill_rounds:
        why = f"dynamic sampling decides what a batch is, and {where} does"
        raise InputError("two would decide it", where=f"{where}, --batch.refill-rounds", why=why, fix="use one of them")
    needs = [one.algorithm.needs for one in config.stages]
    if any(one.experience is not Rollout or one.latest_policy for one in needs):
        why = "it learns from other things than scored completions, or from those of the latest policy alone"
        raise InputError("this algorithm takes no older completions", where=where, why=why, fix="leave it out")


def batch(config: ExperimentConfig) -> None:
    batch, how = config.batch, config.sampling
    if batch.carry_over or batch.ahead:
        _staleness(config)
    if batch.prompts % batch.minibatches:
        valid = [m for m in range(1, batch.prompts + 1) if batch.prompts % m == 0]
        nearest = sorted(valid, key=lambda m: abs(m - batch.minibatches))[:2]
        raise InputError(
            f"{batch.prompts} prompts cannot be cut into {batch.minibatches} equal minibatches",
            where="--batch.prompts, --batch.minibatches",
            fix=f"nearest valid: {' or '.join(f'--batch.minibatches {m}' for m in sorted(nearest))}",
        )
    if batch.row_length < how.max_prompt_tokens + how.max_new_tokens:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot hold a prompt with a completion",
            where="--batch.row-length",
            why=f"they may have {how.max_prompt_tokens} + {how.max_new_tokens} tokens",
            fix="raise --batch.row-length, or lower --sampling.max-prompt-tokens or --sampling.max-new-tokens",
        )
    whole = 256 * config.mesh.context
    if config.mesh.context > 1 and batch.row_length % whole:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot be cut evenly over {config.mesh.context} devices",
            where="--batch.row-length, --mesh.context",
            why="each takes a stretch from the front and one from the end, of blocks of 128 tokens",
            fix=f"--batch.row-length {-(-batch.row_length // whole) * whole}",
        )


# --- of runs that are about to learn: what an earlier one was saved with can be read all the same -------------------


def learning(config: ExperimentConfig) -> None:
    batch, how = config.batch, config.sampling
    if not how.temperature >= 0:
        what, fix = f"a sampling temperature of {how.temperature}", "use 1.0; 0 takes the most likely token"
        raise InputError(what, where="--sampling.temperature", fix=fix)
    for stage in config.stages:
        _log_probs(config, stage.algorithm)
    drawn = [needs for needs in (one.algorithm.needs for one in config.stages) if _draws_pairs(needs)]
    if drawn and not config.reward:
        raise InputError("no reward tells good completions from bad", where="--reward", fix="name one")
    if not all(needs.judged for needs in drawn) and batch.row_length < how.max_prompt_tokens + 2 * how.max_new_tokens:
        raise InputError(
            f"packed rows of {batch.row_length} tokens cannot hold a prompt with both its completions",
            where="--batch.row-length",
            why=f"they may have {how.max_prompt_tokens} + 2 x {how.max_new_tokens} tokens, and pairs stay together",
            fix="raise --batch.row-length, or lower --sampling.max-prompt-tokens or --sampling.max-new-tokens",
        )
    if batch.refill_rounds and batch.completions == 1:
        raise InputError(
            "no group of one completion has different rewards", where="--batch.refill-rounds, --batch.completions",
            why="dynamic sampling replaces groups whose rewards are all equal", fix="use --batch.refill-rounds 0",
        )  # fmt: skip


def _draws_pairs(needs: Needs) -> bool:
    return needs.experience is Pairs and needs.sampled_by is not None


def _log_probs(config: ExperimentConfig, algorithm: AlgorithmConfig) -> None:
    how, needs, where = config.sampling, algorithm.needs, "--sampling.temperature"
    learns = needs.experience is Rollout and algorithm.roles["policy"].trainable
    if (learns or isinstance(algorithm, DistillConfig)) and how.temperature == 0:
        why = "the loss divides logits by it, as sampling does: there are no log-probabilities at 0"
        raise InputError("a policy cannot learn at sampling temperature 0", where=where, why=why, fix="use 1.0")
    if needs.experience is not Pairs or needs.sampled_by != "reference" or not needs.reference_log_probs:
        return
    why = "the loss compares with its log-probs as they were when it drew"
    if how.temperature != 1:
        what = f"the reference is sampled at temperature {how.temperature}, and the loss is at 1"
        raise InputError(what, where=where, why=why, fix="use 1.0")
    if how.cache == "int8":
        what, fix = "a rounded cache would be in the reference's log-probs", "use --sampling.cache computed"
        raise InputError(what, where="--sampling.cache", why=why, fix=fix)
