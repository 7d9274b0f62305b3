"""The results of a run: its models, summary.json and report.html."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import tpu_rl
from tpu_rl import metrics, models, run_files, wings
from tpu_rl.checkpoint import digests, manifests
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.commands import compose, roles, stages
from tpu_rl.commands.config import FileData
from tpu_rl.commands.roles import RunContext
from tpu_rl.errors import InputError, printable
from tpu_rl.experience.rows import tasks
from tpu_rl.redaction import redact
from tpu_rl.runtime import processes
from tpu_rl.types import Params

PACKAGES = ("jax", "jaxlib", "flax", "optax", "transformers")
"""The packages whose versions summary.json records."""


def finish(context: RunContext, params: Params, began: float, folder: RunFolder) -> None:
    """Write the models and the audit of given pairs, then summary.json and report.html.

    All processes call it; the first one writes the last two. Raises InputError if no step of the
    run changed a weight.
    """
    config = context.config
    run_dir = context.run_dir
    require_learned(run_dir)
    folders = save_models(context, params)
    audit_pairs(context, params)
    digest = digests.of_tree(params[roles.main_role(config.algorithm)])
    stage = stages.of_run(config, run_dir, config.steps)[-1]
    if processes.index():
        return
    rows = list(run_files.read_metrics(run_dir))
    last = rows[-1]["step"]
    rules = stages.EndRules(config.stop)
    reasons = [rules.add(row) for row in rows if stage.first <= row["step"]]
    summary = {
        "steps": last,
        "seconds": round(time.perf_counter() - began, 1),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "params_digest": digest,
        "versions": versions(),
        "commit": commit(),
        "stopped": reasons[-1] if last < config.steps else "",
        "model_step": rules.best_step if config.stop.best else last,
        "eval": {
            "before": evaluation_of(rows[0], config.evaluation.named_sets),
            "after": evaluation_of(rows[-1], config.evaluation.named_sets),
        },
        "files": manifests.describe_files(run_dir, folders),
    }
    if isinstance(config.data, FileData) and config.data.flip.share:
        train = tasks.file_rows(config.data, config.algorithm.experience, config.evaluation.rows)[0]
        summary["label_flips"] = wings.MODULES["label_flips"].count(train)
    # The page written while the run was on goes first: without one, no run counts as finished.
    (run_dir / run_files.REPORT).unlink(missing_ok=True)
    metrics.write_summary(run_dir, summary)
    write_final_report(run_dir)
    folder.finish()
    print(f"done: {folder.address}/{run_files.REPORT}, model in {folder.address}/model")


TELLING_STEPS = 10
"""A run of fewer steps may have gradients of 0 by chance: that is a warning."""


def require_learned(run_dir: Path) -> None:
    """Raise InputError if every step of a run was skipped, or had a gradient of 0.

    Of a run with fewer than `TELLING_STEPS`, gradients of 0 are a warning.
    """
    steps = [row for row in run_files.read_metrics(run_dir) if "optim/skipped" in row]
    updates = [row for row in steps if "optim/grad_norm" in row]
    if not steps or any(row["optim/grad_norm"] != 0 for row in updates):
        return
    where = f"{len(steps)} steps; {run_dir / 'metrics.jsonl'}"
    if not updates:
        raise InputError(
            "the run learned nothing: every step was skipped",
            where=where,
            why="a loss, gradient, reward, log-prob or advantage was NaN or infinite in each",
            fix="look at the model (token ids without a row in its embedding?), at the rows and at "
            "the reward functions",
        )
    zero = "the run learned nothing: the gradient was 0 in every step"
    if len(steps) < TELLING_STEPS:
        print(f"warning: {zero}; no prompt had completions of different rewards", file=sys.stderr)
        return
    raise InputError(
        zero,
        where=where,
        why="nothing was learned from: the completions of each prompt earned the same reward, or "
        "no token counted",
        fix="use easier or harder problems, more completions per prompt (--batch.group-size), more "
        "steps, or look at samples.jsonl for a fault of the reward",
    )


def update_report(run_dir: Path) -> None:
    """Write report.html while the run is on. A failure is a warning."""
    if processes.index():
        return
    try:
        wings.MODULES["report"].write_report(run_dir, live=True)
    except Exception as error:
        _warn(error)


class LivePage:
    """Writes report.html in a thread of its own while the run is on, one page at a time.

    A page takes time in proportion to the steps so far. After each the thread rests, so that all
    pages together take at most one part in 1 + `REST` of the run's time. As a context manager, it
    writes the page that is still due when it ends.
    """

    REST = 20
    """Times the time of a page."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._changed = threading.Condition()
        self._is_due = False
        self._ending = threading.Event()
        # The interpreter does not wait for it when the run ends in a hurry.
        self._thread = threading.Thread(target=self._work, name="report", daemon=True)
        self._thread.start()

    def update(self) -> None:
        """Let the page be written again soon."""
        with self._changed:
            self._is_due = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._ending.is_set())
                if not self._is_due:
                    return
                self._is_due = False
            began = time.perf_counter()
            update_report(self._run_dir)
            self._ending.wait(self.REST * (time.perf_counter() - began))

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._ending.set()
            self._changed.notify()
        self._thread.join()


