"""A recipe: stages of training and filtering in one YAML file, each an ordinary run.

    run-dir: runs/chain                      the default is runs/ and the file's name
    common: {seed: 1}                        flags of every stage
    evaluations:                             sets of problems: flags of launch/run.py
      sums: {preset: arithmetic_grpo, evaluation.rows: 200}
    stages:
      sft:                                   a run: a preset or method, and flags
        preset: sft
        model: builtin:arithmetic
        data.path: rows.jsonl
      rounds:
        repeat: 2                            folders kept_1 grpo_1 kept_2 grpo_2
        stages:
          kept:                              a filter: sample, judge, keep -> rows.jsonl
            preset: grpo
            model: {stage: grpo, first: sft}     in round 1: sft
            reward: [arithmetic]
            keep: {prompts: 500, min-reward: 0.5, max-per-prompt: 1}
          grpo:
            preset: sft
            model: {stage: sft}
            data.path: {stage: kept}

`{stage: NAME}` stands for what a stage leaves: the model of a run, the rows of a filter. In a text,
`${NAME}` is the same. Of a stage in rounds it is the one of this round if that stands before, else
of the round before, and from outside the one of the last round. A later round has another seed, so
that it reads other rows of a file that one round does not finish.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from tpu_rl import ranges
from tpu_rl.commands.flags import flag_names, yaml_flags
from tpu_rl.errors import InputError, unknown_name
from tpu_rl.ranges import Count, CountOrNone, Needs, NotNegative, ReadOnlyWith, Share

ROUND_SEED = 1000
"""A round adds so much to the seed of the round before."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
START = "start"
"""The row of the model that the chain begins with, in the table."""
EVALUATIONS = "evaluations"
"""The folder of answers."""
STAGE = "another stage"
"""The use of a name that a stage has."""
REFERENCE = re.compile(r"\$\{([^}]*)\}")
MODEL_KEYS = ("model", "model.path", "algorithm.teacher", "reward")
"""Flags that name models."""


ROWS = ("completions", "pairs", "prompts", "written")
"""Kinds of rows that a filter leaves; see `Keep.rows`."""
OF_TEXTS = ReadOnlyWith("rows", "completions", "written")


@dataclass(frozen=True)
class Keep:
    """What a filter stage keeps of the completions that it has sampled, `batch.group-size` of each
    prompt."""

    prompts: CountOrNone = 0
    """The largest number of prompts to sample for; 0 takes all rows of a file."""
    rows: str = "completions"
    """completions: rows with `completion`, those that pass. pairs: the best and the worst
    completion of a prompt as `chosen` and `rejected`. prompts: the rows as they were, chosen by how
    many of their completions pass. written: completions that pass become prompts of new rows."""
    columns: Annotated[str, ReadOnlyWith("rows", "written")] = ""
    """written: FILE.py:FUNCTION, fn(texts, **columns) -> the columns of the new row of each text,
    such as its answer, or None for a text that is no problem. `columns` are those of the rows that
    asked. A returned `prompt` takes the place of the text. Without it new rows have a prompt
    alone."""
    min_reward: float = 0.5
    """The smallest total reward of a completion that passes."""
    max_per_prompt: Annotated[CountOrNone, OF_TEXTS] = 0
    """The largest number of completions of a prompt, the best ones; 0 keeps all that pass."""
    duplicates: Annotated[bool, OF_TEXTS] = False
    """Keep completions of a prompt with the same text."""
    pass_rate: tuple[Share, Share] = (0.0, 1.0)
    """Keep prompts of which this share of completions passes, both ends included."""
    concepts: Annotated[str, ReadOnlyWith("rows", "prompts", why="concepts choose prompts")] = ""
    """prompts: a column that names what a prompt is about. Prompts of the `weakest` concepts are
    kept, those of whose completions the smallest share passes."""
    weakest: Annotated[Count, Needs("concepts")] = 1
    """concepts: how many of them."""
    gap: Annotated[NotNegative, ReadOnlyWith("rows", "pairs")] = 0.0
    """pairs: the smallest difference of the rewards; at 0, any difference above 0."""
    step_end: Annotated[str, ReadOnlyWith("rows", "pairs")] = ""
    """pairs: a text that ends a step. The pair is then a passing and a failing completion that
    begin with the most equal steps, both cut behind the first step in which they differ (Step-DPO,
    arXiv 2406.18629)."""
    chunk: Count = 256
    """Prompts that are sampled at once. A filter that was killed goes on after the last chunk."""


