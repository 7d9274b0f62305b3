"""A run of several phases: each has its steps, and a run continued across their border ends with
the same bits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tpu_rl
from tpu_rl import models
from tpu_rl.algos import GrpoConfig, SftConfig
from tpu_rl.commands import config, run, stages
from tpu_rl.commands.config import Phase, Plateau
from tpu_rl.commands.saved_run import load_run
from tpu_rl.errors import InputError

TINY = [
    "arithmetic_grpo",
    "--batch.prompts",
    "4",
    "--batch.group-size",
    "4",
    "--batch.row-length",
    "128",
    "--evaluation.rows",
    "8",
    "--evaluation.interval",
    "2",
    "--steps",
    "4",
    "--checkpoint.interval",
    "1",
]


def of_two_phases(folder: Path, **changes) -> str:
    """config.yaml of two steps of SFT, then GRPO."""
    one = config.parse(TINY)
    folder.mkdir()
    config.save(
        replace(one, phases=(Phase(SftConfig(), until=2),), **changes), folder / "start.yaml"
    )
    return str(folder / "start.yaml")


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["params_digest"]


@pytest.mark.nightly
def test_phases_take_their_steps_and_resume_across_their_border(tmp_path):
    start = of_two_phases(tmp_path / "config")
    assert run.main([start, "--run-dir", str(tmp_path / "whole")]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["sft/loss" in row for row in rows] == [False, True, True, False, False]
    assert ["reward/mean" in row for row in rows] == [False, False, False, True, True]

    # Without its last checkpoints a run goes on from the border; with one of them, from inside the
    # second phase.
    apart = tmp_path / "apart"
    assert run.main([start, "--run-dir", str(apart), "--steps", "3"]) == 0
    assert run.main([start, "--run-dir", str(apart), "--steps", "4"]) == 0
    assert digest(apart) == digest(tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize("reset_roles", [(), ("policy",)])
def test_a_reset_role_begins_again(tmp_path, reset_roles):
    """The second phase learns nothing, as all rewards are equal: what is left is what the first
    phase taught."""
    (tmp_path / "reward.py").write_text(
        "def same(prompts, completions, **columns):\n    return [0.0] * len(prompts)\n"
    )
    start = of_two_phases(tmp_path / "config", reward=(f"{tmp_path / 'reward.py'}:same",))
    Path(start).write_text(
        Path(start)
        .read_text()
        .replace("reset_roles: []", f"reset_roles: [{', '.join(reset_roles)}]")
    )
    assert run.main([start, "--run-dir", str(tmp_path / "run"), "--steps", "3"]) == 0
    shipped = Path(tpu_rl.__file__).parent / "pretrained" / "arithmetic"
    before, after = (
        models.load(path)[1]["embedding"] for path in (shipped, tmp_path / "run" / "model")
    )
    assert np.array_equal(before, after) == bool(reset_roles)


@pytest.mark.parametrize("ends", [(4,), (5,), (2, 2), (3, 2)])
def test_phases_end_in_order(ends):
    with pytest.raises(InputError, match="phases end with steps"):
        replace(config.parse(TINY), phases=tuple(Phase(GrpoConfig(), until=end) for end in ends))


# --- phases that end early ---


def test_a_metric_is_flat_when_its_mean_no_longer_rises():
    plateau = Plateau("value/explained_variance", over=2, gain=0.1)
    assert not stages.is_flat(plateau, [0.5, 0.5, 0.5])  # not known yet
    assert stages.is_flat(plateau, [0.0, 0.4, 0.2, 0.39])  # means 0.2 and 0.295
    assert not stages.is_flat(plateau, [0.0, 0.4, 0.2, 0.41])  # and 0.305
    assert stages.is_flat(plateau, [9.0, 0.0, 0.4, 0.2, 0.3])  # the last four count


def test_stages_follow_the_steps_at_which_phases_ended():
    one = replace(
        config.parse(TINY), phases=(Phase(SftConfig(), 3), Phase(SftConfig(), 6)), steps=9
    )

    def ends(early: tuple[int, ...]) -> list[tuple[int, int]]:
        return [(stage.first, stage.last) for stage in one.stages_ended(early)]

    assert ends(()) == [(1, 3), (4, 6), (7, 9)]
    assert ends((2,)) == [(1, 2), (3, 6), (7, 9)]
    assert ends((2, 4)) == [(1, 2), (3, 4), (5, 9)]
    assert ends((5,)) == [(1, 3), (4, 5), (6, 9)]


@pytest.mark.nightly
def test_a_phase_ends_early_and_a_continued_run_knows_it(tmp_path):
    """The loss of imitation rises by no 100 nats: flat as soon as that is known, at its second step
    of three."""
    first = Phase(SftConfig(), 3, ends_when_flat=Plateau("sft/loss", over=1, gain=100.0))
    (tmp_path / "config").mkdir()
    start = str(tmp_path / "config" / "start.yaml")
    config.save(replace(config.parse(TINY), phases=(first,)), Path(start))
    assert run.main([start, "--run-dir", str(tmp_path / "whole")]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["sft/loss" in row for row in rows] == [False, True, True, False, False]
    assert [stages.ENDED in row for row in rows] == [False, False, True, False, False]
    assert load_run(str(tmp_path / "whole"))[2] == 4

    # Resumed inside the second stage, which takes a step that was planned for the first.
    apart = tmp_path / "apart"
    assert run.main([start, "--run-dir", str(apart)]) == 0
    for name in ("checkpoints/4", "summary.json"):
        path = apart / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run.main([start, "--run-dir", str(apart)]) == 0
    assert digest(apart) == digest(tmp_path / "whole")