def write_final_report(run_dir: Path) -> None:
    """Write report.html of the finished run; after a failure, a page that says so."""
    try:
        wings.MODULES["report"].write_report(run_dir)
    except Exception as error:
        _warn(error)
        wings.MODULES["report"].write_failure(run_dir, error)


def _warn(error: Exception) -> None:
    cause = redact(printable(f"{type(error).__name__}: {error}"))
    print(f"warning: {run_files.REPORT} was not written: {cause}", file=sys.stderr)


def save_models(context: RunContext, params: Params) -> list[Path]:
    """Save every model that was trained as a Hugging Face directory; return the directories.

    The model that the run is for goes to model/, others go to a folder with the name of their role.
    Adapters are merged into these, and are also saved by themselves, in model_adapter/, for PEFT.
    """
    from tpu_rl.rewards import reward_model

    algorithm = context.config.algorithm
    product = roles.main_role(algorithm)
    tokenizer = context.language.tokenizer
    folders: list[Path] = []
    for name, spec in algorithm.roles.items():
        if spec.trainable and spec.trunk_of is None:
            path = context.run_dir / ("model" if name == product else name)
            role_params = context.params_of(name)(params)
            model = context.models[name]
            models.save(str(path), model, role_params, tokenizer)
            folders.append(path)
            base = roles.adapter_base(context.config, name)
            if base is not None:
                adapter_path = path.with_name(f"{path.name}_adapter")
                models.save_adapters(str(adapter_path), model, role_params, base, tokenizer)
                folders.append(adapter_path)
                is_rounded = context.config.model.lora.base_dtype != "unquantized"
                if is_rounded and processes.index() == 0:
                    print(
                        f"note: {adapter_path} learned beside the rounded base; on {base} it is "
                        f"another model. {path} is what was trained",
                        file=sys.stderr,
                    )
    reading = roles.reading(algorithm)
    if reading is not None and processes.index() == 0:
        reward_model.write_reading(context.run_dir / "model", reading, tokenizer.chat)
    return folders


def audit_pairs(context: RunContext, params: Params) -> None:
    """Audit the pairs that the last stage trained on, if the data brought them.

    Completions that are graded one by one have no margin, so there is no audit of them.
    """
    from tpu_rl.commands.sources import of_pairs

    config = context.config
    stage = stages.of_run(config, context.run_dir, config.steps)[-1]
    if not compose.learns_from_given_pairs(stage) or stage.algorithm.experience.graded:
        return
    given = of_pairs.given_pairs(context.config, context.language.tokenizer)
    pair_audit = wings.MODULES["pair_audit"]
    trained = pair_audit.Trained(
        compose.build_algorithm(context, stage),
        params,
        of_pairs.trained_pairs(context, stage),
        num_steps=stage.last - stage.first + 1,
        seed=config.seed,
        batch=config.batch,
        weights=config.data.weights,
    )
    print(pair_audit.write(given, trained, context.run_dir))


def versions() -> dict[str, str]:
    """Return the versions of tpu_rl, of Python and of the packages that compute."""
    recorded = {"tpu_rl": tpu_rl.__version__, "python": platform.python_version()}
    return recorded | {name: importlib.metadata.version(name) for name in PACKAGES}


def commit() -> str | None:
    """Return the commit of the checkout that this program runs from, with + if files differ.

    None outside of a checkout, as after installation from a wheel.
    """
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "tpu_rl")
        return git("rev-parse", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def evaluation_of(row: dict[str, Any], sets: Iterable[str] = ()) -> dict[str, Any]:
    """Return the evaluation in a metrics row, with the greedy one inside; {} if there is none.

    `loss`, `reward` and each of `rewards` are {value, low, high, n}. There is no `accuracy` if the
    reward is graded, since it does not say which answers are right. `sets` has the evaluation of
    each further set of that name.
    """

    def estimate(name: str, n_name: str | None = None) -> dict[str, Any]:
        if f"{name}_low" not in row:
            return {}
        value = {"value": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
        return value | {"n": int(row[n_name or f"{name}_n"])}

    def read(prefix: str) -> dict[str, Any]:
        accuracy = estimate(f"{prefix}accuracy", f"{prefix}n")
        if accuracy:
            accuracy = {"accuracy": accuracy.pop("value"), **accuracy}
        start = f"{prefix}reward/"
        names = [name for name in row if name.startswith(start) and f"{name}_n" in row]
        parts = {
            "reward": estimate(f"{prefix}reward", f"{prefix}n"),
            "rewards": {name.removeprefix(start): estimate(name) for name in names},
        }
        return accuracy | {name: value for name, value in parts.items() if value}

    def whole(prefix: str) -> dict[str, Any]:
        parts = {"loss": estimate(f"{prefix}loss"), "greedy": read(f"{prefix}greedy_")}
        return read(prefix) | {name: value for name, value in parts.items() if value}

    of_sets = {name: measured for name in sets if (measured := whole(f"eval/{name}/"))}
    return whole("eval/") | ({"sets": of_sets} if of_sets else {})
