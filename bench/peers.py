"""The same work by tpu_rl, TRL and Tunix on this machine: seconds, memory, and agreement.

    python bench/peers.py [--rounds 3] [--engines ours trl tunix]
        [--axes step prompt_heavy long_tail smollm2 rollout update memory] [--to runs/peers]
        [--environments FOLDER] [--steps 3] [--warmup 2] [--small]

All train or sample the same Llama of 12.6 million random weights in float32 (smollm2: with the
sizes of SmolLM2-135M), on the same random prompts, with the same number of sampled tokens in each
step, AdamW, no reference model, and rewards by the same Python function. In each round every engine
runs in its own process, in rotating order. The first steps compile and do not count.

    step          GRPO, 8 prompts x 8 completions, 64 + 64 tokens; time from step to step
    prompt_heavy  8 x 16, 256 + 32
    long_tail     16 x 8, 64 + up to 192: mean 39, 95th percentile 114. All engines have the same
                  lengths, which their samplers do not know beforehand. TRL also with continuous
                  batching
    smollm2       4 x 4, 64 + 64, a model of 135 million weights
    rollout       64 + 128 tokens, 32 and 64 rows, sampled and greedy; TRL's is `generate` of
                  transformers
    update        the part of `step` after the rewards
    memory        peak memory of the process during `step`; TRL also with activation checkpointing

Ours is launch/run.py itself, with logging and checkpoints; the peers write no checkpoints. The
environments of the peers are made once with `python -m venv` and pip, in the user's cache folder,
and take gigabytes. The log-probs of our sampler must agree with those of transformers for the same
tokens, within 1e-4. There is no ratio where the numbers of tokens differ. Writes TO/peers.json
(everything) and TO/peers.md (the tables). The same command on the same folder continues where it
stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "engines")]

import side_by_side
from protocol import EOS, FIRST_WORD, Work
from side_by_side import OURS, Sample

LARGEST_GAP = 1e-4
"""Allowed difference between our log-probs and those of transformers."""
REQUIREMENTS = {"trl": ("trl==1.16.0", "torch==2.13.0"), "tunix": ("google-tunix==0.1.7",)}
"""Packages in an engine's environment. torch is pinned, because newer versions may not work with
this transformers."""
TIME_LIMIT = 3600
"""Seconds for one engine in one round."""


@dataclass(frozen=True)
class Shape:
    """The work of an axis."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    long_tail: bool = False
    batches: tuple[int, ...] = ()
    """Rows decoded at once, of rollouts."""
    model: str = "llama"
    """A name of SIZES in bench/engines/ours_engine.py."""


SHAPES = {
    "step": Shape(8, 8, 64, 64),
    "prompt_heavy": Shape(8, 16, 256, 32),
    "long_tail": Shape(16, 8, 64, 192, long_tail=True),
    "smollm2": Shape(4, 4, 64, 64, model="smollm2"),
    "rollout": Shape(64, 1, 64, 128, batches=(32, 64)),
}
SMALL = {
    "step": Shape(2, 4, 16, 8),
    "prompt_heavy": Shape(2, 4, 32, 4),
    "long_tail": Shape(2, 4, 16, 12, long_tail=True),
    "smollm2": Shape(2, 2, 8, 4),
    "rollout": Shape(4, 1, 16, 8, batches=(2, 4)),
}
PARTS = {"update": "step", "memory": "step"}
"""Axis -> the axis whose runs measure it too."""
VARIANTS = {"long_tail": ("trl continuous",), "memory": ("trl checkpointing",)}
"""Axis -> arms besides the engines themselves: "ENGINE VARIANT"."""


