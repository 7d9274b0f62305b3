"""Measure a model on held-out rows: pass@1, greedy, pass@k, majority votes, rewards and loss.

    python launch/evaluate.py MODEL_OR_RUN_DIR [--preset PRESET] [--data.path FILE]
        [--reward NAME ...] [--samples K] [--judge REWARD]
    python launch/evaluate.py MODEL_OR_RUN_DIR --tasks TASK ... [--rows N]
    python launch/evaluate.py MODEL_OR_RUN_DIR --guide Q_RUN_DIR [--kl-coef 1 0.1] [--baseline cd]

Of a run folder, the newest checkpoint is evaluated, by default on the run's own held-out rows: by
answers that rewards judge, by the loss of demonstrations, or by the ranking of given pairs. A model
is a directory, a hub id or builtin:arithmetic. Intervals are 95 %, over problems or rows. With
--tasks, public benchmarks of lm-evaluation-harness are measured in place of these. With --guide,
the q of a Q# run guides the model at each coefficient. The KL is over the whole vocabulary, before
any truncation.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_rl import models, ranges, sampler
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import compose, evaluators, held_out_judges, micro_batches, roles, stages
from tpu_rl.commands import config as configuration
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.config import DEFAULT_PRESET, ExperimentConfig, FileData, MeshConfig
from tpu_rl.commands.evaluate import evaluate_q_sharp
from tpu_rl.commands.flags import flag_names
from tpu_rl.commands.recipe import answers
from tpu_rl.commands.saved_run import load_language, load_run, trained_length
from tpu_rl.commands.sources import of_pairs
from tpu_rl.data import Row
from tpu_rl.errors import InputError, reported, typed_command
from tpu_rl.evaluation import answer_accuracy, calibration, held_out_loss
from tpu_rl.evaluation.answer_accuracy import Evaluation
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.experience import text_log_probs
from tpu_rl.experience.config import DataFormat, sampler_config
from tpu_rl.experience.rows import tasks
from tpu_rl.ranges import Conflicts, Count, In, Needs, Positive
from tpu_rl.rewards import answer_readers, registry
from tpu_rl.rollout.engine import Decoding, Scorer, make_engine
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.runtime import compilation_cache
from tpu_rl.sampler.text_scores import Score
from tpu_rl.studies import entropy, guided_accuracy, harness, model_kl, step_search
from tpu_rl.studies.step_search import StepSearch
from tpu_rl.tokenizers import TokenizerConfig, require_same_tokens
from tpu_rl.types import Params, Policy, Purpose

FILE_PRESET = "grpo"
"""The preset for a model and --data.path, if no preset is named: it suits no data in particular."""
FILE_REWARD = "gsm8k"
"""The reward for a model and --data.path whose rows have a column `answer`, if none is named."""


OF_PATH = Needs("path", why="it describes the data of --data.path")
NOT_OF_TASKS = (
    *("preset", "data", "images", "reward", "environment", "stop_strings", "samples"),
    *("temperature", "greedy", "max_new_tokens", "judge", "kl_to", "guide", "kl_coef", "baseline"),
    "target_entropy",
)
OWN_DATA = "a task has its own data, prompts and judgment"
MAX_ENTROPY_ROWS = 64
"""Completions whose entropy is measured."""
ONE_NUMBER = "it reports one number for all prompts, of completions that the model alone samples"


@dataclass(frozen=True)
class DataFlags:
    chat: Literal["auto", "always", "never"] | None = None
    """The use of the chat template for prompts that are plain text, as in training. The default is
    the preset's or run's."""
    system: str | None = None
    """System message that begins every conversation that has none. The default is the run's."""
    path: str | None = None
    """Problems to answer: files, a saved dataset, or a name of the hub, as in training. The
    default is the preset's or run's own held-out problems."""
    split: Annotated[str | None, OF_PATH] = None
    """The split of --data.path, if that is a saved dataset or a name of the hub."""
    config: Annotated[str | None, OF_PATH] = None
    """The configuration of --data.path, if that is a name of the hub."""
    format: Annotated[DataFormat | None, OF_PATH] = None
    """The columns of --data.path, as in training: plain has `prompt` and what the reward reads,
    code also `tests`, gsm8k `question` and `answer`, gsm8k_solutions `question` and `ground_truth`.
    The default is that of the preset or run."""
    columns: Annotated[tuple[str, ...] | None, OF_PATH] = None
    """Other names of columns of --data.path, as in training: NAME=COLUMN. The default is the
    preset's or run's."""
    templates: tuple[str, ...] = ()
    """Texts with {prompt} in them. All problems are answered once in each of them, and each has a
    table of its own. The default are the run's, one for each problem."""
    min_pixels: int | None = None
    """The least pixels that images are scaled to, as in training. The default is the run's, or that
    of the model's preprocessor_config.json."""
    max_pixels: int | None = None
    """The most pixels, in the same way."""