TRAINING_FLAGS = ("steps", "epochs", "optimizer", "checkpoint", "evaluation", "phases", "stop")
"""First parts of flags that a stage with `keep` does not read."""


@dataclass(frozen=True)
class RecipeStage:
    """A stage with its references resolved."""

    name: str
    argv: list[str]
    """The preset, and flags of launch/run.py."""
    keep: Keep | None
    """None: a run."""
    needs: tuple[str, ...]
    """The stages whose results it reads."""
    reads_only_models: bool
    """True if all of these are models of --model.path, so that the rest can be checked before."""


@dataclass(frozen=True)
class Recipe:
    """A recipe, in the order in which its stages run."""

    run_dir: Path
    """The folder of the stages; with a seed of the command line, that of this seed."""
    start_dir: Path
    """The recipe's folder, with the answers of the first model, which all seeds share."""
    stages: list[RecipeStage]
    evaluations: dict[str, list[str]] = field(default_factory=dict)
    """Name of a set of problems -> the preset and flags that describe it."""


def read(path: Path, seed: int | None = None) -> Recipe:
    """Read a recipe and resolve its references.

    Args:
        seed: the seed of all stages, in a folder of its own below the recipe's. None leaves the
            seeds and the folder as they are in the file.

    Raises:
        InputError: if the file, a key, a name or a reference is wrong.
    """
    content = yaml_flags.read_mapping(path)
    where = str(path)
    _require_keys(content, ("run-dir", "common", "evaluations", "stages"), where)
    run_dir = content.get("run-dir", f"runs/{path.stem}")
    if not isinstance(run_dir, str) or not run_dir:
        raise InputError(f"run-dir: {run_dir!r} is no folder", where=where)
    common = _flags(_mapping(content.get("common") or {}, "common", where), f"{where}, common")
    evaluations = {
        _name(name, where): _evaluation(
            _mapping(flags, f"evaluations: {name}", where), f"{where}, evaluation {name}"
        )
        for name, flags in _mapping(content.get("evaluations") or {}, "evaluations", where).items()
    }
    stages = _mapping(content.get("stages") or {}, "stages", where)
    if not stages:
        raise InputError("the recipe has no stages", where=where, fix="write `stages:`")
    folder = Path(run_dir) if seed is None else Path(run_dir) / f"seed_{seed}"
    reader = _Reader(folder, common, seed, where)
    for name, body in stages.items():
        reader.add(_name(name, where), _mapping(body, f"stage {name}", where))
    return Recipe(folder, Path(run_dir), reader.planned, evaluations)