@dataclass(frozen=True)
class Run:
    """One process of an engine."""

    round: int
    shape: str
    arm: str
    load: float
    """The machine's load average over one minute, before the run."""
    result: dict[str, Any] | None
    """The engine's answer; None if it failed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--engines", nargs="+", default=[OURS, *REQUIREMENTS], choices=[OURS, *REQUIREMENTS]
    )
    parser.add_argument("--axes", nargs="+", default=[*SHAPES, *PARTS], choices=[*SHAPES, *PARTS])
    parser.add_argument("--to", type=Path, default=Path("runs/peers"))
    parser.add_argument("--environments", type=Path, default=cache_folder())
    parser.add_argument("--steps", type=int, default=3, help="counted steps in each round")
    parser.add_argument("--warmup", type=int, default=2, help="first steps, which do not count")
    parser.add_argument("--small", action="store_true", help="tiny work, to test the script")
    flags = parser.parse_args()
    folder = flags.to.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    pythons = {name: python_of(name, flags.environments) for name in flags.engines}
    shapes = SMALL if flags.small else SHAPES
    measured_axes: list[str] = flags.axes
    axes = list(dict.fromkeys(PARTS.get(axis, axis) for axis in measured_axes))
    model_names = {shapes[axis].model for axis in axes}
    model_folders = {name: str(folder / f"model_{name}") for name in model_names}
    for name, model in model_folders.items():
        do(sys.executable, OURS, Work("write_model", f"{model}_written", model, variant=name))
    runs: list[Run] = []
    for round_ in range(flags.rounds):
        for axis in axes:
            work = work_of(
                shapes[axis], model_folders[shapes[axis].model], flags.warmup, flags.steps
            )
            for arm in side_by_side.rotated(arms_of(axis, flags.axes, flags.engines), round_):
                runs.append(run_arm(arm, axis, round_, work, pythons, folder))
    gap = log_prob_gap(runs, pythons, folder, model_folders.get("llama", ""))
    text = report(runs, flags.axes, gap)
    print(text, flush=True)
    (folder / "peers.md").write_text(text, encoding="utf-8")
    results = {
        "machine": machine(),
        "gap": gap,
        "flags": vars(flags),
        "runs": [vars(run) for run in runs],
    }
    (folder / "peers.json").write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    return int(any(run.result is None for run in runs) or (gap is not None and gap >= LARGEST_GAP))


# --- the peers' environments ---


def cache_folder() -> Path:
    """Return the folder of the peers' environments."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(configured) if os.path.isabs(configured) else Path("~/.cache").expanduser()
    return cache / "tpu_rl" / "peers"


def python_of(engine: str, environments: Path) -> str:
    """Return the Python interpreter of an engine, and make its environment if there is none."""
    if engine == OURS:
        return sys.executable
    folder = environments.absolute() / engine
    python = folder / "bin" / "python"
    marker = folder / "made"
    requirements = "\n".join(REQUIREMENTS[engine])
    if not marker.is_file() or marker.read_text(encoding="utf-8") != requirements:
        print(f"making the environment of {engine} in {folder} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", *REQUIREMENTS[engine]], check=True
        )
        marker.write_text(requirements, encoding="utf-8")
    return str(python)


# --- work ---


def work_of(shape: Shape, model: str, warmup: int, steps: int) -> Work:
    """Return the work of a shape. Its prompts and lengths are random, and always the same."""
    rng = random.Random(0)

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_WORD, EOS) for _ in range(shape.prompt_tokens))

    def length() -> int:
        return min(int(rng.lognormvariate(3.276, 0.88)) + 1, shape.new_tokens)

    num_steps = warmup + steps
    prompts = tuple(tuple(prompt() for _ in range(shape.prompts)) for _ in range(num_steps))
    lengths: tuple[tuple[int, ...], ...] = ()
    if shape.long_tail:
        rows = shape.prompts * shape.group
        lengths = tuple(tuple(length() for _ in range(rows)) for _ in range(num_steps))
    return Work(
        "rollout" if shape.batches else "step",
        folder="",
        model=model,
        prompts=prompts,
        group=shape.group,
        new_tokens=shape.new_tokens,
        lengths=lengths,
        warmup=warmup,
        batches=shape.batches,
    )


def arms_of(shape: str, axes: list[str], engines: list[str]) -> list[str]:
    """Return the arms that do the work of a shape for these axes."""
    served = [axis for axis in axes if PARTS.get(axis, axis) == shape]
    variants = [arm for axis in served for arm in VARIANTS.get(axis, ())]
    return [*engines, *(arm for arm in variants if arm.split()[0] in engines)]


def run_arm(
    arm: str, shape: str, round_: int, work: Work, pythons: dict[str, str], folder: Path
) -> Run:
    """Run an arm in one round, unless it has finished the same work in this folder before."""
    engine, _, variant = arm.partition(" ")
    run_folder = folder / f"{shape}-{round_}-{arm.replace(' ', '-')}"
    work = replace(work, folder=str(run_folder), variant=variant)
    record = run_folder / "run.json"
    if record.is_file() and (run_folder / "work.json").read_text(encoding="utf-8") == work.text():
        return Run(**json.loads(record.read_text(encoding="utf-8")))
    load = os.getloadavg()[0]
    run = Run(round_, shape, arm, load, do(pythons[engine], engine, work))
    if run.result is not None:
        record.write_text(json.dumps(vars(run)), encoding="utf-8")
    outcome = "failed" if run.result is None else f"{json.dumps(run.result['seconds'])} s"
    clock = time.strftime("%H:%M:%S")
    print(f"{clock} round {round_ + 1} {shape} {arm}: {outcome} (load {load:.1f})", flush=True)
    return run