@dataclass(frozen=True)
class Flags:
    model: tyro.conf.Positional[str]
    """A run folder, a model directory, or a hub id."""
    preset: str | None = None
    """Use this preset's problems, reward and lengths. The default is the run's own; for a model,
    arithmetic_grpo, or grpo with --data.path."""
    data: DataFlags = DataFlags()
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The default is the run's."""
    images: bool = False
    """Read images with a model directory of Gemma 3 or 4, as --model.images in training."""
    reward: tuple[str, ...] = ()
    """Terms as in training; the mean of each is reported. The first says what is correct if its
    values are 0 and 1, or -1 and 1; others grade. The default are the rewards that the preset or
    run measures; for a model and a file with a column `answer`, gsm8k."""
    environment: str | None = None
    """The environment that answers the model; "" for none. The default is the preset's or run's."""
    stop_strings: tuple[str, ...] | None = None
    """The texts that end a turn. The default are the preset's or run's; with --environment ""
    there are none."""
    rows: Count | None = None
    """The largest number of problems. The default is all of --data.path, or as many as the preset
    or run evaluates."""
    tasks: Annotated[tuple[str, ...], Conflicts(*NOT_OF_TASKS, why=OWN_DATA)] = ()
    """Tasks of lm-evaluation-harness, or YAML files of one task each; needs the extra [lm-eval].
    --rows is then the largest number of examples of a task."""
    apply_chat_template: Annotated[bool, Needs("tasks", why="other data use it anyway")] = False
    """--tasks: ask by conversations, few-shot examples as earlier turns; for instruction-tuned
    models. Otherwise the model continues texts."""
    max_length: Annotated[Annotated[int, In("[2, inf)")] | None, Needs("tasks")] = None
    """--tasks: tokens of a text. The default is what the model was trained for, at most 4096."""
    samples: Count = 1
    """Completions per problem, at --temperature."""
    temperature: Annotated[float, In("(0, inf)", fix="--greedy takes the likeliest token")] = 1.0
    greedy: bool = False
    """Evaluate only the most likely completion of each problem."""
    max_new_tokens: int | None = None
    """The largest number of tokens of a completion. The default is the preset's or run's."""
    judge: Annotated[
        str,
        Conflicts(
            *("greedy", "guide", "samples 1"),
            why="it chooses among sampled answers, of which --samples 8 gives eight",
        ),
    ] = ""
    """A reward or the folder of a reward model. Of the --samples completions, it chooses the best
    one, and weights their votes."""
    search: Annotated[
        Literal["beam", "dvts", "mcts"] | None,
        Needs("judge", why="it scores the beginnings of answers after each step"),
    ] = None
    """Find the --samples completions step by step: after each step --judge keeps the best
    beginnings of a problem (beam), or the best one of each tree (dvts), one of --search-width.
    mcts expands one beginning of a problem at a time, by the judge's mean score below it."""
    search_width: Annotated[int, In("[2, inf)"), Needs("search")] = 4
    """--search: how many continuations of each beginning are sampled; a divisor of --samples."""
    step_end: Annotated[str, Needs("search")] = "\n"
    """--search: the text that ends a step; \\n is a new line."""
    kl_to: Annotated[
        str | None, Conflicts("temperature", "greedy", "search", "data.templates", why=ONE_NUMBER)
    ] = None
    """Report the KL divergence per token of the model to this model or run, on --samples
    completions of each problem at temperature 1."""
    target_entropy: Annotated[
        Positive | None, Conflicts("greedy", "guide", "data.templates", why=ONE_NUMBER)
    ] = None
    """Report the temperature at which the sampled tokens have this mean entropy, in nats."""
    seed: int = 0
    guide: Annotated[str | None, Conflicts("data.templates", why=ONE_NUMBER)] = None
    """A Q# run. Its q guides the model at every --kl-coef, and judges the model's own
    completions."""
    kl_coef: tuple[Annotated[float, In("(0, inf]")], ...] = ()
    """eta, in units of return per nat: small values guide strongly. The default is the run's."""
    candidate_mass: Annotated[Annotated[float, In("(0, 1]")] | None, Needs("guide")] = None
    """With --guide: score only the likeliest candidates that have this share of the model's
    probability together, which is faster. The default is the run's."""
    baseline: tuple[Literal["cd", "fudge"], ...] = ()
    """Also guide by the same q in other ways: controlled decoding (cd), FUDGE."""


