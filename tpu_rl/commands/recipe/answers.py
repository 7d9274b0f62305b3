"""Answers of a model to problems, kept in a file: what `recipe` and `compare` set side by side.

A set of problems is a configuration of a run: its held-out rows, its first reward, its lengths. The
random keys are those of every evaluation, so that two models differ in nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_rl import models, run_files
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import compose, evaluators, roles
from tpu_rl.commands import config as configuration
from tpu_rl.commands.config import ExperimentConfig, FileData, MeshConfig
from tpu_rl.data import Row
from tpu_rl.errors import DamagedDataError, InputError, refused
from tpu_rl.evaluation import answer_accuracy, intervals
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.experience.config import sampler_config
from tpu_rl.experience.rows import tasks
from tpu_rl.rollout import image_prompts
from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer
from tpu_rl.rollout.scoring import Scored, by_episode
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.runtime import compilation_cache
from tpu_rl.sampler import SamplerConfig
from tpu_rl.types import Params, Purpose


class Answers(NamedTuple):
    """The answers to n problems, k each."""

    prompts: list[str]
    completions: list[list[str]]
    rewards: np.ndarray
    """[n, k] the reward that says what is correct; NaN where it gave none."""

    @property
    def is_graded(self) -> bool:
        """True unless all rewards are 0 or 1, or all are -1 or 1."""
        given = self.rewards[np.isfinite(self.rewards)]
        return not (np.isin(given, (0, 1)).all() or np.isin(given, (-1, 1)).all())

    def values(self, is_graded: bool) -> np.ndarray:
        """Return [n] the share of right answers to each problem, or their mean reward if graded.

        NaN where no answer was judged.
        """
        judged = self.rewards if is_graded else np.where(self.rewards > 0.5, 1.0, 0.0)
        given = np.isfinite(self.rewards)
        total = np.where(given, judged, 0).sum(1, dtype=np.float64)
        return np.where(given.any(1), total / np.maximum(given.sum(1), 1), np.nan)

    def estimate(self) -> Estimate:
        """Return the accuracy, or the mean reward if rewards are graded, over judged problems."""
        values = self.values(self.is_graded)
        judged = values[np.isfinite(values)].tolist()
        if self.is_graded:
            return intervals.mean_estimate(judged)
        return intervals.estimate(judged)


def load_model(address: str, config: ExperimentConfig) -> tuple[roles.Language, Params]:
    """Load a model directory, hub id or builtin:NAME, in the dtypes of the configuration."""
    compilation_cache.enable()
    model = replace(config.model, path=address, random_init=False, lora=models.LoraConfig())
    config = replace(config, model=model)
    mesh = compose.make_mesh(MeshConfig())
    language, params = roles.language(config, mesh)
    models.require_writer(language.model, address)
    return language._replace(model=roles.fast_model(config, language.model, mesh)), params


def split(argv: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return (arguments before the first `--`, those after each).

    Each of the latter is a set of problems: a preset and flags of a run.
    """
    parts: list[list[str]] = [[]]
    for argument in argv:
        if argument == "--":
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts[0], parts[1:]


def address_of(member: str) -> str:
    """Return the directory of a model, or of a run's trained model.

    Raises InputError if there is none.
    """
    if remote_run.is_run(member):
        directory = remote_run.fetch(member) / "model"
        if not directory.is_dir():
            raise InputError(
                "the run has no model yet",
                where=member,
                why="a run writes it after its last step",
                fix="let the run end, or export its newest checkpoint",
            )
        return str(directory)
    return str(models.find_directory(roles.model_path(member)))


def problems_of(config: ExperimentConfig, is_whole: bool) -> list[Row]:
    """Return the problems of a set.

    Args:
        config: the set. At most `evaluation.rows` problems are taken.
        is_whole: True if all rows of --data.path are the set, and not its held-out ones.

    Raises:
        InputError: if there are none.
    """
    files = config.data
    if is_whole and isinstance(files, FileData) and files.evaluation_path is None:
        files = replace(files, evaluation_path=files.path, evaluation_split=files.split)
    rows = tasks.problems(
        tasks.evaluation_rows(files, config.algorithm.experience, config.evaluation.rows)
    )
    if not rows:
        raise InputError(
            "there are no held-out problems",
            where="--evaluation.rows, --data.path",
            why="at most a tenth of a file's rows is held out, and only rows with a `prompt` are "
            "problems",
            fix="give more such rows, or --data.evaluation-path",
        )
    return rows


