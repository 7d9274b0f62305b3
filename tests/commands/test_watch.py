"""`tpu-rl watch`: a run's curves and completions in the terminal."""

import json

import pytest

from tpu_rl.commands import cli
from tpu_rl.commands.tools import watch


@pytest.fixture
def folder(tmp_path):
    """A run of four steps that has taken three, with samples of two of them."""
    rows = [{"step": step, "time": 1e9, "reward/mean": step / 4} for step in (1, 2, 3)]
    samples = [
        {"step": step, "prompt": "1+1=", "completion": str(number), "reward": number / 10 + step}
        for step in (1, 2)
        for number in (1, 2, 3)
    ]
    for name, lines in (("metrics", rows), ("samples", samples)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "config.yaml").write_text("kind: ExperimentConfig\nsteps: 4\n")
    return tmp_path


def test_curves_and_the_completions_of_the_newest_step_that_has_some(folder, capsys):
    assert cli.main(["watch", str(folder), "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 3/4" in text
    assert "reward  0.750  ▁▄█" in text
    assert "best 2.300  1+1= -> 3" in text
    assert "worst 2.100  1+1= -> 1" in text


def test_the_last_step_ends_it(folder):
    assert not watch.draw(folder)[1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "time": 1e9, "reward/mean": 1.0}) + "\n")
    (folder / "samples.jsonl").unlink()
    assert watch.draw(folder)[1]


@pytest.mark.parametrize("name", ["missing", "gs://bucket/run"])
def test_what_cannot_be_watched_is_named(tmp_path, name, capsys):
    address = name if name.startswith("gs:") else str(tmp_path / name)
    assert cli.main(["watch", address]) == 2
    assert "fix:" in capsys.readouterr().err


def test_a_curve_of_equal_values_is_flat_and_a_long_one_is_cut():
    assert watch.curve([2.0, 2.0]) == "▁▁"
    assert len(watch.curve(range(1000))) == watch.POINTS


@pytest.mark.parametrize("block_bytes", [5, 100, 1 << 20])  # Less than a line, and some lines.
def test_lines_are_read_from_the_end(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(watch, "BLOCK_BYTES", block_bytes)
    lines = [b"%d " % number * (number % 7) + b"\n" for number in range(90)] + [b"cut"]
    (tmp_path / "lines").write_bytes(b"".join(lines))
    assert list(watch.lines_backward(tmp_path / "lines")) == lines[::-1]