@reported
def main(argv: list[str]) -> int:
    flags = tyro.cli(Flags, args=argv, prog=typed_command("evaluate"), description=__doc__)
    flag_names.require_once(flags, argv)
    check(flags)
    config = load_settings(flags)
    if flags.images:
        config = replace(config, model=replace(config.model, images=True))
    tasks_of_harness = harness.load_tasks(flags.tasks) if flags.tasks else None
    compilation_cache.enable()
    if tasks_of_harness is not None:
        report_tasks(flags, config, tasks_of_harness)
        return 0
    if roles.reading(config.algorithm) is not None:
        report_reward_model(flags)
        return 0
    if ranks_pairs(config, flags):
        report_ranking(flags)
        return 0
    rows = held_out(config, flags)
    config = with_judge(with_reward(config, rows, flags), flags)
    language, params = load_language(flags.model, config)
    problems = tasks.problems(rows)
    preflight.note_wrapped_prompts(language.tokenizer, problems[:1])
    demonstrations = [row for row in rows if tasks.brings_text(row)]
    if demonstrations and flags.guide is None:
        estimate = loss(config, language, params, demonstrations)
        show(flags.model, [line_of("loss, nats per token", estimate, ".4f")], n="rows")
    is_judged = config.evaluation_reward is not None or compose.is_judged(config)
    if not is_judged or not problems:
        return 0
    scorer = evaluators.answer_scorer(config, language.tokenizer, problems)
    if flags.guide is not None:
        report_guided(config, language, params, problems, scorer, flags)
        return 0
    score = None if flags.kl_to is None else other_score(flags, config, language)
    for template in flags.data.templates or ("",):
        template_rows = (
            [tasks.with_template(row, (template,)) for row in problems] if template else problems
        )
        results = answer(config, language, params, template_rows, scorer, flags)
        report(f"{flags.model}, {template}" if template else flags.model, flags, scorer, results)
        if score is not None:
            kl = model_kl.per_token(results["sampled"].rollout, score)
            print(
                f"KL({flags.model} || {flags.kl_to}): {kl.value:z.4f} nats per token "
                f"({kl.low:z.4f} to {kl.high:z.4f}, {kl.n} problems)"
            )
        if flags.target_entropy is not None:
            rollout = jax.tree.map(lambda x: x[:MAX_ENTROPY_ROWS], results["sampled"].rollout)
            with jax.set_mesh(compose.make_mesh(MeshConfig())):
                entropy_at = entropy.entropy_of(language.model, params, rollout)
                temperature = entropy.temperature_for(entropy_at, flags.target_entropy)
                now = entropy_at(flags.temperature)
            print(
                f"entropy {now:.3f} at temperature {flags.temperature:g}, "
                f"{flags.target_entropy:g} at {temperature:.3f}"
            )
    return 0


def check(flags: Flags) -> None:
    """Check the flags before anything is loaded.

    Raises InputError if one is out of range, or they do not go together.
    """
    ranges.check_all(flags)
    for template in flags.data.templates:
        if "{prompt}" not in template:
            raise InputError(
                f"the template {template!r} has no place for a prompt",
                where="--data.templates",
                fix="write {prompt} into each template",
            )
    if flags.search and (flags.samples % flags.search_width or not flags.step_end):
        raise InputError(
            f"--search {flags.search} with --samples {flags.samples} and --search-width "
            f"{flags.search_width}",
            where="--search, --step-end",
            why="--judge keeps samples / width beginnings of each problem, and each goes on in "
            "`width` ways to the next --step-end",
            fix="use --judge PROCESS_REWARD_MODEL --samples 16 --search-width 4, and a text",
        )