class _Reader:
    """Expands rounds, and resolves references in the order of the stages."""

    def __init__(self, run_dir: Path, common: dict[str, Any], seed: int | None, where: str):
        self.planned: list[RecipeStage] = []
        self._latest: dict[str, RecipeStage] = {}
        """Name in the file -> the latest stage of that name."""
        self._taken = {START: "a row of the table", EVALUATIONS: "the folder of answers"}
        self._folders: dict[str, str] = {}
        """Folder of a stage -> its use."""
        self._run_dir = run_dir
        self._common = common
        self._seed = {} if seed is None else {"seed": seed}
        self._where = where

    def add(self, name: str, body: dict[str, Any]) -> None:
        """Add a stage, or rounds of stages."""
        if "repeat" not in body:
            self._take(name, STAGE)
            self._take_folder(name, STAGE)
            self._stage(name, name, body, {}, 0)
            return
        _require_keys(body, ("repeat", "stages"), f"{self._where}, stage {name}")
        times = body["repeat"]
        if not isinstance(times, int) or isinstance(times, bool) or times < 1:
            raise InputError(
                f"repeat: {times!r} is no number of rounds",
                where=f"{self._where}, stage {name}",
                fix="use a whole number of at least 1",
            )
        inner = _mapping(body.get("stages") or {}, f"stages of {name}", self._where)
        if not inner:
            raise InputError(f"the rounds {name} have no stages", where=self._where)
        for inner_name in inner:
            self._take(_name(inner_name, self._where), STAGE)
        for number in range(1, times + 1):
            for inner_name, inner_body in inner.items():
                inner_body = _mapping(inner_body, f"stage {inner_name}", self._where)
                folder = f"{inner_name}_{number}"
                self._take_folder(folder, f"the folder of round {number} of stage {inner_name}")
                self._stage(inner_name, folder, inner_body, inner, ROUND_SEED * (number - 1))

    def _take(self, name: str, use: str, of: dict[str, str] | None = None) -> None:
        """Take a name of a stage, or `of` folders. Raises InputError if it has another use."""
        names = self._taken if of is None else of
        if name in names:
            raise InputError(
                f"no stage can be called {name}",
                where=self._where,
                why=f"the name is that of {names[name]}",
                fix="rename it",
            )
        names[name] = use

    def _take_folder(self, name: str, use: str) -> None:
        self._take(name, use, self._folders)

    def _stage(
        self, name: str, folder: str, body: dict[str, Any], block: Mapping, added_seed: int
    ) -> None:
        """Plan one stage; `block` has the stages of its rounds, if it is in rounds."""
        where = f"{self._where}, stage {name}"
        needs: list[tuple[str, str]] = []
        flags = {
            key: self._resolved(value, key, block, where, needs) for key, value in body.items()
        }
        keep = None
        if "keep" in flags:
            keep = _keep(flags.pop("keep"), where)
        stage_flags = _flags(flags, where)
        unread = [flag for flag in stage_flags if flag.partition(".")[0] in TRAINING_FLAGS]
        if keep is not None and unread:
            raise InputError(
                f"{unread[0]} would change nothing",
                where=where,
                why="a stage with `keep` samples and judges, and trains nothing",
                fix="leave it out",
            )
        if self._seed and "seed" in stage_flags:
            raise InputError(
                "the stage has a seed of its own",
                where=where,
                why="--seeds gives one seed to all stages",
                fix="leave `seed` out of the stage, or run the recipe without --seeds",
            )
        run_dir = {"run-dir": str(self._run_dir / folder)}
        merged = self._common | self._seed | stage_flags | run_dir
        seed = merged.get("seed", 0)
        if added_seed and "seed" not in stage_flags and isinstance(seed, int):
            merged["seed"] = seed + added_seed
        argv = _argv(merged, where)
        only_models = all(key in MODEL_KEYS[:2] for key, _ in needs)
        found = tuple(stage for _, stage in needs)
        self._latest[name] = RecipeStage(folder, argv, keep, found, only_models)
        self.planned.append(self._latest[name])

    def _resolved(
        self, value: Any, key: str, block: Mapping, where: str, needs: list[tuple[str, str]]
    ) -> Any:
        """Return a value of the file with what stages leave in place of references to them."""

        def result_of(name: Any) -> str:
            stage = self._latest.get(name) if isinstance(name, str) else None
            if stage is None:
                later = isinstance(name, str) and self._taken.get(name) == STAGE
                raise InputError(
                    f"stage {name} has not run before this one" if later else f"no stage {name}",
                    where=f"{where}, {key}",
                    fix="in round 1 use {stage: NAME, first: OTHER}"
                    if later
                    else f"stages before it: {', '.join(self._latest) or 'none'}",
                )
            is_filter = stage.keep is not None
            reads_rows = key.startswith("data.")
            if is_filter != reads_rows and (reads_rows or key in MODEL_KEYS):
                raise InputError(
                    f"stage {name} leaves {'rows' if is_filter else 'a model'}",
                    where=f"{where}, {key}",
                    fix="name a stage with `keep`" if reads_rows else "name a stage without `keep`",
                )
            needs.append((key, stage.name))
            return str(self._run_dir / stage.name / ("rows.jsonl" if is_filter else "model"))

        if isinstance(value, str):
            return REFERENCE.sub(lambda match: result_of(match[1]), value)
        if isinstance(value, list):
            return [self._resolved(item, key, block, where, needs) for item in value]
        if not isinstance(value, dict):
            return value
        if "stage" in value:
            _require_keys(value, ("stage", "first"), f"{where}, {key}")
            name = value["stage"]
            is_later = isinstance(name, str) and name in block and name not in self._latest
            if is_later and "first" in value:
                first = value["first"]
                return result_of(first) if self._taken.get(first) == STAGE else first
            return result_of(name)
        return {
            inner: self._resolved(item, f"{key}.{inner}", block, where, needs)
            for inner, item in value.items()
        }


