"""The model card of an exported model, README.md, from the run's configuration and results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from tpu_rl import run_files
from tpu_rl.algos import plugins
from tpu_rl.commands import roles
from tpu_rl.commands.config import BUILTIN, ExperimentConfig, FileData
from tpu_rl.commands.finish import evaluation_of, versions
from tpu_rl.report import markdown

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".gz")
"""What ends the name of a file of rows. Names of the hub do not end like this."""

NAMES = {
    "AStarPo": "A*-PO",
    "Cispo": "CISPO",
    "DirectAdvantage": "direct advantage policy optimization",
    "Distill": "distillation",
    "Dpo": "DPO",
    "Grpo": "GRPO",
    "Gspo": "GSPO",
    "Kto": "KTO",
    "MiniLlm": "MiniLLM",
    "Mixed": "GRPO with solutions in its groups",
    "Ppo": "PPO",
    "Prime": "PRIME",
    "ProcessReward": "process reward model",
    "QSharp": "Q#",
    "Reinforce": "REINFORCE",
    "RewardModel": "reward model",
    "Rft": "rejection-sampling fine-tuning",
    "ScoredCompletions": "learning from scored completions",
    "SelfDistill": "self-distillation",
    "SentenceReward": "sentence reward model",
    "Sft": "supervised fine-tuning",
    "Surrogates": "GRPO with another surrogate",
    "Unlearn": "unlearning",
    "ValuePretraining": "value pretraining",
}
"""Class of an algorithm's configuration, without "Config" -> what papers call the algorithm."""


def write_card(
    config: ExperimentConfig, run_dir: Path, step: int, role: str, dtype: str, adapter: bool
) -> str:
    """Return the text of the card of the model of a role at a step.

    Paths of this machine do not appear in it: of a local file or directory, it has the name only.
    """
    results = read_results(run_dir, step, config.evaluation.named_sets)
    sections = [
        f"---\n{yaml.safe_dump(metadata(config, adapter), sort_keys=False)}---",
        f"# {base_name(config)}, trained with {method_name(config)}",
        "tpu_rl trained this model and wrote this card.",
        "## Training",
        markdown.table(["", ""], [*settings(config, step, role, dtype, adapter).items()]),
        "## Held-out results",
        results_of(results["eval"]),
    ]
    for name in config.evaluation.named_sets:
        of_set = {
            when: (result.get("sets") or {}).get(name) for when, result in results["eval"].items()
        }
        sections += [f"### {name}", results_of(of_set)]
    if roles.specs(config)[role].outputs is None:
        sections += ["## Use", usage(adapter)]
    sections += ["## Versions", markdown.table(["package", "version"], results["versions"].items())]
    return "\n\n".join(sections) + "\n"


def read_results(run_dir: Path, step: int, sets: Iterable[str] = ()) -> dict[str, Any]:
    """Return `eval` and `versions`, as in summary.json, of a run at a step.

    `sets` are the names of its further sets of held-out rows.

    A run that is not finished has no summary of that step. Its rows have the evaluations so far.
    """
    summary = run_files.read_summary(run_dir)
    if summary and summary["steps"] == step:
        # Runs of before they were recorded have no versions.
        return {"eval": summary["eval"], "versions": summary.get("versions") or versions()}
    rows = run_files.read_metrics(run_dir)
    evaluations = [evaluation_of(row, sets) for row in rows if row["step"] <= step]
    measured = [evaluation for evaluation in evaluations if evaluation]
    if not measured:
        return {"eval": {}, "versions": versions()}
    # The evaluation before the first step is not one of what was trained.
    after = measured[-1] if len(measured) > 1 else {}
    return {"eval": {"before": measured[0], "after": after}, "versions": versions()}