def load_settings(flags: Flags) -> ExperimentConfig:
    """Return the configuration that has the data, the reward and the lengths to use."""
    config = load_base_settings(flags)
    if flags.tokenizer != TokenizerConfig():
        config = replace(config, tokenizer=flags.tokenizer)
    stop_strings = () if flags.environment == "" else config.sampling.stop_strings
    if flags.stop_strings is not None:
        stop_strings = flags.stop_strings
    config = replace(
        config,
        environment=config.environment if flags.environment is None else flags.environment,
        sampling=replace(config.sampling, stop_strings=stop_strings),
    )
    data = flags.data
    settings = {
        "chat": data.chat,
        "system": data.system,
        "min_pixels": data.min_pixels,
        "max_pixels": data.max_pixels,
    }
    changes = {name: value for name, value in settings.items() if value is not None}
    if flags.data.templates and isinstance(config.data, FileData):
        bare = replace(config.data, templates=(), evaluation_templates=())
        config = replace(config, data=bare)
    if not changes:
        return config
    if not isinstance(config.data, FileData):
        raise InputError(
            "these problems are plain texts",
            where=", ".join(f"--data.{name}" for name in changes).replace("_", "-"),
            why="they are made by a task, not read from a file",
            fix="leave it out, or use a preset that reads a file",
        )
    return replace(config, data=replace(config.data, **changes))


def load_base_settings(flags: Flags) -> ExperimentConfig:
    """Return the configuration of the run or preset."""
    if flags.preset is None:
        for run_dir in filter(None, (flags.model, flags.guide)):
            if remote_run.is_run(run_dir):
                return configuration.load(remote_run.fetch(run_dir) / "config.yaml")
    default = FILE_PRESET if flags.data.path else DEFAULT_PRESET
    return configuration.preset(flags.preset or default)


def held_out(config: ExperimentConfig, flags: Flags) -> list[Row]:
    """Return the problems. Raises InputError if there are none."""
    spec = config.algorithm.experience
    if flags.data.path is not None:
        files = config.data if isinstance(config.data, FileData) else FileData()
        # A configuration of the run is that of the run's own data.
        split = flags.data.split
        columns = files.columns if flags.data.columns is None else flags.data.columns
        files = replace(files, format=flags.data.format or files.format, config=flags.data.config)
        files = replace(files, columns=columns)
        return tasks.rows_of_set(files, flags.data.path, flags.rows, split)
    count = config.evaluation.rows
    # The last rows of a file are held out as the run did it, whatever --rows says.
    is_split = isinstance(config.data, FileData) and config.data.evaluation_path is None
    if flags.rows is not None and not is_split:
        count = flags.rows
    rows = tasks.evaluation_rows(config.data, spec, count)[: flags.rows]
    if not rows:
        raise InputError(
            "there are no held-out problems", where="--rows, --data.path", fix="give --data.path"
        )
    if len(rows) < (flags.rows or 0):
        print(f"note: {len(rows)} problems are held out, not {flags.rows}", file=sys.stderr)
    return rows


def with_reward(config: ExperimentConfig, rows: list[Row], flags: Flags) -> ExperimentConfig:
    """Return the configuration with the rewards to measure. Demonstrations need none.

    Raises InputError if there is none, and nothing else to measure.
    """
    if flags.reward:
        measures = replace(config.evaluation, reward=None, metrics=())
        return replace(config, reward=flags.reward, evaluation=measures)
    if config.evaluation_reward is not None or compose.is_judged(config):
        return config
    if any(map(tasks.brings_text, rows)):
        return config
    if flags.data.path is not None and all("answer" in row for row in rows):
        print(
            f"note: the reward {FILE_REWARD} compares final numbers with the column `answer`; "
            "--reward names another",
            file=sys.stderr,
        )
        return replace(config, reward=(FILE_REWARD,))
    raise compose.without_judgment()


def with_judge(config: ExperimentConfig, flags: Flags) -> ExperimentConfig:
    """Return the configuration that also measures the reward of --judge.

    Raises InputError if nothing says what is correct.
    """
    if not flags.judge or flags.judge in config.evaluation_rewards:
        return config
    if config.evaluation_reward is None:
        raise compose.without_judgment("--judge")
    metrics = (*config.evaluation.metrics, flags.judge)
    return replace(config, evaluation=replace(config.evaluation, metrics=metrics))


