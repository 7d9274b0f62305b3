"""Set models and runs side by side: paired on problems, and over seeds.

    python launch/compare.py A B [C ...] [-- PRESET|METHOD --flags] [-- ...]
    python launch/compare.py grpo=RUN0,RUN1,RUN2 ppo=RUN3,RUN4,RUN5 --metric eval/accuracy
    python launch/compare.py A [B ...] --memorized -- PRESET|METHOD --flags -- PRESET|METHOD --flags
    python launch/compare.py --replay RUN [--to RUN_DIR]

A is a run folder, a model directory, a hub id, builtin:NAME, or a file of answers that an earlier
comparison or a recipe kept. NAME=A,B,C are the seeds of one method. After each `--` come flags of
launch/run.py that describe a set of problems; without any, the held-out problems of the first run
are the set. With --metric nothing is sampled: the last value of a metric of each run is its score.
Tables are printed; --to FILE.md also writes them.

With --memorized, row i of the second set of problems is a variant of row i of the first, and each
model gets a memorization score.

--replay prints the versions, the commit and the command of a run. With --to it executes the
command, in another run folder, and compares the digests.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from tpu_rl import ranges, run_files
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import config, finish
from tpu_rl.commands.config import DEFAULT_PRESET, ExperimentConfig
from tpu_rl.commands.recipe import answers
from tpu_rl.commands.recipe.answers import Answers
from tpu_rl.errors import InputError, did_you_mean, reported, typed_command
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.ranges import Count
from tpu_rl.report import markdown
from tpu_rl.sampler.config import Temperature
from tpu_rl.studies import comparison, memorization

THRESHOLDS = tuple(tenth / 10 for tenth in range(11))
"""Scores at which performance profiles are given."""


@dataclass(frozen=True)
class Flags:
    models: tyro.conf.Positional[tuple[str, ...]] = ()
    """Models, runs, files of answers, or NAME=A,B,C."""
    samples: Count = 1
    """Answers to each problem."""
    temperature: Temperature = 1.0
    """Of the sampler; 0 for the most likely answers."""
    metric: str | None = None
    """Compare the last value of this metric of runs, such as eval/accuracy."""
    to: str | None = None
    """The Markdown file to write; with --replay the run folder of the replay."""
    keep: str | None = None
    """A folder in which answers are kept, and found again."""
    memorized: bool = False
    """Row i of the second set is a variant of row i of the first: how much is memory?"""
    replay: str | None = None
    """A run to replay."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    argv, problems = answers.split(argv)
    flags = tyro.cli(Flags, args=argv, prog=typed_command("compare"), description=__doc__)
    if flags.replay is not None:
        return replay(flags.replay, flags.to)
    check_target(flags.to)
    text = compare(flags, problems)
    print(text)
    if flags.to is not None:
        Path(flags.to).write_text(f"{text}\n", encoding="utf-8")
    return 0


def check_target(to: str | None) -> None:
    """Raise InputError if the file --to cannot be written, before anything is sampled."""
    if to is not None and (Path(to).is_dir() or not Path(to).absolute().parent.is_dir()):
        raise InputError(
            f"{to} cannot be written",
            where="--to",
            why="it is a folder" if Path(to).is_dir() else "its folder does not exist",
            fix="name a file, as in tables.md",
        )