def do(python: str, engine: str, work: Work) -> dict[str, Any] | None:
    """Run an engine in its own process and return its answer; None if it fails."""
    folder = Path(work.folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    question = folder / "work.json"
    answer = folder / "result.json"
    log = folder / "log.txt"
    question.write_text(work.text(), encoding="utf-8")
    script = HERE / "engines" / f"{engine}_engine.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine != OURS:  # launch/run.py has a compilation cache of its own.
        environment["JAX_COMPILATION_CACHE_DIR"] = str(Path(python).parents[1] / "compiled")
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            [python, str(script), str(question), str(answer)],
            stdout=output,
            stderr=output,
            env=environment,
            timeout=TIME_LIMIT,
            check=False,
        ).returncode
    if code or not answer.is_file():
        print(
            f"error: {engine} ended with exit code {code}; see {log}", file=sys.stderr, flush=True
        )
        return None
    return json.loads(answer.read_text(encoding="utf-8"))


def log_prob_gap(
    runs: list[Run], pythons: dict[str, str], folder: Path, model: str
) -> float | None:
    """Return the largest difference between the log-probs of our sampler and of transformers.

    None if not both have run; inf if the comparison fails.
    """
    results = [run.result for run in runs if run.arm == OURS and run.result]
    rollouts = [result["rollout"] for result in results if "rollout" in result]
    if not rollouts or "trl" not in pythons:
        return None
    work = Work("score", str(folder / "score"), model, rollout=rollouts[-1])
    answer = do(pythons["trl"], "trl", work)
    return float("inf") if answer is None else answer["gap"]


# --- results ---


def report(runs: list[Run], axes: list[str], gap: float | None) -> str:
    """Return the tables as Markdown, below a line about the machine."""
    lines = [line for axis in axes for line in table_of(axis, runs)]
    heading = ["axis", "arm", "median (least to most)", "ours against it (rounds)"]
    table = side_by_side.markdown(heading, lines)
    loads = [run.load for run in runs]
    facts = machine()
    head = (
        f"{facts['date']}, {facts['processor']}, {facts['cores']} cores,"
        f" load {min(loads):.1f} to {max(loads):.1f}\n"
    )
    if gap is None:
        return f"{head}\n{table}"
    verdict = "passed" if gap < LARGEST_GAP else "FAILED"
    agreement = f"Log-probs against transformers: largest difference {gap:.1e}, {verdict}.\n"
    return f"{head}\n{table}\n{agreement}"


def table_of(axis: str, runs: list[Run]) -> list[tuple[str, str, str, str]]:
    """Return lines (axis, arm, spread, ratio).

    Values are seconds, and the ratio is the peer's time over ours. For memory, values are MiB, and
    the ratio is ours over the peer's.
    """
    parts: dict[str, Take]
    if axis == "rollout":
        results = [run.result for run in runs if run.shape == axis and run.result]
        names = dict.fromkeys(name for result in results for name in result["seconds"])
        parts = {f"{axis}, {name}, s": rollouts_of(name) for name in names}
    elif axis == "memory":
        parts = {
            "memory, MiB": peak("steps_bytes"),
            "memory above the loaded model, MiB": peak("steps_bytes", above_model=True),
            "memory with compilation, MiB": peak("peak_bytes"),
        }
    elif axis == "update":
        parts = {"update, s": times_of("update_seconds")}
    else:
        parts = {
            f"{axis}, s": times_of("seconds"),
            f"rollout of {axis}, s": times_of("rollout_seconds"),
            f"{axis}, CPU s": times_of("cpu_seconds"),
        }
    lines = []
    for name, take in parts.items():
        rows = side_by_side.rows(samples(axis, runs, take), ours_over_peer=axis == "memory")
        lines += [(name, *row) for row in rows]
    return lines


Take = Callable[[dict[str, Any]], Sample]
"""Takes a sample out of an engine's answer."""


def samples(axis: str, runs: list[Run], take: Take) -> dict[str, list[Sample | None]]:
    """Return arm -> samples, round by round, of the arms that the axis compares."""
    shape = PARTS.get(axis, axis)
    hidden = {arm for name, arms in VARIANTS.items() if name != axis for arm in arms}
    by_arm: dict[str, list[Sample | None]] = {}
    for run in sorted(runs, key=lambda run: run.round):
        if run.shape == shape and run.arm not in hidden:
            by_arm.setdefault(run.arm, []).append(take(run.result) if run.result else None)
    return by_arm


def times_of(name: str) -> Take:
    return lambda result: Sample(tuple(result[name]), tuple(result["tokens"]))


def rollouts_of(name: str) -> Take:
    return lambda result: Sample(tuple(result["seconds"][name]), (result["tokens"][name],))


def peak(name: str, above_model: bool = False) -> Take:
    def take(result: dict[str, Any]) -> Sample:
        size = result[name] - (result["loaded_bytes"] if above_model else 0)
        return Sample((size / 2**20,), tuple(result["tokens"]))

    return take


def machine() -> dict[str, Any]:
    """Return facts about this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%d %b %Y"),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