def loss(
    config: ExperimentConfig, language: roles.Language, params: Params, rows: list[Row]
) -> Estimate:
    """Return the loss of demonstrations under the model, in nats per token."""
    mesh = compose.make_mesh(MeshConfig())
    role = models.role(language.model, lambda tree: tree)
    batch = micro_batches.fit_micro_batch(config, mesh).batch
    batch = replace(batch, num_minibatches=1)
    max_length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    with jax.set_mesh(mesh):
        log_probs = text_log_probs.text_log_probs(role, batch, mesh, "none")
        return held_out_loss.held_out_loss(log_probs, rows, language.tokenizer, max_length)(params)


def answer(
    config: ExperimentConfig,
    language: roles.Language,
    params: Params,
    problems: list[Row],
    scorer: Scorer,
    flags: Flags,
) -> dict[str, Evaluation]:
    """Return the evaluations "greedy" and "sampled"; with --greedy, only the former."""
    greedy = sampler.SamplerConfig(
        max_new_tokens=flags.max_new_tokens or config.sampling.max_new_tokens,
        temperature=0,
        stop_ids=language.tokenizer.eos_ids,
        pad_id=language.tokenizer.pad_id,
        max_num_seqs=max(config.sampling.slots, flags.samples),
    )
    settings = {"greedy": greedy}
    if not flags.greedy:
        settings["sampled"] = replace(
            greedy, temperature=flags.temperature, samples_per_prompt=flags.samples
        )
    readers = answer_readers(config.evaluation_reward)
    results = {}
    for name, sampler_settings in settings.items():
        decoding = answers.decoding(
            config, language, sampler_settings, Purpose.EVALUATION, flags.seed
        )
        engine = compose.engine(config, decoding, scorer)
        if name == "sampled" and flags.search:
            engine = step_search.engine(decoding, scorer, search_of(config, flags))
        results[name] = answer_accuracy.evaluate(engine, params, problems, readers)
    return results


def require_single_turns(config: ExperimentConfig, flag: str, why: str) -> None:
    """Raise InputError if completions are conversations or have limits of thoughts."""
    if config.converses or evaluators.limited(config.sampling.thinking).is_on:
        raise InputError(
            f"{flag} with conversations or limits of thoughts",
            where=flag,
            why=why,
            fix=f'add --environment "", or leave out {flag}',
        )


def search_of(config: ExperimentConfig, flags: Flags) -> StepSearch:
    """Return the search that the flags ask for.

    Raises InputError if completions are conversations or have limits of thoughts.
    """
    assert flags.search is not None
    require_single_turns(config, "--search", "a search continues the text of one answer")
    judge = registry.display_name(flags.judge)
    step_end = flags.step_end.replace("\\n", "\n")
    return StepSearch(judge, flags.search, flags.search_width, step_end)


def report_guided(
    config: ExperimentConfig,
    language: roles.Language,
    params: Params,
    problems: list[Row],
    scorer: Scorer,
    flags: Flags,
) -> None:
    """Print and record the model alone, guided at each coefficient, and judged by q."""
    assert flags.guide is not None
    guided, kl_coef = evaluate_q_sharp.load(flags.guide, language, params, flags.candidate_mass)
    settings = sampler_config(config.sampling, language.tokenizer, flags.samples)
    settings = replace(
        settings,
        max_new_tokens=flags.max_new_tokens or settings.max_new_tokens,
        temperature=flags.temperature,
        max_num_seqs=max(settings.max_num_seqs, flags.samples),
    )
    mesh = compose.make_mesh(MeshConfig())
    readers = answer_readers(config.evaluation_reward)

    def answer_with(policy: Policy, params: Params) -> Evaluation:
        decoding = Decoding(
            RolloutPolicy(policy, lambda tree: tree, mesh),
            settings,
            settings.prompt_length or answer_accuracy.ANY_LENGTH,
            flags.seed,
            Purpose.EVALUATION,
        )
        engine = make_engine(decoding, scorer)
        return answer_accuracy.evaluate(engine, params, problems, readers)

    kl_coefs = flags.kl_coef or (kl_coef,)
    with jax.set_mesh(mesh):
        lines, judged = guided_accuracy.sweep(
            guided, answer_with, settings, kl_coefs, flags.baseline
        )
    evaluate_q_sharp.record(flags.guide, lines, judged)
    title = f"{flags.model} guided by {flags.guide}"
    evaluate_q_sharp.report(title, lines, judged, flags.samples)


