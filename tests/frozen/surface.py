"""The public surface and the bits of short runs, for changes that must keep both.

    python -m tests.frozen.surface --write            the names, in tests/frozen/surface.json
    python -m tests.frozen.surface --runs FILE        also the digests of short runs (20 minutes)
    python -m tests.frozen.surface --compare FILE     print what differs from such a file

`test_surface.py` compares the names at every change: a new flag or reward is a line of that file's
diff, and so is one that leaves. Digests depend on the machine and the versions of jax, so they are
compared on one machine only.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("surface.json")
METRIC = re.compile(
    r"(reward|rollout|env|policy|value|preference|q|distill|sft|router|optim|time|perf|eval)"
    r"/[a-z][a-z0-9_/]*"
)

SMALL = """--steps 3 --samples.max-per-step 0 --checkpoint.interval 3
--optimizer.warmup-steps 0 --batch.prompts 8"""
GROUPS = "--batch.group-size 8"
OWN = "--model.path builtin:arithmetic --model.no-random-init --batch.row-length 64"
PROMPTS = "--sampling.max-prompt-tokens 8 --sampling.max-new-tokens 16"
RUNS = {
    "arithmetic_grpo": GROUPS,
    "arithmetic_sapo": f"{GROUPS} --algorithm.kl-loss-coef 0.01",
    "arithmetic_reinforce": GROUPS,
    "arithmetic_ppo": GROUPS,
    "arithmetic_dpo": "",
    "arithmetic_q_sharp": GROUPS,
    "reverse_grpo": GROUPS,
    "mini_shell_sft": "--evaluation.rows 4",
    "mini_shell_grpo": f"{GROUPS} --model.path MODEL/mini_shell_sft",
    "grpo": f"--data.path ROWS --reward gsm8k {GROUPS} {OWN} {PROMPTS}",
    "sft": f"--data.path ROWS {OWN} {PROMPTS}",
    "dpo": f"--data.path PAIRS {OWN} {PROMPTS}",
    "pictures_sft": "",
    "pictures_grpo": f"{GROUPS} --model.path MODEL/pictures_sft",
    "pictures_look_sft": "--evaluation.rows 4",
    "gsm8k_dpo": f"--data.path PAIRS --data.format plain {OWN} {PROMPTS}",
    "gsm8k_reward_model": f"--data.path PAIRS --data.format plain {OWN} {PROMPTS}",
    "star_graph_pretrain": "",
    "star_graph_sft": "--model.path MODEL/star_graph_pretrain",
    "star_graph_grpo": f"{GROUPS} --model.path MODEL/star_graph_pretrain",
}
"""Preset -> flags of its short run, beside those of `SMALL`: three or more of each family, but two
of files of problems. MODEL/PRESET is the model of an earlier run of the table."""


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each leaf of nested dicts."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flat(value, f"{prefix}.{name}".strip("."))
    else:
        yield prefix, values


def metric_names() -> list[str]:
    """List the names of metrics that stand in the sources of the library."""
    names: set[str] = set()
    for file in (ROOT / "tpu_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= {node.value} if METRIC.fullmatch(node.value) else set()
    return sorted(names)


def surface() -> dict[str, Any]:
    """Collect the names that users write, with the defaults of every preset."""
    config = importlib.import_module("tpu_rl.commands.config")
    plain_values = importlib.import_module("tpu_rl.plain_values")
    presets: dict[str, Any] = {}
    algorithms: dict[str, Any] = {}
    for name in config.preset_names():
        preset = config.preset(name)
        text = json.dumps(dict(flat(plain_values.to_dict(preset))), sort_keys=True)
        presets[name] = {
            "identity": config.settings_hash(preset)[:16],
            "values": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
    default = config.preset(config.DEFAULT_PRESET)
    for name in algorithm_names():
        kind = importlib.import_module("tpu_rl.algos.plugins").find(name)
        algorithms[name] = {
            field.name: "required" if field.default is dataclasses.MISSING else repr(field.default)
            for field in dataclasses.fields(kind)
        }
    return {
        "presets": presets,
        "flags": dict(flat(plain_values.to_dict(default))),
        "algorithms": algorithms,
        "rewards": reward_names(),
        "families": family_names(),
        "environments": environment_names(),
        "commands": sorted(importlib.import_module("tpu_rl.commands.cli").COMMANDS),
        "metrics": metric_names(),
    }


def algorithm_names() -> list[str]:
    return sorted(importlib.import_module("tpu_rl.algos").ALGORITHMS)


def reward_names() -> list[str]:
    return sorted(importlib.import_module("tpu_rl.wings").VERIFIERS)


def family_names() -> list[str]:
    families = importlib.import_module("tpu_rl.models.hf.families")
    return sorted(families.FAMILIES)


def environment_names() -> list[str]:
    named = importlib.import_module("tpu_rl.environments.named")
    return sorted([*named.ENVIRONMENTS, *(f"{name}:" for name in named.FAMILIES)])


def write_rows(folder: Path) -> dict[str, str]:
    """Write small files of rows, and return the name of each in `RUNS` -> its path."""
    rows = [{"prompt": f"{n}+{n + 3}=", "answer": str(2 * n + 3)} for n in range(1, 41)]
    completed = [row | {"completion": f"#### {row['answer']}"} for row in rows]
    pairs = [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": f"{row['answer']}0"}
        for row in rows
    ]
    paths = {}
    for name, values in (("ROWS", completed), ("PAIRS", pairs)):
        path = folder / f"{name.lower()}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in values), encoding="utf-8")
        paths[name] = str(path)
    return paths


def digests(only: list[str]) -> dict[str, str]:
    """Run every command of `RUNS`, and return preset -> digest of its parameters or its error."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = write_rows(Path(folder))
        for preset, flags in RUNS.items():
            if only and preset not in only:
                continue
            evaluation = "" if "--evaluation.rows" in flags else "--evaluation.rows 0"
            words = shlex.split(f"{SMALL} {evaluation} {flags}")
            words = [paths.get(word, word) for word in words]
            words = [re.sub(r"^MODEL/(\w+)", rf"{folder}/\1/model", word) for word in words]
            run_dir = Path(folder) / preset
            command = [sys.executable, str(ROOT / "launch" / "run.py"), preset, *words]
            done = subprocess.run(
                [*command, "--run-dir", str(run_dir)], capture_output=True, text=True, cwd=ROOT
            )
            summary = run_dir / "summary.json"
            digest = done.stderr.strip()[-600:] or f"exit code {done.returncode}"
            if done.returncode == 0:
                digest = json.loads(summary.read_text(encoding="utf-8"))["params_digest"]
            results[preset] = digest
            print(f"{preset}: {digest}", flush=True)
    return results


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each name that only one side has, and each value that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{path}/{name}")
    elif isinstance(old, list) and isinstance(new, list) and all(isinstance(x, str) for x in old):
        for name in sorted({*old} ^ {*new}):
            yield f"{path}: {name} {'left' if name in old else 'is new'}"
    elif old != new:
        yield f"{path}: {old!r} -> {new!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    names = surface()
    if arguments.write:
        FILE.write_text(json.dumps(names, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if arguments.runs:
        everything = names | {"digests": digests(arguments.only)}
        arguments.runs.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    if arguments.compare:
        old = json.loads(arguments.compare.read_text(encoding="utf-8"))
        if "digests" in old:
            names["digests"] = digests(arguments.only)
            if arguments.only:
                old["digests"] = {name: old["digests"][name] for name in arguments.only}
        lines = list(differences(old, names))
        print("\n".join(lines) or "nothing differs")
        return int(bool(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
