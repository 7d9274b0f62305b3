"""A run of several phases: each has its steps, and a run continued across their border ends with the same bits."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tpu_rl
from launch import config, run
from launch.config import Phase
from tpu_rl import models
from tpu_rl.algos import GrpoConfig, SftConfig
from tpu_rl.errors import InputError

TINY = [
    "arithmetic_grpo", "--batch.prompts", "4", "--batch.completions", "4", "--batch.row-length", "128",
    "--evaluation.rows", "8", "--evaluation.every", "2", "--steps", "4", "--checkpoint-every", "1",
]  # fmt: skip


def of_two_phases(folder: Path, **changes) -> str:
    """config.yaml of two steps of SFT, then GRPO."""
    one = config.parse(TINY)
    folder.mkdir()
    config.save(replace(one, phases=(Phase(SftConfig(), until=2),), **changes), folder / "start.yaml")
    return str(folder / "start.yaml")


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["params_digest"]


def test_phases_take_their_steps_and_resume_across_their_border(tmp_path):
    start = of_two_phases(tmp_path / "config")
    assert run.main([start, "--run-dir", str(tmp_path / "whole")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert ["sft/loss" in row for row in rows] == [False, True, True, False, False]
    assert ["reward/mean" in row for row in rows] == [False, False, False, True, True]

    # Without its last checkpoints a run goes on from the border; with one of them, from inside the second phase.
    apart = tmp_path / "apart"
    assert run.main([start, "--run-dir", str(apart), "--steps", "3"]) == 0
    assert run.main([start, "--run-dir", str(apart), "--steps", "4"]) == 0
    assert digest(apart) == digest(tmp_path / "whole")


@pytest.mark.parametrize("forget", [(), ("policy",)])
def test_a_forgotten_role_begins_again(tmp_path, forget):
    """The second phase learns nothing, as all rewards are equal: what is left is what the first phase taught."""
    (tmp_path / "reward.py").write_text("def same(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n")
    start = of_two_phases(tmp_path / "config", reward=(f"{tmp_path / 'reward.py'}:same",))
    Path(start).write_text(Path(start).read_text().replace("forget: []", f"forget: [{', '.join(forget)}]"))
    assert run.main([start, "--run-dir", str(tmp_path / "run"), "--steps", "3"]) == 0
    shipped = Path(tpu_rl.__file__).parent / "pretrained" / "arithmetic"
    before, after = (models.load(path)[1]["embedding"] for path in (shipped, tmp_path / "run" / "model"))
    assert np.array_equal(before, after) == bool(forget)


@pytest.mark.parametrize("ends", [(4,), (5,), (2, 2), (3, 2)])
def test_phases_end_in_order(ends):
    with pytest.raises(InputError, match="phases end with steps"):
        replace(config.parse(TINY), phases=tuple(Phase(GrpoConfig(), until=end) for end in ends))