def results_of(results: dict[str, Any]) -> str:
    """Return a table of what was measured before and after training."""
    before, after = (results.get(when) or {} for when in ("before", "after"))
    rows = []

    def add(name: str, old: Any, new: Any, form: Callable[[dict[str, Any]], str]) -> None:
        if old or new:
            rows.append([name, form(old or {}), form(new or {}), (new or old)["n"]])

    add("loss, nats per token", before.get("loss"), after.get("loss"), mean)
    rewards = [result.get("rewards") or {} for result in (before, after)]
    for name in rewards[0] | rewards[1]:
        add(f"mean {name}", rewards[0].get(name), rewards[1].get(name), mean)
    greedy = (before.get("greedy") or {}, after.get("greedy") or {})
    for way, old, new in (("sampled", before, after), ("greedy", *greedy)):
        if "accuracy" in (new or old):
            add(f"accuracy, {way}", old, new, estimate)
        elif not any(rewards):
            add(f"mean reward, {way}", old.get("reward"), new.get("reward"), mean)
    if not rows:
        return "The run was not evaluated on held-out problems."
    table = markdown.table(["", "before", "after", "n"], rows)
    return f"{table}\n\nIntervals are 95 %, over problems or rows."


def estimate(result: dict[str, Any]) -> str:
    """Return an accuracy with its interval, in percent."""
    if "accuracy" not in result:
        return "-"
    value, low, high = (100 * result[key] for key in ("accuracy", "low", "high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def mean(result: dict[str, Any]) -> str:
    """Return a mean with its interval."""
    value, low, high = (result.get(key) for key in ("value", "low", "high"))
    if value is None:
        return "-"
    # The mean of one problem has no interval.
    return f"{value:.4g}" + (f" ({low:.4g} to {high:.4g})" if low is not None else "")


def metadata(config: ExperimentConfig, adapter: bool) -> dict[str, Any]:
    """Return the metadata of the card that the hub reads."""
    tag = plugins.display_name(config.algorithm).lower()
    values: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "tags": ["tpu_rl", tag],
    }
    # The hub refuses what is no name on the hub.
    path = config.model.path or ""
    if is_hub_name(path) and not config.model.random_init:
        values["base_model"] = path
    paths = config.data.path or "" if isinstance(config.data, FileData) else ""
    if is_hub_name(paths):
        values["datasets"] = [paths]
    return values


def settings(
    config: ExperimentConfig, step: int, role: str, dtype: str, adapter: bool
) -> dict[str, str]:
    """Return name -> value of the settings that describe the training."""
    batch = config.batch
    values = {
        "base model": base_name(config) + (", random weights" if config.model.random_init else ""),
        "method": method_name(config),
        "role": role,
        "data": data_name(config),
        "rewards": ", ".join(local_name(name) for name in config.reward),
        "steps": str(step),
        "prompts per step": str(batch.prompts),
        "completions per prompt": str(batch.group_size),
        "optimizer": f"{config.optimizer.name}, learning rate {config.optimizer.learning_rate:g}",
        "adapters": f"LoRA of rank {config.model.lora.rank}" if config.model.lora.rank else "",
        "seed": str(config.seed),
        "weights": f"{dtype}, adapter only" if adapter else dtype,
    }
    return {name: value for name, value in values.items() if value}


def method_name(config: ExperimentConfig) -> str:
    """Return the name that papers give the algorithm of the run."""
    name = plugins.display_name(config.algorithm)
    return NAMES.get(name, name)


def base_name(config: ExperimentConfig) -> str:
    """Return the name of the base model: a hub name, or the last part of a directory."""
    path = config.model.path or ""
    return path.removeprefix(BUILTIN) if path.startswith(BUILTIN) else local_name(path)


def data_name(config: ExperimentConfig) -> str:
    """Return the names of the files of the run, or of its task."""
    files = config.data
    if not isinstance(files, FileData):
        return type(files).__name__.removesuffix("Config").removesuffix("Data").lower()
    return ", ".join(local_name(path.strip()) for path in (files.path or "").split(","))


def local_name(path: str) -> str:
    """Return a name on the hub as it is, and the last part of a local path."""
    return path if is_hub_name(path) else Path(path).name


def is_hub_name(path: str) -> bool:
    """Return True if a path can be the name OWNER/NAME of the hub, and is nothing here."""
    pattern = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
    is_name = re.fullmatch(pattern, path) is not None and not path.endswith(DATA_SUFFIXES)
    return is_name and not Path(path).exists()


def usage(adapter: bool) -> str:
    """Return the program that loads the model."""
    loader = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    imports = f"from transformers import {loader}, AutoTokenizer"
    if adapter:
        imports = f"from peft import {loader}\nfrom transformers import AutoTokenizer"
    return f"""```python
{imports}

model = {loader}.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL")
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_NAME_OF_THIS_MODEL")
```"""