def compare(flags: Flags, problems: list[list[str]]) -> str:
    """Return the comparison as Markdown.

    Raises InputError if there are fewer than two models, or they have no problems in common.
    """
    groups = groups_of(flags.models)
    members = list(dict.fromkeys(itertools.chain(*groups.values())))
    if len(members) < 1 + (not flags.memorized):
        raise InputError("nothing to compare with", where="A B", fix="give two models or runs")
    ranges.check(flags, "--")
    if flags.metric is not None and problems:
        raise InputError(
            "--metric reads the metrics of runs and answers no problems",
            where="--metric, --",
            fix="leave one of them out",
        )
    if flags.memorized and (len(problems) != 2 or any(map(is_file, members))):
        raise InputError(
            f"--memorized with {len(problems)} sets of problems",
            where="--memorized, --",
            why="models answer the originals, which come first, and then their variants",
            fix="write two `--`, each with flags of a set, behind models",
        )
    if flags.metric is not None:
        last = {member: [last_value(member, flags.metric)] for member in members}
        return over_seeds(groups, last, f"last {flags.metric}")
    sets = sets_of(members, problems)
    # A model that is missing is named before the others answer.
    addresses = {member: answers.address_of(member) for member in members if not is_file(member)}
    # Of a run, what it held out; of rows that flags name, all.
    answers_of_sets = [
        answers_of(members, addresses, settings, flags, bool(problems)) for settings in sets
    ]
    if flags.memorized:
        return memorized(*answers_of_sets)
    sections = []
    scores: dict[str, list[float]] = {member: [] for member in members}
    for number, (settings, found) in enumerate(zip(sets, answers_of_sets, strict=True), start=1):
        paired = common(found)
        is_graded = any(item.is_graded for item in paired.values())
        title = f"Problems {number}" if len(sets) > 1 else "Problems"
        reward = settings.evaluation_reward if settings is not None else "as in the files"
        sections.append(f"## {title}: reward {reward}")
        sections.append(beside(paired, is_graded))
        for member, item in paired.items():
            scores[member].append(float(np.nanmean(item.values(is_graded))))
    if any(len(group) > 1 for group in groups.values()):
        sections.append(over_seeds(groups, scores, "mean over problems"))
    return "\n\n".join(sections)