def report(title: str, flags: Flags, scorer: Scorer, results: dict[str, Evaluation]) -> None:
    """Print a table of all measures, and errors of the rewards."""
    lines = [share_line(name, estimate) for name, estimate in measures(flags, results)]
    for name, result in results.items():
        for reward, estimate in mean_rewards(scorer, result).items():
            lines.append(line_of(f"mean {reward}, {name}", estimate, ".3g"))
    show(title, lines)
    console = Console()
    for name, result in results.items():
        formed = "well formed" if result.reads_answers else "ended"
        console.print(
            f"{name}: {100 * result.well_formed:.1f} % {formed}, "
            f"{result.mean_length:.1f} tokens on average"
        )
        if result.calibration is not None:
            console.print(calibration.as_text(name, result.calibration), markup=False)
        for error in result.errors[:3]:
            console.print(f"{name}, not scored: {error}", style="yellow", markup=False)
    for note in judge_notes(flags, results):
        console.print(note, style="yellow", markup=False)


Line = tuple[str, str, str, str]
"""A line of a table: its name, a value, the value's interval, and of how many."""


def show(title: str, lines: Iterable[Line], value: str = "value", n: str = "problems") -> None:
    """Print a table; `value` and `n` are the heads of its columns."""
    table = Table("", value, "95 % interval", n, title=escape(title))
    for line in lines:
        table.add_row(*map(escape, line))
    Console().print(table)


def share_line(name: str, estimate: Estimate) -> Line:
    """Return a line of a share, in percent."""
    value, low, high = (f"{100 * share:.1f}" for share in estimate[:3])
    return name, f"{value} %", f"{low} to {high}", str(estimate.n)


def line_of(name: str, estimate: Estimate, form: str) -> Line:
    """Return a line of an estimate in a number format. Its interval is "none" if it has no ends."""
    value, low, high = (f"{number:{form}}" for number in estimate[:3])
    limits = f"{low} to {high}" if math.isfinite(estimate.low) else "none"
    return name, value, limits, str(estimate.n)


def judge_notes(flags: Flags, results: dict[str, Evaluation]) -> list[str]:
    """Return notes about --judge that have no place in the table."""
    if not flags.judge:
        return []
    if any(result.is_graded for result in results.values()):
        return [
            "note: the choices of --judge are not reported: the first reward grades answers, and "
            "does not say which are right"
        ]
    judge = registry.display_name(flags.judge)
    problems = results["sampled"].problems
    values = [[value for value in p.parts[judge] if math.isfinite(value)] for p in problems]
    count = values.count([])
    return [f"note: --judge has no value for {count} of {len(values)} problems"] if count else []


def other_score(flags: Flags, config: ExperimentConfig, language: roles.Language) -> Score:
    """Return a function that scores texts by the model of --kl-to.

    Raises InputError if it reads other tokens, or completions are more than one turn of the model.
    """
    assert flags.kl_to is not None
    require_single_turns(config, "--kl-to", "it is measured on turns that the model alone writes")
    directory = Path(answers.address_of(flags.kl_to))
    require_same_tokens(language.tokenizer, directory, "--kl-to")
    other, params = load_language(flags.kl_to, config)
    role = models.role(other.model, lambda tree: tree)
    return functools.partial(sampler.text_scorer(role, compose.make_mesh(MeshConfig())), params)


def mean_rewards(scorer: Scorer, result: Evaluation) -> dict[str, Estimate]:
    """Return the mean of each reward, if there are several or the only one is graded."""
    further = evaluators.further_rewards(scorer, result)
    return further or ({"reward": result.reward} if result.is_graded else {})