def evaluate(
    config: ExperimentConfig,
    language: roles.Language,
    params: Params,
    rows: Sequence[Row],
    samples: int = 1,
    temperature: float = 1.0,
) -> Answers:
    """Answer problems, `samples` times each, and judge the answers.

    Raises InputError if no reward says what is correct.
    """
    if config.evaluation_reward is None and not compose.is_judged(config):
        raise compose.without_judgment()
    settings = replace(
        sampler_config(config.sampling, language.tokenizer, samples),
        temperature=temperature,
        **{"top_k": None, "top_p": None, "min_p": None, "repetition_penalty": 1.0},
        logit_bias=(),
        max_num_seqs=max(config.sampling.slots, samples),
    )
    scorer = evaluators.answer_scorer(config, language.tokenizer, list(rows))
    scored = sample(config, language, params, rows, settings, scorer, Purpose.EVALUATION)
    judged = next(iter(scored.parts.values()), scored.rewards).reshape(len(rows), samples)
    texts = [list(scored.completions[i * samples : (i + 1) * samples]) for i in range(len(rows))]
    return Answers(list(scored.prompts[::samples]), texts, np.asarray(judged, np.float64))


def sample(
    config: ExperimentConfig,
    language: roles.Language,
    params: Params,
    rows: Sequence[Row],
    settings: SamplerConfig,
    scorer: Scorer,
    purpose: Purpose,
    step: int = 0,
    seed: int = 0,
) -> Scored:
    """Return scored completions of rows by a model that is no part of a run."""
    engine = compose.engine(config, decoding(config, language, settings, purpose, seed), scorer)
    return by_episode(engine.roll_out(params, RolloutRequest(list(rows), step)))


def decoding(
    config: ExperimentConfig,
    language: roles.Language,
    settings: SamplerConfig,
    purpose: Purpose,
    seed: int = 0,
) -> Decoding:
    """Return the decoding of a model that is no part of a run, by a run's settings."""
    mesh = compose.make_mesh(MeshConfig())
    return Decoding(
        RolloutPolicy(
            models.policy(language.model),
            lambda tree: tree,
            mesh,
            with_images=image_prompts.with_images(language.model),
        ),
        settings,
        config.sampling.max_prompt_tokens if config.agent else answer_accuracy.ANY_LENGTH,
        seed,
        purpose,
        config.sampling.stop_strings,
        compose.environment(config),
        evaluators.limited(config.sampling.thinking),
    )


# --- files ---


def identity(config: ExperimentConfig, model: str, **settings: Any) -> str:
    """Return a hash of what answers depend on, besides the weights in the model's folder."""
    return configuration.settings_hash(config) + json.dumps({"model": model, **settings})


def write(path: Path, answers: Answers, of: str) -> None:
    """Write answers completely or not at all: a line that says what they are, then a problem each.

    `of` is their `identity`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"of": of}]
    for prompt, completions, rewards in zip(*answers, strict=True):
        numbers = [float(reward) if np.isfinite(reward) else None for reward in rewards]
        lines.append({"prompt": prompt, "completions": completions, "rewards": numbers})
    write_lines(path, lines)


def kept(path: Path | None, of: str, answer: Callable[[], Answers]) -> Answers:
    """Return the answers in a file, or new ones, which are then written there; None for no file."""
    result = None if path is None else read(path, of)
    if result is None:
        result = answer()
        if path is not None:
            write(path, result, of)
    return result


def write_lines(path: Path, objects: Sequence[Any]) -> None:
    """Write JSON lines completely or not at all."""
    lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in objects]
    run_files.write_text(path, "".join(lines))


def read(path: Path, of: str | None = None) -> Answers | None:
    """Read answers; None if there is no file, or it has other answers than `of`.

    Raises:
        InputError: if it has other rows.
        DamagedDataError: if it is damaged.
    """
    if not path.is_file():
        return None
    with refused(
        (ValueError, KeyError, TypeError, AttributeError),
        "the file holds no answers",
        where=str(path),
        fix="delete it; the same command makes it again",
        kind=DamagedDataError,
    ):
        with path.open(encoding="utf-8") as file:
            first, *problems = map(json.loads, file)
        if first.keys() != {"of"}:
            raise InputError(
                "the file holds other rows than answers",
                where=str(path),
                fix="name a file that compare --keep or a recipe wrote; rows are --data.path, "
                "behind --",
            )
        if of is not None and first["of"] != of:
            return None
        rewards = [[np.nan if r is None else r for r in row["rewards"]] for row in problems]
        return Answers(
            [row["prompt"] for row in problems],
            [row["completions"] for row in problems],
            np.array(rewards, np.float64).reshape(len(problems), -1),
        )
