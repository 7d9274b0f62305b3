"""Kill runs at random moments of every phase and run the same command again: are the bits the same?

    python bench/kill.py --to runs/kill [--presets arithmetic_grpo=100 arithmetic_ppo=20 ...]
        [--signal kill|term] [--phases compile rollout ...] [--seed 0] [--processes 2]

Uses small versions of the presets; "default" is the default run itself. Each preset first runs
twice without interruption. The second time, with a warm compilation cache, gives the digest, the
rows and the duration of each phase. Then each kill has a fresh run folder, the next phase in turn,
and a uniformly random moment in that phase. `rollout`, `reward` and `update` are places in a random
step, by the median times of the uninterrupted run; `save`, `purge` and `export` begin when their
files appear.

After the kill, verify.py must find no fault, and all checkpoints together must be no larger than
(2 + 1.5) times one. After a SIGTERM the exit code must be 75, within 10 s, and the last step in
metrics.jsonl must be the saved one. Exit code 0 is right if the run had just finished, and the
signal's own exit before the first step or after the summary. With several processes the signal goes
to a random one, and all must end within a minute. After the second run, nothing that was saved may
be lost, and parameters, metrics rows and samples must be those of the uninterrupted run. Each kill
is one JSON line in TO/kills.jsonl.
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

from tpu_rl.algos import DistillConfig, QSharpConfig
from tpu_rl.commands import config
from tpu_rl.commands.config import CheckpointConfig, ExperimentConfig, Phase
from tpu_rl.commands.tools.verify import verify
from tpu_rl.metrics import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from tpu_rl.runtime import process_group

STEPS = 8
DEFAULT_RUN = "default"
DEFAULT = (
    "arithmetic_grpo",
    "arithmetic_ppo",
    "arithmetic_dpo",
    "arithmetic_q_sharp",
    "arithmetic_gkd",
)
PHASES = ("compile", "rollout", "reward", "update", "save", "purge", "export")
SECONDS_TO_LEAVE = 10
"""After a SIGTERM."""
SECONDS_TO_NOTICE = 60
"""Until the other processes end after one of them was killed."""
MAX_CHECKPOINTS = 3.5
"""Size of all checkpoints, in checkpoints."""


def small(name: str, teacher: Path) -> ExperimentConfig:
    """Return a version of a preset that takes seconds: 8 steps, a checkpoint every 2."""
    if name == DEFAULT_RUN:
        return config.preset("arithmetic_grpo")
    preset = config.preset(name)
    changes: dict[str, Any] = {}
    if isinstance(preset.algorithm, QSharpConfig):
        algorithm = replace(preset.algorithm, prompts=16)
        changes = {
            "algorithm": algorithm,
            "phases": (Phase(algorithm, until=STEPS // 2, reset_roles=("q",)),),
        }
    if isinstance(preset.algorithm, DistillConfig):
        changes = {"algorithm": replace(preset.algorithm, teacher=str(teacher))}
    return replace(
        preset,
        batch=replace(preset.batch, prompts=min(preset.batch.prompts, 8), num_minibatches=1),
        evaluation=replace(preset.evaluation, rows=16, interval=STEPS // 2),
        optimizer=replace(preset.optimizer, warmup_steps=0),
        steps=STEPS,
        checkpoint=CheckpointConfig(2),
        **changes,
    )


# --- runs ---


class Uninterrupted(NamedTuple):
    """An uninterrupted run."""

    digest: str
    rows: list[dict]
    samples: list[dict]
    compile: float
    """Seconds until the row of step 1."""
    phases: dict[str, tuple[float, float]]
    """Phase of a step -> start and end, in seconds after the row of the previous step."""
    export: float
    """Seconds from the last row to the end."""
    checkpoint_bytes: int
    steps: int
    checkpoint_every: int


class Job:
    """The processes of one run. `victim` is the one that gets the signals."""

    def __init__(self, processes: list[subprocess.Popen], victim: int):
        self.processes = processes
        self.victim = processes[victim]

    def wait(self) -> str:
        """Wait until all have ended and return their output."""
        return "".join(process.communicate()[0] for process in self.processes)

    @property
    def codes(self) -> list[int]:
        """Exit codes, that of the victim first."""
        others = [process for process in self.processes if process is not self.victim]
        return [process.returncode for process in (self.victim, *others)]


def start(yaml: Path, folder: Path, cache: Path, processes: int = 1, victim: int = 0) -> Job:
    """Start a run from a configuration file."""
    cache_settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, str(ROOT / "launch/run.py"), str(yaml), "--run-dir", str(folder)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command += ["--coordinator-address", address, "--num-processes", str(processes)]

    def start_process(index: int) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, "--process-id", str(index)],
            env=os.environ | cache_settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    return Job([start_process(index) for index in range(processes)], victim)


def metrics_rows(folder: Path) -> list[dict]:
    """Return the complete rows of metrics.jsonl so far."""
    path = folder / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def results(folder: Path) -> tuple[str, list[dict], list[dict]]:
    """Return (digest, metrics rows without times, samples without times) of a finished run."""
    digest = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["params_digest"]
    timeless = [
        {name: value for name, value in row.items() if not name.startswith(("time", "perf/"))}
        for row in metrics_rows(folder)
    ]
    path = folder / SAMPLES_FILE
    samples = map(json.loads, path.read_text("utf-8").splitlines()) if path.exists() else ()
    return digest, timeless, [{**sample, "seconds": None} for sample in samples]


def run_uninterrupted(yaml: Path, folder: Path, cache: Path, processes: int) -> Uninterrupted:
    """Run a configuration to its end and measure its phases."""
    start_time = time.time()
    job = start(yaml, folder, cache, processes)
    output = job.wait()
    end_time = time.time()
    if any(job.codes):
        raise SystemExit(f"the uninterrupted run failed:\n{output}")
    rows = metrics_rows(folder)

    def median(name: str) -> float:
        return statistics.median(float(row.get(name) or 0) for row in rows[1:])

    rollout_end = median("time/rollout")
    reward_end = rollout_end + median("time/reward")
    run_config = config.load(yaml)
    digest, timeless, samples = results(folder)
    return Uninterrupted(
        digest=digest,
        rows=timeless,
        samples=samples,
        compile=rows[1]["time"] - start_time,
        phases={
            "rollout": (0, rollout_end),
            "reward": (rollout_end, reward_end),
            "update": (reward_end, median("time/step")),
        },
        export=end_time - rows[-1]["time"],
        checkpoint_bytes=size_of(folder / "checkpoints" / str(run_config.steps)),
        steps=run_config.steps,
        checkpoint_every=run_config.checkpoint.interval,
    )


def size_of(folder: Path) -> int:
    """Return the bytes of its files. A file that vanishes meanwhile counts as nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