def report_tasks(flags: Flags, config: ExperimentConfig, tasks_of_harness: Any) -> None:
    """Print a table of all measures of tasks of lm-evaluation-harness."""
    language, params = load_language(flags.model, config)
    mesh = compose.make_mesh(MeshConfig())
    model = language.model
    length = flags.max_length or trained_length(flags.model, config)
    model.config.require_length(length, "--max-length")
    if flags.apply_chat_template:
        harness.require_chat_template(language.tokenizer)
    scorer = sampler.text_scorer(models.role(model, lambda tree: tree), mesh)
    measured = harness.evaluate(
        harness.HarnessModel(
            models.policy(model),
            params,
            mesh,
            functools.partial(scorer, params),
            language.tokenizer,
            model.config.vocab.size,
            length,
        ),
        tasks_of_harness,
        flags.rows,
        flags.seed,
        flags.apply_chat_template,
    )
    lines = [line_of(name, estimate, ".4g") for name, estimate in measured.items()]
    show(flags.model, lines, n="examples")


def report_reward_model(flags: Flags) -> None:
    """Print how a run's reward model judges what was held out, beside simple rules."""
    context, params, step = load_run(flags.model)
    print(f"{flags.model}, step {step}")
    run_stages = stages.of_run(context.config, context.run_dir, step)
    stage = next(stage for stage in run_stages if step <= stage.last)
    with jax.set_mesh(context.mesh):
        lines = held_out_judges.held_out_judge(context, stage, params)(params, True)
    named = {name.replace("_", " ") or "reward model": share for name, share in lines.items()}
    show(flags.model, [share_line(*line) for line in named.items()], "accuracy")


def ranks_pairs(config: ExperimentConfig, flags: Flags) -> bool:
    """Return True if the model is a run that learns from given pairs, and nothing else is asked."""
    asks = flags.reward or flags.data.path or flags.preset or flags.guide
    spec = config.algorithm.experience
    return not asks and spec.source == "pairs" and spec.sampled_by is None


def report_ranking(flags: Flags) -> None:
    """Print how a run's policy ranks held-out pairs, or judged completions, beside a rule."""
    context, params, step = load_run(flags.model)
    print(f"{flags.model}, step {step}")
    stage = stages.of_run(context.config, context.run_dir, step)[-1]
    given = of_pairs.require_pairs(context.config, context.language.tokenizer)
    if not given.held_out:
        raise InputError("the run held out no pairs", where=flags.model, fix="give --reward")
    with jax.set_mesh(context.mesh):
        algorithm = compose.build_algorithm(context, stage)
        to_pairs = of_pairs.trained_pairs(context, stage)
        measured = held_out_judges.ranking(context, stage, algorithm, given, to_pairs)(params)
    if not measured:
        return  # A note has said why.
    lines = []
    for prefix, label in (("eval/", "policy"), ("eval/length_only_", "length only")):
        names = ("accuracy", "accuracy_low", "accuracy_high", "n")
        if f"{prefix}accuracy" in measured:
            value, low, high, n = (measured[f"{prefix}{name}"] for name in names)
            lines.append(share_line(label, Estimate(value, low, high, int(n))))
    show(flags.model, lines, "ranked as labeled", "n")


def measures(flags: Flags, results: dict[str, Evaluation]) -> list[tuple[str, Estimate]]:
    """Return (name, estimate) for each line of the table."""
    lines = []
    greedy = results["greedy"]
    if any(result.is_graded for result in results.values()):
        return []  # Nothing says which answers are right; `report` prints the mean rewards.
    if "sampled" in results:
        sampled = results["sampled"]
        powers = [2**exponent for exponent in range(flags.samples.bit_length())]
        lines += [
            (
                f"pass@{k}, temperature {flags.temperature:g}",
                answer_accuracy.pass_at(sampled.problems, k),
            )
            for k in sorted({1, flags.samples, *powers})
        ]
        if flags.samples > 1 and sampled.reads_answers:
            lines.append((f"maj@{flags.samples}", answer_accuracy.majority_vote(sampled.problems)))
        if flags.judge:
            judge = registry.display_name(flags.judge)
            scores, weights = answer_accuracy.judged(sampled.problems, judge)
            best = answer_accuracy.best_of(sampled.problems, scores)
            lines.append((f"best of {flags.samples} by {judge}", best))
            if sampled.reads_answers:
                vote = answer_accuracy.weighted_vote(sampled.problems, weights)
                lines.append((f"votes weighted by {judge}", vote))
    return [*lines, ("greedy", greedy.accuracy)]
