"""Run a recipe: stages of training and filtering, and one table of what each of them can do.

    python launch/recipe.py FILE.yaml [--seeds 0 1 2] [--dry-run]
    tpu-rl recipe --copy-to recipes

The file is described in docs/how-to/recipes.md. Each stage of training is an ordinary run, in a
folder of its own below the recipe's. The same command continues where it stopped. At the end,
report.md and summary.json of the recipe say how well each stage solves each set of problems.
With --seeds, all stages run once with each seed, and one more report sets the seeds side by side.
With --copy-to, the recipes that ship with the package, and their data, are written to a folder.
Their commands name the folder `recipes`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import jax
import tyro

import tpu_rl
from tpu_rl import run_files
from tpu_rl.checkpoint import lock
from tpu_rl.commands import compose, config, roles, run
from tpu_rl.commands.checks import config_checks, preflight
from tpu_rl.commands.config import ExperimentConfig
from tpu_rl.commands.recipe import answers, recipe_file, recipe_report, written_prompts
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.commands.recipe.recipe_file import START, Keep, Recipe
from tpu_rl.data import Row
from tpu_rl.diagnosis.secret_settings import refuse_secrets
from tpu_rl.environments import task_of
from tpu_rl.errors import InputError, TpuRlError, reported, typed_command
from tpu_rl.experience.config import sampler_config
from tpu_rl.experience.rows import tasks
from tpu_rl.report import markdown
from tpu_rl.rewards import registry
from tpu_rl.rollout.engine import Scorer
from tpu_rl.rollout.scoring import Scored
from tpu_rl.runtime import cluster
from tpu_rl.runtime.host import explain_full_disk
from tpu_rl.runtime.preemption import INTERRUPTED, Preempted
from tpu_rl.types import Purpose

EXAMPLES = "recipes"
"""Folder of a checkout, and of the installed package (see setup.py)."""
ROWS = "rows.jsonl"
ONE_TURN = "it keeps completions of one turn; the method rft imitates whole conversations"
NOT_KEPT = ("messages", "text", "completion", "ended", "system", "system_prompt")
"""Columns that would say something else of a row than its new prompt and completion."""


@dataclass(frozen=True)
class Flags:
    file: tyro.conf.Positional[str] = ""
    """The recipe."""
    seeds: tuple[int, ...] = ()
    """Run all stages once with each of these seeds, in the folders seed_N of the recipe's."""
    dry_run: bool = False
    """Check all stages and evaluations, and stop."""
    copy_to: str = ""
    """Write the recipes that ship with the package to this new folder, and stop."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("recipe"), description=__doc__)
    command = f"{typed_command('recipe')} {shlex.join(argv)}"
    try:
        refuse_secrets(argv)
        if flags.copy_to:
            copy_examples(Path(flags.copy_to))
            print(f"{flags.copy_to}/README.md says what there is")
            return 0
        if not flags.file:
            raise InputError(
                "no recipe is named",
                fix="name a file, or write those of the package with --copy-to recipes",
            )
        if cluster.find([])[0] is not None:
            raise InputError(
                "recipes run in one process",
                why="a filter stage writes its rows in one",
                fix="start the stages by themselves: see --dry-run for their flags",
            )
        require_seeds(flags.seeds)
        recipes = [recipe_file.read(Path(flags.file), seed) for seed in flags.seeds or (None,)]
        configs = [check(recipes[0], shows=flags.dry_run), *map(parse, recipes[1:])]
        if not flags.dry_run:
            with explain_full_disk():
                run_all(recipes, configs, command)
    except Preempted as stop:
        print(f"{stop}\n  to go on: {command}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print(f"interrupted\n  to go on: {command}", file=sys.stderr)
        return INTERRUPTED
    return 0


def copy_examples(target: Path) -> None:
    """Write the recipes of the installed package, or of the checkout, to a new folder.

    Raises InputError if the folder exists.
    """
    package = Path(tpu_rl.__file__).parent
    source = package / EXAMPLES
    if not source.is_dir():
        source = package.parent / EXAMPLES
    if target.exists():
        raise InputError(f"{target} exists", where="--copy-to", fix="name a new folder")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def require_seeds(seeds: Sequence[int]) -> None:
    """Raise InputError if a seed stands twice, or is no seed of a run."""
    wrong = [seed for seed in seeds if seed < 0 or seeds.count(seed) > 1]
    if wrong:
        raise InputError(
            f"seed {wrong[0]} stands twice" if wrong[0] >= 0 else f"no seed {wrong[0]}",
            where="--seeds",
            fix="name different whole numbers from 0",
        )


@contextmanager
def named(what: str) -> Iterator[None]:
    """Let errors say which stage or evaluation they are of."""
    try:
        yield
    except Preempted:  # Not an error of the stage.
        raise
    except TpuRlError as error:
        raise error.within(what) from error


def check(recipe: Recipe, shows: bool = False) -> dict[str, ExperimentConfig]:
    """Return the configurations of a recipe as `parse` does, after all checks.

    Everything that can be wrong before the stages have run is an error here. A stage whose model
    comes from another is checked with the model that the chain begins with.

    Args:
        shows: also print what each stage would do.
    """
    configs = parse(recipe)
    first_models: dict[str, config.ModelConfig] = {}
    for stage in recipe.stages:
        with named(f"stage {stage.name}"):
            parsed = configs[stage.name]
            path = parsed.model.path
            model_of = {str(recipe.run_dir / name / "model"): name for name in stage.needs}
            first = first_models[model_of[path]] if path in model_of else parsed.model
            first_models[stage.name] = first
            if stage.keep is not None:
                check_filter(parsed, stage.keep)
            if not stage.reads_only_models:
                check = "checked when the stages that it reads have run"
            else:
                model = replace(parsed.model, path=first.path, random_init=first.random_init)
                examine(replace(parsed, model=model), stage.keep)
                check = "checked"
        if shows:
            print(f"stage {stage.name}: {shlex.join(stage.argv)}\n  {check}")
    for name in recipe.evaluations:
        with named(f"evaluation {name}"):
            parsed = configs[f"{name}:"]
            count = len(answers.problems_of(parsed, is_whole=True))
            if parsed.evaluation_reward is None and not parsed.environment:
                raise compose.without_judgment("reward")
        if shows:
            print(f"evaluation {name}: {count} problems, reward {parsed.evaluation_reward}")
    return configs


def parse(recipe: Recipe) -> dict[str, ExperimentConfig]:
    """Return the configuration of each stage, and of each evaluation by its name with a colon."""
    configs: dict[str, ExperimentConfig] = {}
    for stage in recipe.stages:
        with named(f"stage {stage.name}"):
            configs[stage.name] = config.parse(stage.argv)
    for name, argv in recipe.evaluations.items():
        with named(f"evaluation {name}"):
            configs[f"{name}:"] = config.parse(argv)
    return configs


def examine(config: ExperimentConfig, keep: Keep | None) -> None:
    """Check a stage as its run does before it begins."""
    if keep is not None:
        config = without_batches(config)
    for warning in preflight.check(config, needs_weights=False):
        print(f"warning: {warning}", file=sys.stderr)


def without_batches(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration of a filter, whose rows need not fill a batch."""
    return replace(config, batch=replace(config.batch, prompts=1, num_minibatches=1))


