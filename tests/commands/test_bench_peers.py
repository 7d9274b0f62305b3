"""bench/peers.py: its arithmetic, and, slowly, our own part of it. The peers' environments are not
needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import peers
from bench.peers import side_by_side

Refused, Sample, Spread = side_by_side.Refused, side_by_side.Sample, side_by_side.Spread
OURS = [Sample((2.0, 4.0, 3.0), (64, 64, 64)), Sample((2.0, 2.0, 2.0), (64, 64, 64))]


def test_each_arm_stands_in_each_place_once():
    orders = [side_by_side.rotated(["a", "b", "c"], round_) for round_ in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert side_by_side.rotated(["a", "b", "c"], 3) == orders[0]
    assert side_by_side.rotated([], 1) == []


def test_ratios_are_of_the_rounds_medians():
    theirs = [Sample((9.0, 6.0, 1.0), (64, 64, 64)), Sample((8.0, 7.0, 9.0), (64, 64, 64))]
    assert side_by_side.summary(theirs) == Spread(7.5, 1.0, 9.0)
    assert side_by_side.ratio(theirs, OURS) == Spread(3.0, 2.0, 4.0)  # 6 / 3 and 8 / 2


def test_no_ratio_where_tokens_differ():
    theirs = [OURS[0], Sample((8.0, 7.0, 9.0), (64, 63, 64))]
    found = side_by_side.ratio(theirs, OURS)
    assert isinstance(found, Refused)
    assert "[64, 63, 64]" in str(found)
    line = side_by_side.rows({"ours": OURS, "trl": theirs})[1]
    assert line[2].startswith("refused: different tokens")


def test_a_failed_round_does_not_count():
    assert side_by_side.ratio([None, OURS[1]], OURS) == Spread(1.0, 1.0, 1.0)
    assert isinstance(side_by_side.ratio([None, OURS[1]], [OURS[0], None]), Refused)
    assert side_by_side.rows({"ours": OURS, "trl": [None, None]})[1][1] == "failed"


def test_of_memory_the_ratio_is_our_share():
    ours, theirs = [Sample((100.0,), (64,))], [Sample((400.0,), (64,))]
    assert (
        side_by_side.rows({"ours": ours, "trl": theirs}, ours_over_peer=True)[1][2]
        == "0.250 (0.250 to 0.250)"
    )
    assert side_by_side.rows({"ours": ours, "trl": theirs})[1][2] == "4.00 (4.00 to 4.00)"


def test_numbers_have_three_digits():
    assert [side_by_side.readable(x) for x in (0.0123, 0.5, 1.0, 9.996, 47.26, 99.96, 1211.26)] == [
        "0.012",
        "0.500",
        "1.00",
        "10.0",
        "47.3",
        "100",
        "1211",
    ]


def test_work_is_the_same_whenever_it_is_asked_for():
    shape = peers.SHAPES["long_tail"]
    work = peers.work_of(shape, "model", warmup=2, steps=3)
    assert work == peers.work_of(shape, "model", warmup=2, steps=3)
    lengths = sorted(length for step in work.lengths for length in step)
    assert (work.steps, len(lengths)) == (5, 5 * shape.prompts * shape.group)
    assert 34 < sum(lengths) / len(lengths) < 44
    assert 90 < lengths[int(0.95 * len(lengths))] < 140
    assert lengths[0] >= 1
    assert lengths[-1] == shape.new_tokens


def test_what_has_run_is_not_run_again(tmp_path, monkeypatch):
    calls = []

    def do(python, engine, work):
        calls.append((engine, work.variant))
        place = Path(work.folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / "work.json").write_text(work.text())
        return {"seconds": [1.0]} if engine == "trl" else None

    monkeypatch.setattr(peers, "do", do)
    work = peers.work_of(peers.SMALL["step"], "model", warmup=1, steps=1)
    pythons = {"trl": "python", "tunix": "python"}
    first = peers.run_arm("trl checkpointing", "step", 0, work, pythons, tmp_path)
    assert peers.run_arm("trl checkpointing", "step", 0, work, pythons, tmp_path) == first
    longer = peers.work_of(peers.SMALL["step"], "model", warmup=1, steps=2)
    peers.run_arm("trl checkpointing", "step", 0, longer, pythons, tmp_path)
    assert calls == [("trl", "checkpointing")] * 2
    assert [
        peers.run_arm("tunix", "step", 0, work, pythons, tmp_path).result for _ in range(2)
    ] == [None, None]
    assert calls[2:] == [("tunix", "")] * 2


def test_arms_belong_to_the_axes_that_ask_for_them():
    engines = ["ours", "trl", "tunix"]
    assert peers.arms_of("step", ["step", "update"], engines) == engines
    assert peers.arms_of("step", ["step", "memory"], engines) == [*engines, "trl checkpointing"]
    assert peers.arms_of("long_tail", ["long_tail"], engines) == [*engines, "trl continuous"]
    assert peers.arms_of("long_tail", ["long_tail"], ["ours", "tunix"]) == ["ours", "tunix"]
    result = {"seconds": [1.0], "update_seconds": [0.5], "tokens": [8]}
    runs = [peers.Run(0, "step", arm, 0.0, result) for arm in (*engines, "trl checkpointing")]
    assert list(peers.samples("update", runs, peers.times_of("update_seconds"))) == engines
    assert list(peers.samples("memory", runs, peers.times_of("seconds"))) == [
        *engines,
        "trl checkpointing",
    ]


@pytest.mark.nightly
def test_our_part_runs(tmp_path: Path):
    script = str(Path(peers.__file__))
    how = [
        "--small",
        "--engines",
        "ours",
        "--axes",
        *peers.SHAPES,
        *peers.PARTS,
        "--rounds",
        "1",
        "--steps",
        "1",
    ]
    command = [sys.executable, script, *how, "--warmup", "1", "--to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "peers.json").read_text())["runs"]
    assert [run["shape"] for run in runs] == list(peers.SHAPES)
    results = {run["shape"]: run["result"] for run in runs}
    step, long_tail = results["step"], results["long_tail"]
    assert step["tokens"] == [2 * 4 * 8]
    work = json.loads((tmp_path / "long_tail-0-ours" / "work.json").read_text())
    assert long_tail["tokens"] == [sum(work["lengths"][1])]
    assert 0 < step["update_seconds"][0] < step["seconds"][0]
    assert step["loaded_bytes"] < step["steps_bytes"] <= step["peak_bytes"]
    assert "| update, s | ours |" in (tmp_path / "peers.md").read_text()
