"""The same work by tpu_rl, TRL and Tunix, side by side on this machine: seconds, memory, and whether they agree.

    python bench/peers.py [--rounds 3] [--engines ours trl tunix]
                          [--axes step prompt_heavy long_tail rollout update memory]
                          [--to runs/peers] [--environments FOLDER] [--steps 3] [--warmup 2] [--small]

All train or sample the same Llama of 12.6 million random weights in float32 on the same random prompts, draw as many
tokens in each step, with AdamW, no reference model, rewards by the same Python function. Round by round each runs in a
process of its own, in rotating order; first steps, which compile, do not count.

    step          GRPO, 8 prompts x 8 completions, 64 + 64 tokens; from one step to the next, whole
    prompt_heavy  8 x 16, 256 + 32
    long_tail     16 x 8, 64 + up to 192: mean 39, 95th percentile 114; the lengths are the same everywhere, and unknown
                  to what draws; TRL also with its continuous batching
    rollout       64 + 128 tokens, 32 and 64 rows, sampled and greedy; TRL's is transformers' generate
    update        the part of `step` behind the rewards
    memory        the part of `step`: the most that its process holds in memory; TRL also with checkpointed activations

Ours is launch/run.py itself, with logging and checkpoints; peers write no checkpoints. The peers' environments are made
once by `python -m venv` and pip, in the user's cache folder, and take gigabytes. Gates: our sampler's log-probs against
transformers' of the same tokens, below 1e-4; no ratio where numbers of tokens differ. Writes TO/peers.json (everything)
and TO/peers.md (the tables); the same command on the same folder goes on where it stopped.
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

import side_by_side  # noqa: E402
from protocol import FIRST_WORD, VOCABULARY, Work  # noqa: E402
from side_by_side import OURS, Sample  # noqa: E402

LARGEST_GAP = 1e-4
"""Between our log-probs and transformers'."""
REQUIREMENTS = {"trl": ("trl==1.16.0", "torch==2.13.0"), "tunix": ("google-tunix==0.1.7",)}
"""What pip puts into an engine's environment. torch is pinned: newer ones may not be there for this transformers."""
LIMIT = 3600
"""Seconds for one engine's part of one round."""


@dataclass(frozen=True)
class Shape:
    """The work of an axis."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    long_tail: bool = False
    batches: tuple[int, ...] = ()
    """Of rollouts alone."""


SHAPES = {
    "step": Shape(8, 8, 64, 64),
    "prompt_heavy": Shape(8, 16, 256, 32),
    "long_tail": Shape(16, 8, 64, 192, long_tail=True),
    "rollout": Shape(64, 1, 64, 128, batches=(32, 64)),
}
SMALL = {
    "step": Shape(2, 4, 16, 8),
    "prompt_heavy": Shape(2, 4, 32, 4),
    "long_tail": Shape(2, 4, 16, 12, long_tail=True),
    "rollout": Shape(4, 1, 16, 8, batches=(2, 4)),
}
PARTS = {"update": "step", "memory": "step"}
"""Axes that are a part of what another's runs measure."""
VARIANTS = {"long_tail": ("trl continuous",), "memory": ("trl checkpointing",)}
"""Arms besides the engines themselves: an engine, and another of its ways."""


