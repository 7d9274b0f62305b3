"""A model guided by a Q# run: what `evaluate --guide` loads, records and prints."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_rl import models
from tpu_rl.checkpoint import remote_run
from tpu_rl.commands import roles
from tpu_rl.commands.roles import Language
from tpu_rl.commands.saved_run import load_run
from tpu_rl.errors import InputError, typed_command
from tpu_rl.evaluation.intervals import Estimate
from tpu_rl.models import Select
from tpu_rl.report import GUIDED_FILE, write_report
from tpu_rl.studies.guided_accuracy import Guided, Line
from tpu_rl.types import Params

POLICY_PARAMS = Select("policy")
Q_PARAMS = Select("q")


def load(
    q_run: str, language: Language, params: Params, candidate_mass: float | None = None
) -> tuple[Guided, float]:
    """Return the model with the q of a Q# run at its newest checkpoint, and the run's coefficient.

    `candidate_mass` replaces that of the run. Raises InputError if the run trains no q, or one for
    other tokens.
    """
    context, q_run_params, step = load_run(q_run)
    algorithm: Any = context.config.algorithm
    if algorithm.experience.policy != "guided":
        raise InputError(
            "not a run of Q#",
            where=f"--guide {q_run}",
            fix=f"train one: {typed_command('run')} arithmetic_q_sharp",
        )
    if candidate_mass is not None:
        algorithm = replace(algorithm, candidate_mass=candidate_mass)
    vocab_size = language.tokenizer.vocab_size
    q_vocab_size = context.language.tokenizer.vocab_size
    if vocab_size != q_vocab_size:
        raise InputError(
            "q cannot score this model's tokens",
            where="--guide",
            why=f"their vocabularies have {vocab_size} and {q_vocab_size} tokens",
            fix="train q for this model",
        )
    print(f"guided by {q_run}, step {step}")
    reference = models.policy(language.model, POLICY_PARAMS)
    q = models.policy(context.models["q"], Q_PARAMS)
    guided = Guided(
        reference,
        q,
        {"policy": params, "q": context.params_of("q")(q_run_params)},
        partial(roles.guide, reference, q, algorithm),
        algorithm.histogram,
        roles.q_reads(algorithm),
    )
    return guided, algorithm.kl_coef


def record(run_dir: str, lines: Sequence[Line], judged: Sequence[tuple[str, Estimate]]) -> None:
    """Write guided.json into the folder of the Q# run, and its report again."""
    folder = remote_run.fetch(run_dir)
    # JSON has no infinity.
    finite = [line._replace(kl_coef=None) if line.kl_coef == math.inf else line for line in lines]
    content = {"lines": [line._asdict() for line in finite], "judge": judged}
    (folder / GUIDED_FILE).write_text(json.dumps(content), encoding="utf-8")
    write_report(folder)
    remote_run.write_back(run_dir, folder, (GUIDED_FILE, "report.html"))


def report(
    title: str, lines: Sequence[Line], judged: Sequence[tuple[str, Estimate]], num_samples: int
) -> None:
    """Print a table of the lines, then the accuracy of q as a judge."""
    votes = [f"maj@{num_samples}"] if num_samples > 1 else []
    is_graded = any(abs(line.reward.value - line.accuracy.value) > 1e-6 for line in lines)
    graded = ["mean reward"] if is_graded else []
    columns = ("", "kl coef", "pass@1", "95 % interval", *graded, *votes, "KL", "tokens")
    table = Table(*columns, title=escape(title))
    for line in lines:
        cells = [line.name, "" if line.kl_coef is None else f"{line.kl_coef:g}"]
        cells.append(f"{100 * line.accuracy.value:.1f} %")
        cells.append(f"{100 * line.accuracy.low:.1f} to {100 * line.accuracy.high:.1f}")
        if graded:
            cells.append(f"{line.reward.value:.3f}")
        if votes:
            cells.append("" if line.majority is None else f"{100 * line.majority.value:.1f} %")
        table.add_row(*cells, f"{line.kl:.3f}", f"{line.length:.1f}")
    console = Console()
    console.print(table)
    console.print(
        "KL: nats per completion, to the model alone, over the whole vocabulary and before any "
        "truncation"
    )
    for name, estimate in judged:
        value, low, high = (100 * share for share in estimate[:3])
        console.print(f"{name}: {value:.1f} % ({low:.1f} to {high:.1f})")
