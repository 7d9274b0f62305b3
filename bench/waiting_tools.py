"""Episodes that wait for slow tools: what do older rollouts save, and are they exact?

    python bench/waiting_tools.py --to runs/waiting_tools [--game LongGame] [--steps 24] [--kills 4]

The shipped model plays a game that answers after 0.1 to 5 seconds: the time is log-normal with a
median of 0.4 s, and decided by the episode and the turn alone. SlowGame has three turns. LongGame
has a long tail of turns, from 1 to 10, the same for all episodes of a prompt. Runs take the same
steps: rollouts before each update, rollouts that are three steps old, the same ones sampled during
updates, and for LongGame episodes that go on in the next step (`--rollout.partial`). Both runs with
rollouts that are three steps old must end with the same digest. Then the last of the runs is
repeated, killed at random moments and started again, and must end with its digest, too.

Prints episodes per minute and the share of time in which nothing was decoded, over the second half
of the steps, in which little compiles. Everything is in TO/waiting_tools.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tpu_rl.environments.contract import PlainState  # noqa: E402

PROMPTS = 4
GROUP_SIZE = 4
STALE = ["--batch.staleness=3"]
MODES = {
    "before updates": [],
    "3 steps old": STALE,
    "during updates": [*STALE, "--sampling.during-updates"],
}
GAMES = {
    "SlowGame": (MODES, ["--sampling.max-turns=3", "--sampling.max-new-tokens=96"]),
    "LongGame": (
        {**MODES, "partial": ["--rollout.partial=2"]},
        ["--sampling.max-turns=10", "--sampling.max-new-tokens=320", "--batch.row-length=1024"],
    ),
}
"""Game -> the modes of its runs, and the flags that all of them have."""


class SlowGame(PlainState):
    """A game whose answers take their time."""

    def reset(self, answer: str, max_turns: int, seed: int = 0, **row: Any) -> None:
        """Begin with the sum of a data row."""
        del row
        self.answer = answer
        self.turns_left = self._turns(max_turns, seed)
        self._seed = seed

    def _turns(self, max_turns: int, seed: int) -> int:
        del seed
        return max_turns

    async def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Say whether the turn has the sum, after a while."""
        times = random.Random(f"{self._seed} {self.turns_left}")
        seconds = math.exp(times.gauss(math.log(0.4), 1.0))
        await asyncio.sleep(min(max(seconds, 0.1), 5.0))
        self.turns_left -= 1
        is_right = self.answer in text
        return "again", float(is_right), self.turns_left == 0, {}


class LongGame(SlowGame):
    """The same with a long tail of turns."""

    def _turns(self, max_turns: int, seed: int) -> int:
        turns = math.exp(random.Random(seed).gauss(math.log(2), 0.8))
        return min(max(round(turns), 1), max_turns)


def command(run_dir: Path, game: str, flags: list[str], steps: int) -> list[str]:
    """Return the command of a run."""
    return [
        sys.executable,
        str(ROOT / "launch" / "run.py"),
        "arithmetic_grpo",
        f"--environment={Path(__file__).resolve()}:{game}",
        f"--batch.prompts={PROMPTS}",
        f"--batch.group-size={GROUP_SIZE}",
        "--batch.num-minibatches=1",
        *GAMES[game][1],
        "--evaluation.rows=0",
        "--optimizer.warmup-steps=0",
        f"--steps={steps}",
        "--run-dir",
        str(run_dir),
        *flags,
    ]


def start(run_dir: Path, game: str, flags: list[str], steps: int) -> subprocess.Popen:
    """Start a run, whose output goes to a file beside its folder."""
    with run_dir.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command(run_dir, game, flags, steps),
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


def finish(process: subprocess.Popen, run_dir: Path) -> str:
    """Wait for the end of a run, and return its digest."""
    if process.wait() != 0:
        sys.exit(f"a run failed: {run_dir.with_suffix('.log')}")
    return json.loads((run_dir / "summary.json").read_text())["params_digest"]


def measured(run_dir: Path, steps: int) -> dict[str, float]:
    """Return the figures of the second half of a run."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in lines if row["step"] > steps // 2]
    seconds = sum(row["time/step"] for row in rows)
    return {
        "episodes_per_minute": 60 * PROMPTS * GROUP_SIZE * len(rows) / seconds,
        "seconds_per_step": seconds / len(rows),
        "idle_share_of_sampling": sum(row["time/rollout_idle"] for row in rows)
        / sum(row["time/rollout"] for row in rows),
        "reward": sum(row["reward/mean"] for row in rows) / len(rows),
    }


def main() -> int:
    """Run all modes, then the kills."""
    parser = argparse.ArgumentParser(description="Measure episodes that wait for slow tools")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--game", choices=GAMES, default="SlowGame")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.to.mkdir(parents=True)
    result: dict[str, Any] = {"game": args.game, "steps": args.steps, "modes": {}, "kills": []}
    digests = {}
    seconds = 0.0
    last = []
    for name, last in GAMES[args.game][0].items():
        run_dir = args.to / name.replace(" ", "_")
        began = time.monotonic()
        digests[name] = finish(start(run_dir, args.game, last, args.steps), run_dir)
        seconds = time.monotonic() - began
        result["modes"][name] = measured(run_dir, args.steps)
        print(name, {key: round(value, 3) for key, value in result["modes"][name].items()})
    result["same_digest"] = digests["3 steps old"] == digests["during updates"]
    print("3 steps old and during updates end with the same digest:", result["same_digest"])
    moments = random.Random(args.seed)
    for number in range(args.kills):
        run_dir = args.to / f"killed_{number}"
        flags = [*last, "--checkpoint.interval=4"]
        process = start(run_dir, args.game, flags, args.steps)
        after = moments.uniform(0.4, 0.95) * seconds
        time.sleep(after)
        process.send_signal(signal.SIGKILL)
        process.wait()
        digest = finish(start(run_dir, args.game, last, args.steps), run_dir)
        same = digest == list(digests.values())[-1]
        result["kills"].append({"seconds": after, "same": same})
        print(f"killed after {after:.0f} s: same digest {result['kills'][-1]['same']}")
    (args.to / "waiting_tools.json").write_text(json.dumps(result, indent=2))
    return 0 if result["same_digest"] and all(kill["same"] for kill in result["kills"]) else 1


if __name__ == "__main__":
    sys.exit(main())
