"""gsm8k_grpo on a user's own directory, file and reward: the code path of a real Qwen2.5
checkpoint, in small."""

import json
import string
from pathlib import Path

import pytest

from tpu_rl.commands import run

DATA = Path(__file__).parents[1] / "fixtures" / "data"


def command(checkpoint: Path, run_dir: Path, *flags: str) -> list[str]:
    return [
        "gsm8k_grpo",
        "--model.path",
        str(checkpoint),
        "--data.path",
        str(DATA / "gsm8k" / "sample.jsonl"),
        "--run-dir",
        str(run_dir),
        "--steps",
        "1",
        "--batch.prompts",
        "2",
        "--batch.group-size",
        "2",
        "--sampling.max-new-tokens",
        "8",
        "--sampling.max-prompt-tokens",
        "600",
        "--batch.row-length",
        "640",
        "--evaluation.rows",
        "4",
        "--model.dtype",
        "float32",
        *flags,
    ]


@pytest.mark.slow
def test_own_checkpoint_data_and_reward(checkpoint, tmp_path):
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def score(prompts, completions, answer, **columns):\n"
        "    return [None if i == 0 else len(c) / 10 for i, c in enumerate(completions)]\n"
    )
    run_dir = tmp_path / "run"
    assert run.main(command(checkpoint, run_dir, "--reward", f"{reward}:score")) == 0
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[1])
    assert row["reward/my_reward.score/mean"] == pytest.approx(row["reward/mean"])
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert samples[0]["reward"] is None
    assert all(set(sample["completion"]) <= set(string.printable) for sample in samples)


@pytest.mark.slow
def test_a_reward_that_fails_on_some_rows_is_named_and_the_run_goes_on(
    checkpoint, tmp_path, capsys
):
    reward = tmp_path / "shaky.py"
    reward.write_text(
        "calls = []\n"
        "def score(prompts, completions, **columns):\n"
        "    calls.append(len(completions))\n"
        "    if len(completions) > 1 or len(calls) == 2:\n"
        "        raise ValueError('no luck')\n"
        "    return [float(len(calls) % 2)]\n"
    )
    flags = ("--reward", f"{reward}:score", "--evaluation.reward", "gsm8k")
    assert run.main(command(checkpoint, tmp_path / "run", *flags)) == 0
    assert "no luck" in capsys.readouterr().err
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert row["reward/errors"] == 1


@pytest.mark.slow
def test_a_reward_of_the_wrong_length_stops_the_run_by_name(checkpoint, tmp_path, capsys):
    reward = tmp_path / "short.py"
    reward.write_text("def score(prompts, completions, **columns):\n    return [1.0, 2.0, 3.0]\n")
    flags = ("--reward", f"{reward}:score", "--evaluation.rows", "0")
    assert run.main(command(checkpoint, tmp_path / "run", *flags)) == 2
    error = capsys.readouterr().err
    assert "short.py:score" in error
    assert "3 values" in error


def test_data_faults_name_file_and_line(checkpoint, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(
        '{"question": "1+1?", "answer": "#### 2"}\n{"questoin": "2+2?", "answer": "#### 4"}\n'
    )
    flags = ("--data.path", str(broken))
    assert run.main(command(checkpoint, tmp_path / "run", *flags)) == 2
    error = capsys.readouterr().err
    assert "broken.jsonl:2" in error
    assert "questoin" in error