def _keep(values: Any, where: str) -> Keep:
    """Return the rule of a filter.

    Raises:
        InputError: if a value has another type or range, or would change nothing.
    """
    values = _mapping(values, "keep", where)
    names = {field.name.replace("_", "-"): field for field in fields(Keep)}
    _require_keys(values, tuple(names), f"{where}, keep")
    settings: dict[str, Any] = {}
    for key, value in values.items():
        default = names[key].default
        value = tuple(value) if isinstance(value, list) else value
        kinds = (int, float) if isinstance(default, float) else type(default)
        fits = isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)
        if key == "pass-rate":
            fits = fits and len(value) == 2 and value[0] <= value[1]
        if not fits or (key == "rows" and value not in ROWS):
            raise InputError(
                f"keep: {key}: {value!r} is wrong", where=where, fix=f"the default is {default}"
            )
        settings[names[key].name] = value
    keep = Keep(**settings)
    ranges.check(keep, f"{where}, keep")
    return keep


def _flags(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return flag, in one spelling -> value of a mapping of flags.

    Raises:
        InputError: if a key is no flag, or a flag stands twice, `model` and `model.path` included.
    """
    flags = {yaml_flags.flag_name(k): value for k, value in yaml_flags.flat(values, where).items()}
    if "run-dir" in flags:
        raise InputError("run-dir is the recipe's", where=where, fix="leave it out of stages")
    model = flags.pop("model", None)
    if model is None:
        return flags
    if "model.path" in flags:
        raise InputError("model and model.path are the same", where=where, fix="leave one out")
    # A preset may begin with random weights; a stage that names its model does not.
    return {"model.path": model, "model.random-init": False} | flags


def _evaluation(values: Mapping[str, Any], where: str) -> list[str]:
    """Return the preset and the arguments of a set of problems."""
    flags = _flags(values, where)
    for flag in flags:
        if flag == "model.path" or flag.endswith(".stage"):
            raise InputError(
                f"{flag.removesuffix('.stage')} of an evaluation",
                where=where,
                why="the models of the stages answer all sets, and a set comes from no stage",
                fix="leave it out" if flag == "model.path" else "name a file",
            )
    return _argv(flags, where)


def _argv(flags: dict[str, Any], where: str) -> list[str]:
    """Return the preset and the arguments that flags stand for."""
    preset = flags.pop(yaml_flags.PRESET, None)
    if not isinstance(preset, str):
        raise InputError(
            "no preset" if preset is None else f"preset: {preset!r} is no name",
            where=where,
            fix="write `preset: NAME`: one of tpu-rl presets, or a method such as sft or grpo",
        )
    return [preset, *yaml_flags.arguments(flags, where)]


def _mapping(value: Any, what: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{what} is {value!r}, not `key: value` lines", where=where)
    return dict(value)


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name", where=where, fix="use letters, digits, - and _")
    return name


def _require_keys(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            library = flag_names.library_of(str(key))
            where = f"{where}, a file of {library}" if library else where
            raise unknown_name("key", str(key), known, where)