def check_filter(config: ExperimentConfig, keep: Keep) -> None:
    """Raise InputError if a filter stage cannot choose."""
    if task_of(config.data) is not None and not keep.prompts:
        raise InputError(
            "the task makes prompts without end", where="keep: prompts", fix="say how many"
        )
    if not config.reward and not config.environment:
        raise compose.without_judgment("reward")
    if keep.columns:
        written_prompts.load(keep.columns)
    others = {"--environment": ONE_TURN, "--agent": ONE_TURN}
    config_checks.refuse_with("a stage with `keep`", config, others)
    if keep.rows == "pairs":
        others = {"--batch.group-size 1": "a pair needs two completions"}
        config_checks.refuse_with("a stage that keeps pairs", config, others)


def run_all(
    recipes: Sequence[Recipe], configs: Sequence[dict[str, ExperimentConfig]], command: str
) -> None:
    """Run a recipe, or the same recipe with several seeds, and write the reports."""
    tables = []
    for recipe, parsed in zip(recipes, configs, strict=True):
        # Other seeds may run at the same time, in processes of their own.
        with lock.hold(recipe.run_dir):
            table = run_recipe(recipe, parsed, command)
            recipe_report.write(recipe, table)
        tables.append(table)
    if recipes[0].run_dir != recipes[0].start_dir:
        recipe_report.write_seeds(recipes, tables)