# --- moments ---


class Moment(NamedTuple):
    """The moment of the signal: `delay` seconds after `reached` is true of the run folder."""

    reached: Callable[[Path], bool]
    delay: float


def random_moment(phase: str, whole: Uninterrupted, rng: random.Random) -> Moment:
    """Return a random moment in a phase."""
    rows = rng.randint(1, whole.steps)
    every = whole.checkpoint_every
    match phase:
        case "compile":
            return Moment(lambda folder: True, rng.uniform(0, whole.compile))
        case "save":
            step = every * rng.randint(1, whole.steps // every)
            return Moment(lambda folder: is_saving(folder, step), rng.uniform(0, 0.2))
        case "purge":
            # When the third checkpoint is there, the first is renamed and deleted, and so on.
            step = every * rng.randint(3, whole.steps // every)
            return Moment(
                lambda folder: (folder / f"checkpoints/{step}").exists(), rng.uniform(0, 0.05)
            )
        case "export":
            return Moment(
                lambda folder: len(metrics_rows(folder)) > whole.steps,
                rng.uniform(0, whole.export),
            )
        case _:
            return Moment(
                lambda folder: len(metrics_rows(folder)) >= rows, rng.uniform(*whole.phases[phase])
            )


def is_saving(folder: Path, step: int) -> bool:
    """Return True if a checkpoint of this step or a later one is being written."""
    names = [path.name for path in folder.glob("checkpoints/*.orbax-checkpoint-tmp*")]
    numbers = [re.match(r"\d+", name) for name in names]
    return any(int(number.group()) >= step for number in numbers if number)


def wait_for(process: subprocess.Popen, folder: Path, moment: Moment) -> bool:
    """Wait for the moment. Returns False if the process ends before it."""
    while process.poll() is None and not moment.reached(folder):
        time.sleep(0.001)
    deadline = time.monotonic() + moment.delay
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    return process.poll() is None


# --- one kill ---


def newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint, or -1."""
    steps = [path.name for path in folder.glob("checkpoints/*") if path.name.isdecimal()]
    return max(map(int, steps), default=-1)


class Launch(NamedTuple):
    """The command of a run."""

    yaml: Path
    cache: Path
    processes: int


def kill(
    launch: Launch,
    folder: Path,
    whole: Uninterrupted,
    moment: Moment,
    number: signal.Signals,
    victim: int = 0,
) -> dict[str, Any]:
    """Kill a run, run it again, and return what was found: `faults` is empty if all is well."""
    faults = []
    job = start(launch.yaml, folder, launch.cache, launch.processes, victim)
    if wait_for(job.victim, folder, moment):
        job.victim.send_signal(number)
    sent = time.monotonic()
    output = job.wait()
    seconds = time.monotonic() - sent
    saved = newest_checkpoint(folder)
    rows = metrics_rows(folder)
    code, *other_codes = job.codes
    if number == signal.SIGTERM:
        is_done = (folder / SUMMARY_FILE).exists()
        faults += sigterm_faults(code, seconds, saved, len(rows) - 1, output, is_done)
        if code in (0, 75) and len(set(job.codes)) > 1:
            faults.append(f"they ended with {job.codes}")
    elif launch.processes > 1 and code and others_left_badly(other_codes, seconds, output):
        end = output[-500:]
        faults.append(f"the others ended with {other_codes} after {seconds:.1f} s: {end}")
    if (folder / "config.yaml").exists():
        faults += verify_faults(folder)
    checkpoints = size_of(folder / "checkpoints") / whole.checkpoint_bytes
    if checkpoints > MAX_CHECKPOINTS:
        faults.append(f"the checkpoints take {checkpoints:.2f} times the size of one")
    faults += resume_faults(launch, folder, whole, saved)
    return {
        "codes": job.codes,
        "seconds": round(seconds, 2),
        "rows": len(rows),
        "saved": saved,
        "checkpoints": round(checkpoints, 2),
        "faults": faults,
    }


def others_left_badly(codes: list[int], seconds: float, output: str) -> bool:
    """Return True if the processes that were not killed ended too late or with a wrong code.

    If they had not met yet, they wait for the killed one as long as for one that was never started.
    """
    before_they_met = "did not find each other" in output
    limit = SECONDS_TO_NOTICE + before_they_met * process_group.START_SECONDS
    return set(codes) != {75} or seconds > limit


def resume_faults(launch: Launch, folder: Path, whole: Uninterrupted, saved: int) -> list[str]:
    """Run the same command again. It must resume at step `saved` or later, and end with the results
    of the uninterrupted run."""
    job = start(launch.yaml, folder, launch.cache, launch.processes)
    output = job.wait()
    if any(job.codes):
        return [f"the same command ended with {job.codes}: {output[-500:]}"]
    digest, rows, samples = results(folder)
    faults = []
    if digest != whole.digest:
        faults.append("other digest")
    if rows != whole.rows:
        faults.append("other rows")
    if samples != whole.samples:
        faults.append("other samples")
    match = re.search(r"resumed at step (\d+)", output)
    resumed = int(match.group(1)) if match else None
    if saved >= 0 and "finished" not in output and (resumed is None or resumed < saved):
        faults.append(f"step {saved} was saved, and the run resumed at {resumed}")
    return faults + verify_faults(folder)


def verify_faults(folder: Path) -> list[str]:
    """Return the faults that verify.py finds. Before its first row a run may lack any file."""
    if not metrics_rows(folder):
        return []
    return [finding.text for finding in verify(str(folder)) if finding.is_fault]


def sigterm_faults(
    code: int, seconds: float, saved: int, last_step: int, output: str, is_done: bool
) -> list[str]:
    """List the faults of a run's end after SIGTERM.

    `last_step` is the step of its last row. A run that `is_done` has written its summary.
    """
    faults = []
    if code == 75 and last_step > 0 and saved != last_step:
        faults.append(f"step {last_step} was taken and step {saved} is saved")
    if code == -signal.SIGTERM and last_step > 0 and not is_done:
        faults.append("the signal killed it in the middle of the run")
    if code not in (0, 75, -signal.SIGTERM):
        faults.append(f"it ended with {code}: {output[-500:]}")
    if seconds > SECONDS_TO_LEAVE and code != 0:
        faults.append(f"it left after {seconds:.1f} s")
    return faults


# --- all kills ---


def parse_preset(word: str, default: int) -> tuple[str, int]:
    """Parse "NAME=20" or "NAME" as (name, kills)."""
    name, _, count = word.partition("=")
    return name, int(count or default)


def kill_preset(
    name: str, kills: int, teacher: Path, flags: argparse.Namespace, rng: random.Random
) -> int:
    """Kill a preset so often. Returns the number of kills with faults."""
    number = signal.SIGKILL if flags.signal == "kill" else signal.SIGTERM
    folder = flags.to / name
    folder.mkdir(parents=True)
    launch = Launch(folder / "start.yaml", flags.to / "compiled", flags.processes)
    config.save(small(name, teacher), launch.yaml)
    run_uninterrupted(launch.yaml, folder / "cold", launch.cache, launch.processes)
    whole = run_uninterrupted(launch.yaml, folder / "warm", launch.cache, launch.processes)
    faulty = 0
    for index, phase in zip(range(kills), itertools.cycle(flags.phases), strict=False):
        moment = random_moment(phase, whole, rng)
        victim = rng.randrange(flags.processes)
        run_dir = folder / f"{flags.signal}_{flags.seed}_{index}"
        result = {
            "preset": name,
            "signal": flags.signal,
            "phase": phase,
            "kill": index,
            "victim": victim,
        } | kill(launch, run_dir, whole, moment, number, victim)
        with (flags.to / "kills.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(result, flush=True)
        faulty += bool(result["faults"])
    return faulty


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--presets", nargs="+", default=list(DEFAULT), help="NAME or NAME=KILLS")
    parser.add_argument("--kills", type=int, default=20, help="kills of a preset without =KILLS")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--signal", choices=("kill", "term"), default="kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    flags = parser.parse_args()
    rng = random.Random(flags.seed)
    presets = dict(parse_preset(word, flags.kills) for word in flags.presets)
    if any(isinstance(small(name, flags.to).algorithm, DistillConfig) for name in presets):
        presets = {"arithmetic_grpo": 0} | presets  # Its model is the teacher.
    teacher = flags.to / "arithmetic_grpo" / "warm" / "model"
    faulty = sum(kill_preset(name, kills, teacher, flags, rng) for name, kills in presets.items())
    total = sum(presets.values())
    print(f"{total - faulty} of {total} without a fault")
    return bool(faulty)


if __name__ == "__main__":
    sys.exit(main())