@dataclass(frozen=True)
class Run:
    """What one process did."""

    round: int
    shape: str
    arm: str
    load: float
    """The machine's load average over one minute, before."""
    result: dict[str, Any] | None
    """What the engine wrote; None where it failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=[OURS, *REQUIREMENTS], choices=[OURS, *REQUIREMENTS])
    parser.add_argument("--axes", nargs="+", default=[*SHAPES, *PARTS], choices=[*SHAPES, *PARTS])
    parser.add_argument("--to", type=Path, default=Path("runs/peers"))
    parser.add_argument("--environments", type=Path, default=cache_folder())
    parser.add_argument("--steps", type=int, default=3, help="that count, in each round")
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--small", action="store_true", help="tiny work: does it run?")
    flags = parser.parse_args()
    folder = flags.to.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    pythons = {name: python_of(name, flags.environments) for name in flags.engines}
    model = folder / "model"
    do(sys.executable, OURS, Work("write_model", str(folder / "write_model"), str(model)))
    shapes = SMALL if flags.small else SHAPES
    runs: list[Run] = []
    for round_ in range(flags.rounds):
        for axis in dict.fromkeys(PARTS.get(axis, axis) for axis in flags.axes):
            work = work_of(shapes[axis], str(model), flags.warmup, flags.steps)
            for arm in side_by_side.rotated(arms_of(axis, flags.axes, flags.engines), round_):
                runs.append(run_arm(arm, axis, round_, work, pythons, folder))
    gap = log_prob_gap(runs, pythons, folder, str(model))
    text = report(runs, flags.axes, gap)
    print(text, flush=True)
    (folder / "peers.md").write_text(text, encoding="utf-8")
    everything = {"machine": machine(), "gap": gap, "flags": vars(flags), "runs": [vars(run) for run in runs]}
    (folder / "peers.json").write_text(json.dumps(everything, indent=1, default=str), encoding="utf-8")
    return int(any(run.result is None for run in runs) or (gap is not None and gap >= LARGEST_GAP))


# --- the peers' environments -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "tpu_rl" / "peers"


def python_of(engine: str, environments: Path) -> str:
    """The interpreter that has what the engine needs; its environment is made where there is none."""
    if engine == OURS:
        return sys.executable
    place, wanted = environments.absolute() / engine, "\n".join(REQUIREMENTS[engine])
    python, made = place / "bin" / "python", place / "made"
    if not made.is_file() or made.read_text(encoding="utf-8") != wanted:
        print(f"making the environment of {engine} in {place} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS[engine]], check=True)
        made.write_text(wanted, encoding="utf-8")
    return str(python)


# --- work --------------------------------------------------------------------------------------------------------


def work_of(shape: Shape, model: str, warmup: int, steps: int) -> Work:
    """The same prompts and lengths whenever it is asked; other ones in each step."""
    rng = random.Random(0)

    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(shape.prompt_tokens))

    def length() -> int:
        return min(int(rng.lognormvariate(3.276, 0.88)) + 1, shape.new_tokens)

    count = warmup + steps
    return Work(
        "rollout" if shape.batches else "step",
        folder="",
        model=model,
        prompts=tuple(tuple(prompt() for _ in range(shape.prompts)) for _ in range(count)),
        group=shape.group,
        new_tokens=shape.new_tokens,
        lengths=tuple(tuple(length() for _ in range(shape.prompts * shape.group)) for _ in range(count))
        if shape.long_tail
        else (),
        warmup=warmup,
        batches=shape.batches,
    )


def arms_of(shape: str, axes: list[str], engines: list[str]) -> list[str]:
    """Who does the work of a shape for those axes."""
    wanted = [axis for axis in axes if PARTS.get(axis, axis) == shape]
    others = [arm for axis in wanted for arm in VARIANTS.get(axis, ()) if arm.split()[0] in engines]
    return [*engines, *others]


def run_arm(arm: str, shape: str, round_: int, work: Work, pythons: dict[str, str], folder: Path) -> Run:
    engine, _, variant = arm.partition(" ")
    place = folder / f"{shape}-{round_}-{arm.replace(' ', '-')}"
    work = replace(work, folder=str(place), variant=variant)
    kept = place / "run.json"
    if kept.is_file() and (place / "work.json").read_text(encoding="utf-8") == work.text():
        return Run(**json.loads(kept.read_text(encoding="utf-8")))
    load = os.getloadavg()[0]
    run = Run(round_, shape, arm, load, do(pythons[engine], engine, work))
    if run.result is not None:
        kept.write_text(json.dumps(vars(run)), encoding="utf-8")
    said = "failed" if run.result is None else f"{json.dumps(run.result['seconds'])} s"
    print(f"{time.strftime('%H:%M:%S')} round {round_ + 1} {shape} {arm}: {said} (load {load:.1f})", flush=True)
    return run


def do(python: str, engine: str, work: Work) -> dict[str, Any] | None:
    """What an engine's process answers; None, and where to read why, where it fails."""
    place = Path(work.folder)
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    given, answer, log = place / "work.json", place / "result.json", place / "log.txt"
    given.write_text(work.text(), encoding="utf-8")
    command = [python, str(HERE / "engines" / f"{engine}_engine.py"), str(given), str(answer)]
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if engine != OURS:  # which keeps what it compiles by itself
        own["JAX_COMPILATION_CACHE_DIR"] = str(Path(python).parents[1] / "compiled")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    with log.open("w", encoding="utf-8") as out:
        code = subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=LIMIT, check=False).returncode
    if code or not answer.is_file():
        print(f"error: {engine} ended with exit code {code}; see {log}", file=sys.stderr, flush=True)
        return None
    return json.loads(answer.read_text(encoding="utf-8"))