def run_recipe(
    recipe: Recipe, configs: dict[str, ExperimentConfig], command: str
) -> recipe_report.Table:
    """Run the stages that have not run yet, and return the answers of their models."""
    started = recipe.stages[0]
    begins_at = configs[started.name].model
    table: recipe_report.Table = {}
    if begins_at.path is not None and not begins_at.random_init:
        table[START] = measure(recipe, configs, START, begins_at.path)
    for number, stage in enumerate(recipe.stages, start=1):
        stage_config = configs[stage.name]
        print(f"stage {number} of {len(recipe.stages)}: {stage.name}", flush=True)
        with named(f"stage {stage.name}"):
            if stage.keep is not None:
                filter_rows(stage_config, stage.keep)
                continue
            run.start(stage_config, command, partial(run.leave_at_once, command))
        jax.clear_caches()
        is_policy = roles.main_role(stage_config.algorithm) == "policy"
        if is_policy and roles.reading(stage_config.algorithm) is None:
            model = str(Path(stage_config.run_dir) / "model")
            table[stage.name] = measure(recipe, configs, stage.name, model)
    return table


# --- filters ---


def filter_rows(config: ExperimentConfig, keep: Keep) -> None:
    """Sample completions of the stage's prompts, and write the rows to keep to rows.jsonl.

    Chunks of prompts are sampled and written one after the other, so that a filter that was killed
    goes on. What a chunk draws depends on the seed and on its number only. Raises InputError if the
    folder has rows of other settings, or no row is left.
    """
    folder = Path(config.run_dir)
    stage = answers.identity(config, str(config.model.path))
    # Filters without columns are those of before there were any.
    rule = {name: value for name, value in asdict(keep).items() if value or name != "columns"}
    settings = {"stage": stage, "keep": rule}
    text = json.dumps(settings, sort_keys=True)
    summary = run_files.read_json(folder / recipe_report.SUMMARY)
    known = folder / "settings.json"
    if known.exists() and known.read_text(encoding="utf-8") != text:
        raise InputError(
            "the folder has rows that other settings kept",
            where=str(folder),
            fix="use another run-dir in the recipe, or the settings of before",
        )
    if summary and (folder / ROWS).exists():
        print(f"these rows are kept: {folder / ROWS}, {summary['kept']} of them")
        return
    folder.mkdir(parents=True, exist_ok=True)
    run_files.write_text(known, text)
    preflight.prepare(without_batches(config))
    language, params = answers.load_model(str(config.model.path), config)
    tokenizer = language.tokenizer
    rows = tasks.usable_rows(
        config.data,
        config.algorithm.experience,
        tokenizer,
        seed=config.seed,
        num_held_out=config.evaluation.rows,
        max_prompt_tokens=config.sampling.max_prompt_tokens,
    )
    count = min(keep.prompts or len(rows), len(rows))
    group = config.batch.group_size
    settings_of_sampler = sampler_config(config.sampling, tokenizer, group)
    functions = registry.reward_functions(
        config.reward_names, config.reward_limits, config.allow_unsandboxed_code
    )
    terms = registry.displayed(config.reward_terms)
    scorer = Scorer(tokenizer, functions, config.reward_limits.fault_share, terms)
    if keep.concepts and (lacking := [i for i in range(count) if not rows[i].get(keep.concepts)]):
        raise InputError(
            f"a row has no `{keep.concepts}`",
            where=f"keep: concepts, row {lacking[0] + 1}",
            fix="name the concept of each row, or leave out `concepts`",
        )
    for number, first in enumerate(range(0, count, keep.chunk)):
        path = folder / "chunks" / f"{number}.jsonl"
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        chunk = [dict(rows[i]) for i in range(first, min(first + keep.chunk, count))]
        scored = answers.sample(
            config,
            language,
            params,
            chunk,
            settings_of_sampler,
            scorer,
            Purpose.ROLLOUT,
            step=number,
            seed=config.seed,
        )
        kept_rows, numbers = choose(chunk, scored, keep)
        answers.write_lines(path, [numbers, *kept_rows])
        print(f"  {first + len(chunk)} of {count} prompts: {json.dumps(numbers)}", flush=True)
    join_chunks(folder, -(-count // keep.chunk), keep)


def join_chunks(folder: Path, count: int, keep: Keep) -> None:
    """Write rows.jsonl and the summary of a filter from its chunks."""
    totals: dict[str, int] = {}
    lines: list[str] = []
    for number in range(count):
        text = (folder / "chunks" / f"{number}.jsonl").read_text(encoding="utf-8")
        first, *rest = text.splitlines()
        lines += rest
        for name, value in json.loads(first).items():
            totals[name] = totals.get(name, 0) + value
    if keep.concepts:
        lines = weakest(lines, totals, keep)
        totals["kept"] = len(lines)
    if keep.rows == "written" and not keep.duplicates:
        lines = written_prompts.once(lines)
        totals["kept"] = len(lines)
    if not lines:
        raise InputError(
            "the filter kept no row",
            where=str(folder),
            why=json.dumps(totals),
            fix="lower keep: min-reward, or widen pass-rate, in a new run-dir",
        )
    content = "".join(f"{line}\n" for line in lines)
    run_files.write_text(folder / ROWS, content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    run_files.write_text(folder / recipe_report.SUMMARY, json.dumps(totals | {"sha256": digest}))
    print(f"done: {folder / ROWS}, {totals['kept']} rows")


PASSING = "passing of "
JUDGED = "judged of "
"""The beginning of the names of counts of concepts, before the concept."""


def weakest(lines: list[str], totals: dict[str, int], keep: Keep) -> list[str]:
    """Return the rows of the concepts of which the smallest share passes (SwS, arXiv 2506.08989).

    `totals` has the counts of all concepts, also of prompts that were not kept. SwS mines prompts
    that a pilot run did not learn, and lets a model write new ones; here the model's pass rate of
    now decides, and the rows are those that are there.
    """
    judged = {
        name.removeprefix(JUDGED): number
        for name, number in totals.items()
        if name.startswith(JUDGED) and number
    }
    rates = {name: totals[PASSING + name] / number for name, number in judged.items()}
    chosen = sorted(rates, key=lambda name: (rates[name], name))[: keep.weakest]
    print("weakest: " + ", ".join(f"{name} {100 * rates[name]:.0f} %" for name in chosen))
    return [line for line in lines if str(json.loads(line)[keep.concepts]) in chosen]


def choose(rows: list[Row], scored: Scored, keep: Keep) -> tuple[list[Row], dict[str, int]]:
    """Return (the rows to keep, counts of what was sampled, judged, passing and kept).

    Args:
        scored: the completions, those of a prompt beside each other. A completion whose reward is
            NaN is never kept. One that is to be a prompt has ended by itself.
    """
    group = len(scored.completions) // len(rows)
    rewards = [float(reward) for reward in scored.rewards]
    judged = [i for i, reward in enumerate(rewards) if reward == reward]
    passing = [i for i in judged if rewards[i] >= keep.min_reward]
    written: dict[int, dict[str, Any]] = {}
    if keep.rows == "written":
        passing = [i for i in passing if not scored.rollout.truncated[i]]
        asking = [rows[i // group] for i in passing]
        columns = written_prompts.columns_of(keep, asking, scored, passing)
        written = {i: known for i, known in zip(passing, columns, strict=True) if known is not None}
        passing = list(written)
    numbers = {"prompts": len(rows), "sampled": len(rewards)}
    numbers |= {"judged": len(judged), "passing": len(passing)}
    chosen: list[Row] = []
    for index, row in enumerate(rows):
        known, right = ([i for i in some if i // group == index] for some in (judged, passing))
        if keep.concepts:
            concept = str(row[keep.concepts])
            for name, found in ((JUDGED, known), (PASSING, right)):
                numbers[name + concept] = numbers.get(name + concept, 0) + len(found)
        rate = len(right) / len(known) if known else 0.0
        if not known or not keep.pass_rate[0] <= rate <= keep.pass_rate[1]:
            continue
        if keep.rows == "prompts":
            chosen.append(row | {"pass_rate": rate})
            continue
        plain = {name: value for name, value in row.items() if name not in NOT_KEPT}
        if keep.rows == "pairs":
            pair = pair_of(scored, known, right, keep)
            if pair is not None:
                ended = [side.ended for side in pair]
                better, worse = (answer(row, side.text) for side in pair)
                stated = {"ended": ended} if keep.step_end or not all(ended) else {}
                chosen.append(plain | {"chosen": better, "rejected": worse} | stated)
            continue
        seen: list[str] = []
        for i in sorted(right, key=lambda i: (-rewards[i], i)):
            text = str(written.get(i, {}).get("prompt", scored.completions[i]))
            if 0 < keep.max_per_prompt <= len(seen):
                break
            if text in seen and not keep.duplicates:
                continue
            seen.append(text)
            if i in written:
                chosen.append(written[i] | {"prompt": written_prompts.as_prompt(row, text)})
            else:
                cut = {"ended": False} if scored.rollout.truncated[i] else {}
                kept = {"completion": answer(row, text), "reward": rewards[i]}
                chosen.append(plain | kept | cut)
    return chosen, numbers | {"kept": len(chosen)}


class Beginning(NamedTuple):
    """The beginning of a completion."""

    text: str
    ended: bool
    """True if it is the whole completion, which ended by itself."""


def pair_of(
    scored: Scored, judged: Sequence[int], passing: Sequence[int], keep: Keep
) -> tuple[Beginning, Beginning] | None:
    """Return a better and a worse completion of a prompt: the best and the worst of all judged.

    With `keep.step_end`, a passing and a failing one up to the first step in which they differ: the
    two with the most equal steps before, the first of those. A step that the length limit cuts is
    none. None if there is no such pair, or its rewards differ too little.
    """
    rewards = scored.rewards
    cut = scored.rollout.truncated
    if not keep.step_end:
        ranked = sorted(judged, key=lambda i: (-rewards[i], i))
        best = ranked[0]
        worst = ranked[-1]
        gap = float(rewards[best]) - float(rewards[worst])
        if gap <= 0 or gap < keep.gap:
            return None
        better, worse = (Beginning(scored.completions[i], not cut[i]) for i in (best, worst))
        return better, worse
    failing = [i for i in judged if i not in passing]
    steps = {i: _steps(scored.completions[i], keep.step_end) for i in judged}
    longest = -1
    pair = None
    for i, j in itertools.product(passing, failing):
        equal = sum(1 for _ in itertools.takewhile(bool, map(eq, steps[i], steps[j])))
        better, worse = (
            Beginning("".join(steps[k][: equal + 1]), equal + 1 >= len(steps[k])) for k in (i, j)
        )
        is_cut = (better.ended and cut[i]) or (worse.ended and cut[j])
        differs = better != worse and rewards[i] - rewards[j] >= keep.gap
        if equal > longest and differs and not is_cut:
            longest = equal
            pair = (better, worse)
    return pair


def _steps(text: str, end: str) -> list[str]:
    """Return the steps of a text, each with its end."""
    return re.findall(f".*?{re.escape(end)}|.+", text, re.DOTALL)


def answer(row: Row, text: str) -> Any:
    """Return a completion in the form of its prompt: a text, or messages."""
    return text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]


# --- the table ---


def measure(
    recipe: Recipe, configs: dict[str, ExperimentConfig], stage: str, model: str
) -> dict[str, Answers]:
    """Return the answers of a model to each set of problems, from its files if they are there."""
    measured: dict[str, Answers] = {}
    loaded = None
    for name in recipe.evaluations:
        settings = replace(configs[f"{name}:"], run_dir="")
        folder = recipe.start_dir if stage == START else recipe.run_dir
        path = folder / recipe_file.EVALUATIONS / f"{stage}--{name}.jsonl"

        def answer(settings: ExperimentConfig = settings) -> Answers:
            nonlocal loaded
            if loaded is None:
                loaded = answers.load_model(model, settings)
            rows = answers.problems_of(settings, is_whole=True)
            return answers.evaluate(settings, *loaded, rows)

        with named(f"evaluation {name} of {stage}"):
            measured[name] = answers.kept(path, answers.identity(settings, model), answer)
        print(f"  {name}: {markdown.of(measured[name].estimate())}", flush=True)
    return measured