def groups_of(names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return name -> members. A model alone is a group of its own."""
    groups: dict[str, list[str]] = {}
    for text in names:
        # A folder's name may have the sign, too, as in lr=1e-5.
        is_place = Path(text).exists()
        name, equals, members = (text, "", "") if is_place else text.partition("=")
        parts = [text] if is_place else (members if equals else text).split(",")
        group = [member for member in parts if member]
        if not group or name in groups:
            raise InputError(
                f"{text!r} names {'a method twice' if group else 'no model'}",
                where="NAME=A,B,C",
                fix="as in grpo=runs/seed0,runs/seed1",
            )
        groups[name] = group
    return groups


def last_value(run: str, metric: str) -> float:
    """Return the last value of a metric of a run. Raises InputError if it has none."""
    folder = remote_run.fetch(run)
    rows = list(run_files.read_metrics(folder))
    values = [row[metric] for row in rows if row.get(metric) is not None]
    if not values:
        names = sorted(set().union(*rows))
        fix = did_you_mean(metric, names)
        raise InputError(f"the run has no metric {metric}", where=run, fix=fix)
    return float(values[-1])


# --- answers ---


def sets_of(members: list[str], problems: list[list[str]]) -> list[ExperimentConfig | None]:
    """Return the sets of problems; None stands for those of files of answers."""
    if all(is_file(member) for member in members):
        return [None]
    if problems:
        return [config.parse(flags) for flags in problems]
    run = next((member for member in members if remote_run.is_run(member)), None)
    if run is None:
        return [config.parse([DEFAULT_PRESET])]
    return [config.load(remote_run.fetch(run) / remote_run.CONFIG)]


def is_file(member: str) -> bool:
    return member.endswith(".jsonl")


def answers_of(
    members: list[str],
    addresses: dict[str, str],
    settings: ExperimentConfig | None,
    flags: Flags,
    is_whole: bool,
) -> dict[str, Answers]:
    """Return each model's answers to a set of problems. For `is_whole` see `problems_of`.

    `addresses` has the directory of each member that is no file of answers.
    """
    found = {}
    for member in members:
        if is_file(member):
            item = answers.read(Path(member))
            if item is None:
                raise InputError("no such file of answers", where=member)
            found[member] = item
            continue
        if settings is None:
            raise InputError("a model and a file of answers", where=member, fix="give problems")
        model = addresses[member]
        of = answers.identity(settings, model, samples=flags.samples, temperature=flags.temperature)
        digest = hashlib.sha256(of.encode()).hexdigest()[:16]
        path = Path(flags.keep) / f"{digest}.jsonl" if flags.keep is not None else None

        def answer(model: str = model, config: ExperimentConfig = settings) -> Answers:
            rows = answers.problems_of(config, is_whole)
            loaded = answers.load_model(model, config)
            return answers.evaluate(config, *loaded, rows, flags.samples, flags.temperature)

        found[member] = answers.kept(path, of, answer)
    return found


def common(found: dict[str, Answers]) -> dict[str, Answers]:
    """Return the answers to problems that all have answered, in the order of the first.

    A prompt that stands several times in a set counts each time, in its order.
    """
    keys = {}
    for member, item in found.items():
        seen: dict[str, int] = {}
        keys[member] = {}
        for index, prompt in enumerate(item.prompts):
            number = seen[prompt] = seen.get(prompt, 0) + 1
            keys[member][prompt, number] = index
    shared = [
        key for key in next(iter(keys.values())) if all(key in other for other in keys.values())
    ]
    if not shared:
        raise InputError(
            "the models have no problem in common",
            where=", ".join(found),
            fix="compare answers to the same problems",
        )
    return {
        member: Answers(
            [key[0] for key in shared],
            [item.completions[keys[member][key]] for key in shared],
            item.rewards[[keys[member][key] for key in shared]],
        )
        for member, item in found.items()
    }


def beside(paired: dict[str, Answers], is_graded: bool) -> str:
    """Return a table of models, and one of differences to the first one."""
    values = {member: item.values(is_graded) for member, item in paired.items()}
    lines = [
        [member, markdown.of(paired[member].estimate()), int(np.isfinite(value).sum())]
        for member, value in values.items()
    ]
    what = "mean reward" if is_graded else "accuracy"
    sections = [markdown.table(["model", f"{what} (95 %)", "problems"], lines)]
    (first, base), *others = values.items()
    lines = []
    for member, value in others:
        both = np.isfinite(base) & np.isfinite(value)
        if not both.any():
            continue
        a = base[both]
        b = value[both]
        is_single = not is_graded and np.isin(np.concatenate([a, b]), (0, 1)).all()
        p = f"{comparison.mcnemar(a > 0.5, b > 0.5):.3g}" if is_single else "-"
        same = np.mean(
            [
                x == y
                for x, y in zip(paired[first].completions, paired[member].completions, strict=True)
            ]
        )
        difference = markdown.of(comparison.paired_difference(a, b), signed=True)
        lines.append([member, difference, p, f"{comparison.agreement(a, b):.3f}", f"{same:.3f}"])
    columns = [f"against {first}", "difference (95 %)", "McNemar p", "agreement", "same answers"]
    sections.append(markdown.table(columns, lines))
    return "\n\n".join(sections)


def memorized(originals: dict[str, Answers], variants: dict[str, Answers]) -> str:
    """Return a table of models and their memorization scores (see `evaluation.memorization`).

    Raises InputError if there are not as many variants as originals.
    """
    lines = []
    for member, known in originals.items():
        other = variants[member]
        if len(known.prompts) != len(other.prompts):
            raise InputError(
                f"{len(known.prompts)} problems and {len(other.prompts)} variants",
                where="--memorized",
                why="row i of the second set is a variant of row i of the first",
                fix="give files with as many rows, in the same order",
            )
        values = known.values(known.is_graded)
        of_variants = other.values(known.is_graded)
        judged = np.flatnonzero(np.isfinite(values) & np.isfinite(of_variants))
        if not judged.size:
            raise InputError("no problem was judged", where=member, fix="look at the reward")
        alike = memorization.similarities(
            [known.completions[i] for i in judged], [other.completions[i] for i in judged]
        )
        estimate = memorization.score(values[judged], of_variants[judged], alike)
        means = [values[judged].mean(), of_variants[judged].mean(), alike.mean()]
        shown_means = [f"{mean:.3f}" for mean in means]
        lines.append([member, *shown_means, markdown.of(estimate), len(judged)])
    columns = ["model", "originals", "variants", "similarity", "memorized (95 %)", "problems"]
    return markdown.table(columns, lines)


# --- seeds ---


def over_seeds(groups: dict[str, list[str]], scores: dict[str, list[float]], what: str) -> str:
    """Return statistics of methods over seeds and tasks (see `studies.comparison`).

    Args:
        groups: method -> runs.
        scores: run -> its score on each task.
    """
    arrays = {name: np.array([scores[run] for run in runs]) for name, runs in groups.items()}
    lines = []
    for name, array in arrays.items():
        value = comparison.stratified_bootstrap(comparison.iqm, array)
        lines.append([name, *array.shape, f"{array.mean():.3f}", shown(value, len(array))])
    sections = [
        f"## Over seeds: {what}",
        markdown.table(["method", "seeds", "tasks", "mean", "IQM (95 %)"], lines),
    ]
    (first, base), *others = arrays.items()
    lines = []
    for name, array in others:
        value = comparison.stratified_bootstrap(comparison.probability_of_improvement, array, base)
        lines.append([name, shown(value, min(len(array), len(base)))])
    sections.append(markdown.table(["method", f"P(above {first}) (95 %)"], lines))
    profile = [
        [f"{threshold:.1f}", *(f"{share:.2f}" for share in shares)]
        for threshold, *shares in zip(
            THRESHOLDS,
            *(comparison.performance_profile(array, THRESHOLDS) for array in arrays.values()),
            strict=True,
        )
    ]
    sections += [
        "Performance profile: share of scores above a threshold.",
        markdown.table(["above", *arrays], profile),
    ]
    return "\n\n".join(sections)


def shown(value: Estimate, seeds: int) -> str:
    """Return an estimate with its interval, which one seed does not have."""
    return markdown.of(value) if seeds > 1 else f"{value.value:.3f} (one seed)"


# --- replay ---


def replay(address: str, to: str | None) -> int:
    """Print how a run came about; with `to`, repeat it there and compare the digests."""
    folder = remote_run.fetch(address)
    summary = run_files.read_summary(folder)
    if not summary:
        raise InputError("the run has no summary", where=address, fix="let it end")
    target = to or f"{address.rstrip('/')}_replay"
    arguments = ["run", str(folder / remote_run.CONFIG), "--run-dir", target]
    now = finish.versions()
    lines = [
        [name, version, now.get(name, "-")] for name, version in summary.get("versions", {}).items()
    ]
    lines.append(["commit", summary.get("commit") or "unknown", finish.commit() or "unknown"])
    lines.append(["device", summary.get("device", "unknown"), ""])
    print(markdown.table(["", "of the run", "here"], lines))
    print(f"digest {summary['params_digest']}")
    print(f"{typed_command('run')} {' '.join(arguments[1:])}", flush=True)
    if to is None:
        return 0
    ended = subprocess.run([sys.executable, "-m", "tpu_rl.commands.cli", *arguments], check=False)
    if ended.returncode:
        return ended.returncode
    again = json.loads((Path(target) / run_files.SUMMARY).read_text(encoding="utf-8"))
    if again["params_digest"] != summary["params_digest"]:
        raise InputError(
            "the replay ended with other weights",
            where=target,
            why=f"digests {summary['params_digest']} and {again['params_digest']}: bits are "
            "promised for the same versions, devices and programs only",
            fix="install the versions of the run on such a device",
        )
    print("the same digest")
    return 0
