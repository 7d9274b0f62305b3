"""Jobs ended at random moments of every phase of a run, then the same command again: are the bits the same at the end?

    python bench/kill.py --to runs/kill [--presets arithmetic_grpo=100 arithmetic_ppo=20 ...] [--signal kill|term]
                         [--phases compile rollout ...] [--seed 0] [--processes 2]

Small versions of the presets; "default" is the default run itself. Each is first left in peace, twice: the second
time, with a warm compilation cache, gives the digest, the rows and how long each phase takes. Then, for each kill, a
fresh run folder; a phase, in turn; and a moment drawn uniformly from its time. `rollout`, `reward` and `update` are
places in a random step by the median times of the undisturbed run; `save`, `purge` and `export` are entered when their
files appear.

Checked at once: verify.py finds no fault, and the checkpoints take no more than (2 + 1.5) times the size of one. After
a SIGTERM: exit code 75 within 10 s, and the last step in metrics.jsonl is the one saved; or 0, if it had just finished;
or the signal's own end, before there was a step or after its summary was written. Of several processes the signal goes
to one, any of them, and all must end, within a minute. Checked at the end: nothing that was saved is lost, and
parameters, metrics rows and samples are those of the undisturbed run. One JSON line each in TO/kills.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launch import config, verify  # noqa: E402
from launch.config import ExperimentConfig, Phase  # noqa: E402
from tpu_rl.algos import DistillConfig, QSharpConfig  # noqa: E402

STEPS = 8
DEFAULT_RUN = "default"
DEFAULT = ("arithmetic_grpo", "arithmetic_ppo", "arithmetic_dpo", "arithmetic_q_sharp", "arithmetic_gkd")
PHASES = ("compile", "rollout", "reward", "update", "save", "purge", "export")
SECONDS_TO_LEAVE = 10
SECONDS_TO_NOTICE = 60
"""That one of several processes was killed."""
MOST_CHECKPOINTS = 3.5


def small(name: str, teacher: Path) -> ExperimentConfig:
    """A version of a preset of seconds: 8 steps, a checkpoint every 2."""
    if name == DEFAULT_RUN:
        return config.preset("arithmetic_grpo")
    one = config.preset(name)
    changes: dict[str, Any] = {}
    if isinstance(one.algorithm, QSharpConfig):
        algorithm = replace(one.algorithm, prompts=16)
        changes = {"algorithm": algorithm, "phases": (Phase(algorithm, until=STEPS // 2, forget=("q",)),)}
    if isinstance(one.algorithm, DistillConfig):
        changes = {"algorithm": replace(one.algorithm, teacher=str(teacher))}
    return replace(
        one,
        batch=replace(one.batch, prompts=min(one.batch.prompts, 8), minibatches=1),
        evaluation=replace(one.evaluation, rows=16, every=STEPS // 2),
        optimizer=replace(one.optimizer, warmup_steps=0),
        steps=STEPS,
        checkpoint_every=2,
        **changes,
    )


# --- runs --------------------------------------------------------------------------------------------------------


class Whole(NamedTuple):
    """An undisturbed run."""

    digest: str
    rows: list[dict]
    samples: bytes
    compile: float
    """Seconds until the row of step 1."""
    step: dict[str, tuple[float, float]]
    """Phase of a step -> when it begins and ends, in seconds after the row of the step before."""
    export: float
    """Seconds from the last row to the end."""
    checkpoint_bytes: int
    steps: int
    every: int
    """Steps from one checkpoint to the next."""


class Job:
    """The processes of one run, of which `victim` gets the signals."""

    def __init__(self, processes: list[subprocess.Popen], victim: int):
        self.processes, self.victim = processes, processes[victim]

    def said(self) -> str:
        """What they said until their end."""
        return "".join(process.communicate()[0] for process in self.processes)

    @property
    def codes(self) -> list[int]:
        """How they ended, the victim first."""
        return [self.victim.returncode] + [one.returncode for one in self.processes if one is not self.victim]


def start(yaml: Path, folder: Path, cache: Path, processes: int = 1, victim: int = 0) -> Job:
    warm = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, str(ROOT / "launch/run.py"), str(yaml), "--run-dir", str(folder)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = ["--coordinator-address", f"127.0.0.1:{free.getsockname()[1]}", "--num-processes", str(processes)]

    def one(index: int) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, *where, "--process-id", str(index)],
            env=os.environ | warm,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    return Job([one(index) for index in range(processes)], victim)


def rows_of(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl that are there by now."""
    path = folder / verify.METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def results(folder: Path) -> tuple[str, list[dict], bytes]:
    """(digest, metrics rows without times, samples) of a finished run."""
    digest = json.loads((folder / verify.SUMMARY).read_text(encoding="utf-8"))["params_digest"]
    timeless = [{k: v for k, v in row.items() if not k.startswith(("time", "perf/"))} for row in rows_of(folder)]
    samples = folder / verify.SAMPLES
    return digest, timeless, samples.read_bytes() if samples.exists() else b""