def log_prob_gap(runs: list[Run], pythons: dict[str, str], folder: Path, model: str) -> float | None:
    """The largest between our sampler's log-probs and transformers'; None where not both have run."""
    drawn = [run.result["drawn"] for run in runs if run.arm == OURS and run.result and "drawn" in run.result]
    if not drawn or "trl" not in pythons:
        return None
    found = do(pythons["trl"], "trl", Work("score", str(folder / "score"), model, drawn=drawn[-1]))
    return float("inf") if found is None else found["gap"]


# --- what came of it ---------------------------------------------------------------------------------------------


def report(runs: list[Run], axes: list[str], gap: float | None) -> str:
    lines = [line for axis in axes for line in table_of(axis, runs)]
    shown = side_by_side.markdown(["axis", "arm", "median (least to most)", "ours against it (rounds)"], lines)
    loads = [run.load for run in runs]
    told = machine()
    head = f"{told['date']}, {told['processor']}, {told['cores']} cores, load {min(loads):.1f} to {max(loads):.1f}\n"
    if gap is None:
        return f"{head}\n{shown}"
    verdict = "passed" if gap < LARGEST_GAP else "FAILED"
    return f"{head}\n{shown}\nLog-probs against transformers: largest difference {gap:.1e}, {verdict}.\n"


def table_of(axis: str, runs: list[Run]) -> list[tuple[str, str, str, str]]:
    """Lines (axis, arm, spread, ratio). Seconds, and the ratio is how many times as long the peer takes; of memory MiB,
    and which share of the peer's ours takes."""
    if axis == "rollout":
        names = [name for run in runs if run.shape == axis and run.result for name in run.result["seconds"]]
        parts = {f"{axis}, {name}, s": rollouts_of(name) for name in dict.fromkeys(names)}
    elif axis == "memory":
        parts = {"memory, MiB": peak("steps_bytes"), "memory above the loaded model, MiB": peak("steps_bytes", True)}
        parts["memory with compilation, MiB"] = peak("peak_bytes")
    elif axis == "update":
        parts = {"update, s": times_of("update_seconds")}
    else:
        parts = {f"{axis}, s": times_of("seconds"), f"rollout of {axis}, s": times_of("rollout_seconds")}
        parts[f"{axis}, CPU s"] = times_of("cpu_seconds")
    found = []
    for name, take in parts.items():
        arms = samples(axis, runs, take)
        found += [(name, *row) for row in side_by_side.rows(arms, ours_over_peer=axis == "memory")]
    return found


Take = Callable[[dict[str, Any]], Sample]


def samples(axis: str, runs: list[Run], take: Take) -> dict[str, list[Sample | None]]:
    """Arm -> round by round what it did, of the arms that the axis compares."""
    shape = PARTS.get(axis, axis)
    others = {arm for name, arms in VARIANTS.items() if name != axis for arm in arms}
    arms: dict[str, list[Sample | None]] = {}
    for run in sorted((run for run in runs if run.shape == shape), key=lambda run: run.round):
        if run.arm not in others:
            arms.setdefault(run.arm, []).append(take(run.result) if run.result else None)
    return arms


def times_of(name: str) -> Take:
    return lambda result: Sample(tuple(result[name]), tuple(result["tokens"]))


def rollouts_of(name: str) -> Take:
    return lambda result: Sample(tuple(result["seconds"][name]), (result["tokens"][name],))


def peak(name: str, above: bool = False) -> Take:
    def take(result: dict[str, Any]) -> Sample:
        amount = result[name] - (result["loaded_bytes"] if above else 0)
        return Sample((amount / 2**20,), tuple(result["tokens"]))

    return take


def machine() -> dict[str, Any]:
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
