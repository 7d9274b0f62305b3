"""What a run leaves: its models, summary.json and report.html."""

from __future__ import annotations

import json
import time
from typing import Any

import jax

from launch import audit, reward_runs, roles, sources
from launch.run_folders import RunFolder
from tpu_rl import digests, metrics, models, processes, report, reward_models
from tpu_rl.types import Params


def save_models(setup: sources.Setup, params: Params) -> None:
    """Every model that was trained, as a directory to use: the product of the run in model/, others by their role.

    Adapters are merged into these, and stand alone in model_adapter/ for PEFT.
    """
    algorithm = setup.config.algorithm
    product = roles.product(algorithm)
    for name, spec in algorithm.roles.items():
        if spec.trainable and spec.trunk_of is None:
            path = setup.run_dir / ("model" if name == product else name)
            own, tokenizer = setup.params_of(name)(params), setup.language.tokenizer
            models.save(str(path), setup.models[name], own, tokenizer)
            base = roles.adapter_base(setup.config, name)
            if base is not None:
                models.save_adapters(f"{path}_adapter", setup.models[name], own, base, tokenizer)
    reading = reward_runs.reading(algorithm)
    if reading is not None and processes.index() == 0:
        reward_models.write_reading(setup.run_dir / "model", reading)


def finish(setup: sources.Setup, params: Params, began: float, folder: RunFolder) -> None:
    """The models and the audit of given pairs; then, by the first process, summary.json and report.html."""
    config, run_dir = setup.config, setup.run_dir
    save_models(setup, params)
    audit.audit_run(setup, params)
    digest = digests.of_tree(params[roles.product(config.algorithm)])
    if processes.index():
        return
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = {
        "steps": config.steps,
        "seconds": round(time.perf_counter() - began, 1),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "params_digest": digest,
        "eval": {"before": evaluation_of(rows[0]), "after": evaluation_of(rows[-1])},
    }
    (run_dir / report.FILE).unlink(missing_ok=True)  # one of fewer steps: until there is another, nothing is finished
    metrics.write_summary(run_dir, summary)
    report.write_report(run_dir)
    folder.finish()
    print(f"done: {folder.address}/{report.FILE}, model in {folder.address}/model")


def evaluation_of(row: dict[str, Any]) -> dict[str, Any]:
    """The evaluation in a metrics row as summary.json has it, with the greedy one inside; empty if there is none."""

    def one(prefix: str) -> dict[str, Any]:
        if f"{prefix}accuracy" not in row:
            return {}
        names = {"accuracy": "accuracy", "low": "accuracy_low", "high": "accuracy_high"}
        return {name: row[prefix + metric] for name, metric in names.items()} | {"n": int(row[f"{prefix}n"])}

    greedy = one("eval/greedy_")
    return one("eval/") | ({"greedy": greedy} if greedy else {})