def undisturbed(yaml: Path, folder: Path, cache: Path, processes: int) -> Whole:
    began = time.time()
    job = start(yaml, folder, cache, processes)
    said = job.said()
    ended = time.time()
    if any(job.codes):
        raise SystemExit(f"the undisturbed run failed:\n{said}")
    rows = rows_of(folder)

    def median(name: str) -> float:
        return statistics.median(float(row.get(name) or 0) for row in rows[1:])

    rolled, rewarded = median("time/rollout"), median("time/rollout") + median("time/reward")
    moments = {"rollout": (0, rolled), "reward": (rolled, rewarded), "update": (rewarded, median("time/step"))}
    given = config.load(yaml)
    one = size_of(folder / "checkpoints" / str(given.steps))
    ends = ended - rows[-1]["time"]
    return Whole(*results(folder), rows[1]["time"] - began, moments, ends, one, given.steps, given.checkpoint_every)


def size_of(folder: Path) -> int:
    """Bytes of its files; those that vanish meanwhile count as nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


# --- moments -----------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """When the signal is sent: so many seconds after something is there."""

    reached: Callable[[Path], bool]
    delay: float


def moment_of(phase: str, whole: Whole, chance: random.Random) -> Moment:
    rows = chance.randint(1, whole.steps)

    def some_checkpoint(pattern: str) -> Callable[[Path], bool]:
        wanted = whole.every * chance.randint(1, whole.steps // whole.every)

        def reached(folder: Path) -> bool:
            names = [path.name for path in folder.glob(f"checkpoints/{pattern}")]
            return any(int(number.group()) >= wanted for name in names if (number := re.match(r"\d+", name)))

        return reached

    match phase:
        case "compile":
            return Moment(lambda folder: True, chance.uniform(0, whole.compile))
        case "save":
            return Moment(some_checkpoint("*.orbax-checkpoint-tmp*"), chance.uniform(0, 0.2))
        case "purge":
            # The third checkpoint has the first renamed away, and so on.
            last = whole.every * chance.randint(3, whole.steps // whole.every)
            return Moment(lambda folder: (folder / f"checkpoints/{last}").exists(), chance.uniform(0, 0.05))
        case "export":
            return Moment(lambda folder: len(rows_of(folder)) > whole.steps, chance.uniform(0, whole.export))
        case _:
            return Moment(lambda folder: len(rows_of(folder)) >= rows, chance.uniform(*whole.step[phase]))


def reached_by(process: subprocess.Popen, folder: Path, moment: Moment) -> bool:
    """Wait for the moment; False if the process ends before."""
    while process.poll() is None and not moment.reached(folder):
        time.sleep(0.001)
    until = time.monotonic() + moment.delay
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.0005)
    return process.poll() is None


# --- one kill ----------------------------------------------------------------------------------------------------


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdecimal()), default=-1)


class Runs(NamedTuple):
    """How a preset is run."""

    yaml: Path
    cache: Path
    processes: int


def kill(
    runs: Runs, folder: Path, whole: Whole, moment: Moment, number: signal.Signals, victim: int = 0
) -> dict[str, Any]:
    """What was found: `faults` is empty where all is well."""
    faults = []
    job = start(runs.yaml, folder, runs.cache, runs.processes, victim)
    if reached_by(job.victim, folder, moment):
        job.victim.send_signal(number)
    sent = time.monotonic()
    said = job.said()
    seconds = time.monotonic() - sent
    saved, rows = newest_checkpoint(folder), rows_of(folder)
    if number == signal.SIGTERM:
        done = (folder / verify.SUMMARY).exists()
        faults += left_badly(job.codes[0], seconds, saved, len(rows) - 1, said, done)
        if job.codes[0] in (0, 75) and len(set(job.codes)) > 1:
            faults.append(f"they ended with {job.codes}")
    elif runs.processes > 1 and job.codes[0] and (set(job.codes[1:]) != {75} or seconds > SECONDS_TO_NOTICE):
        faults.append(f"the others ended with {job.codes[1:]} after {seconds:.1f} s: {said[-500:]}")
    if (folder / "config.yaml").exists():
        faults += [finding.text for finding in faults_of(folder)]
    used = size_of(folder / "checkpoints") / whole.checkpoint_bytes
    if used > MOST_CHECKPOINTS:
        faults.append(f"the checkpoints take {used:.2f} times the size of one")

    faults += faults_of_going_on(runs, folder, whole, saved)
    return {"codes": job.codes, "seconds": round(seconds, 2), "rows": len(rows), "saved": saved,
            "checkpoints": round(used, 2), "faults": faults}  # fmt: skip


def faults_of_going_on(runs: Runs, folder: Path, whole: Whole, saved: int) -> list[str]:
    """What is wrong after the same command, which is to go on from step `saved` at least."""
    again = start(runs.yaml, folder, runs.cache, runs.processes)
    said = again.said()
    resumed = re.search(r"resumed at step (\d+)", said)
    if any(again.codes):
        return [f"the same command ended with {again.codes}: {said[-500:]}"]
    found = zip(("digest", "rows", "samples"), results(folder), whole[:3], strict=True)
    faults = [f"other {name}" for name, now, then in found if now != then]
    if saved >= 0 and "finished" not in said and (resumed is None or int(resumed.group(1)) < saved):
        faults.append(f"step {saved} was saved, and the run resumed at {resumed and resumed.group(1)}")
    return faults + [finding.text for finding in faults_of(folder)]


def faults_of(folder: Path) -> list[verify.Finding]:
    """Of a run that has rows; before its first one it may lack any file."""
    return [finding for finding in verify.verify(str(folder)) if finding.is_fault] if rows_of(folder) else []


def left_badly(code: int, seconds: float, saved: int, last: int, said: str, done: bool) -> list[str]:
    """What was wrong with how a run ended after SIGTERM; `last` is the step of its last row. One that is `done` only
    has its process to end."""
    faults = []
    if code == 75 and last > 0 and saved != last:
        faults.append(f"step {last} was taken and step {saved} is saved")
    if code == -signal.SIGTERM and last > 0 and not done:
        faults.append("the signal ended it in the midst of the run")
    if code not in (0, 75, -signal.SIGTERM):
        faults.append(f"it ended with {code}: {said[-500:]}")
    if seconds > SECONDS_TO_LEAVE and code != 0:
        faults.append(f"it left after {seconds:.1f} s")
    return faults


# --- all ---------------------------------------------------------------------------------------------------------


def kills_of(word: str, default: int) -> tuple[str, int]:
    """ "NAME=20" or "NAME" -> (name, kills)."""
    name, _, count = word.partition("=")
    return name, int(count or default)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--presets", nargs="+", default=list(DEFAULT), help="NAME or NAME=KILLS")
    parser.add_argument("--kills", type=int, default=20, help="of each preset that says no number")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--signal", choices=("kill", "term"), default="kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    flags = parser.parse_args()
    number = signal.SIGKILL if flags.signal == "kill" else signal.SIGTERM
    chance, bad, total = random.Random(flags.seed), 0, 0
    cache = flags.to / "compiled"
    presets = dict(kills_of(word, flags.kills) for word in flags.presets)
    if any(isinstance(small(name, flags.to).algorithm, DistillConfig) for name in presets):
        presets = {"arithmetic_grpo": 0} | presets  # whose model teaches
    teacher = flags.to / "arithmetic_grpo" / "warm" / "model"
    for name, kills in presets.items():
        folder = flags.to / name
        folder.mkdir(parents=True)
        yaml = folder / "start.yaml"
        config.save(small(name, teacher), yaml)
        undisturbed(yaml, folder / "cold", cache, flags.processes)
        whole = undisturbed(yaml, folder / "warm", cache, flags.processes)
        for index, phase in zip(range(kills), itertools.cycle(flags.phases)):
            moment = moment_of(phase, whole, chance)
            victim = chance.randrange(flags.processes)
            runs, to = Runs(yaml, cache, flags.processes), folder / f"{flags.signal}_{flags.seed}_{index}"
            found = kill(runs, to, whole, moment, number, victim)
            line = {"preset": name, "signal": flags.signal, "phase": phase, "kill": index, "victim": victim} | found
            with (flags.to / "kills.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
            total, bad = total + 1, bad + bool(found["faults"])
    print(f"{total - bad} of {total} without a fault")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
