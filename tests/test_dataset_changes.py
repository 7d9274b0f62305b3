"""A run goes on with the rows that it began with: others are refused with the first that differs, or accepted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch import config, dataset_changes
from launch.config import FileData
from tpu_rl import data
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.needs import Needs
from tpu_rl.types import Rollout

ROWS = [{"prompt": f"{i} + {i} = ", "answer": 2 * i} for i in range(20)]
NEEDS = Needs(Rollout)


def settings(run_dir: Path, **changes) -> config.ExperimentConfig:
    files = FileData(path="problems.jsonl")
    return replace(config.preset("arithmetic_grpo"), data=files, run_dir=str(run_dir), **changes)


@pytest.fixture
def begun(tmp_path) -> tuple[config.ExperimentConfig, dict]:
    """A run with a checkpoint, and the data position in that."""
    settings_ = settings(tmp_path)
    stream = dataset_changes.stream(settings_, NEEDS, ROWS, 4)
    for _ in range(2):
        next(stream)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    return settings_, stream.get_state()


OTHERS = {
    "one byte": ([*ROWS[:5], ROWS[5] | {"prompt": "5 + 5 =  "}, *ROWS[6:]], 6, "1 of 20 rows, the first of them row 6"),
    "a row more": ([*ROWS, {"prompt": "new"}], 21, "21 rows in place of 20, the first 20 as they were"),
    "a row less": (ROWS[:-1], 20, "19 rows in place of 20, the first 19 as they were"),
    "a row dropped": ([*ROWS[:9], *ROWS[10:]], 10, "19 rows in place of 20, and row 10 is the first that differs"),
    "two swapped": ([ROWS[0], ROWS[2], ROWS[1], *ROWS[3:]], 2, "the same rows in another order, from row 2 on"),
    "a column more": ([ROWS[0] | {"kind": "sum"}, *ROWS[1:]], 1, "1 of 20 rows, the first of them row 1"),
}


@pytest.mark.parametrize(("rows", "first", "what"), OTHERS.values(), ids=OTHERS)
def test_other_rows_are_refused_with_the_first_that_differs(begun, rows, first, what):
    settings_, _ = begun
    with pytest.raises(InputError, match="changed since the run began") as refused:
        dataset_changes.stream(settings_, NEEDS, rows, 4)
    assert refused.value.what.endswith(what)
    assert refused.value.where == f"problems.jsonl, training row {first}"
    shown = json.dumps(rows[first - 1])[:160] if first <= len(rows) else "not there any more"
    assert refused.value.why == f"that row is now: {shown}"
    assert "--accept-dataset-change" in refused.value.fix


@pytest.mark.parametrize(("rows", "first", "what"), OTHERS.values(), ids=OTHERS)
def test_accepted_rows_go_on_and_are_recorded(begun, capsys, rows, first, what):
    """Also when the job ends before its next checkpoint: the flag is needed once."""
    settings_, state = begun
    for accept in (True, False):
        stream = dataset_changes.stream(replace(settings_, accept_dataset_change=accept), NEEDS, rows, 4)
        stream.set_state(state)
        assert next(stream)[0].tolist() == [8, 9, 10, 11]
    assert f"accepted: {what}" in capsys.readouterr().err
    lines = (Path(settings_.run_dir) / dataset_changes.CHANGES_FILE).read_text().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["was"], line["is"]) == (data.fingerprint(ROWS), data.fingerprint(rows))
    assert (line["what"], line["first_row"], line["checkpoint"]) == (what, first, 7)


def test_the_same_rows_go_on(begun):
    settings_, state = begun
    stream = dataset_changes.stream(settings_, NEEDS, [dict(reversed(row.items())) for row in ROWS], 4)
    stream.set_state(state)
    assert next(stream)[0].tolist() == [8, 9, 10, 11]
    assert not (Path(settings_.run_dir) / dataset_changes.CHANGES_FILE).exists()


def test_accepted_rows_do_not_excuse_another_seed(begun):
    settings_, state = begun
    other = replace(settings_, accept_dataset_change=True, seed=1)
    stream = dataset_changes.stream(other, NEEDS, ROWS[:-1], 4)
    with pytest.raises(InputError, match="another seed"):
        stream.set_state(state)


def test_before_the_first_checkpoint_data_may_be_mended(tmp_path):
    dataset_changes.stream(settings(tmp_path), NEEDS, ROWS, 4)
    dataset_changes.stream(settings(tmp_path), NEEDS, ROWS[:-1], 4)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    dataset_changes.stream(settings(tmp_path), NEEDS, ROWS[:-1], 4)
    with pytest.raises(InputError, match="20 rows in place of 19"):
        dataset_changes.stream(settings(tmp_path), NEEDS, ROWS, 4)


def test_a_stage_that_reads_other_columns_has_its_own(begun):
    settings_, _ = begun
    dataset_changes.stream(settings_, Needs(Rollout, ("question",)), ROWS[:-1], 4)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half an archive", b"no archive"])
def test_damaged_digests_are_named(begun, content):
    settings_, _ = begun
    path = next(Path(settings_.run_dir).glob("data/*.npz"))
    path.write_bytes(content)
    with pytest.raises(DamagedDataError, match="digests of the training rows"):
        dataset_changes.stream(settings_, NEEDS, ROWS, 4)


def test_row_digests_do_not_depend_on_the_order_of_columns():
    swapped = [{"answer": row["answer"], "prompt": row["prompt"]} for row in ROWS]
    assert np.array_equal(data.row_digests(ROWS), data.row_digests(swapped))
    assert len(set(data.row_digests(ROWS).tolist())) == len(ROWS)
    assert data.row_digests([]).shape == (0,)


def test_the_newest_checkpoint_of_a_folder_and_of_a_spool(tmp_path):
    assert dataset_changes.newest_checkpoint(tmp_path) == -1
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "damaged").mkdir()
    assert dataset_changes.newest_checkpoint(tmp_path) == 20
    (tmp_path / "checkpoints" / "40.json").touch()
    assert dataset_changes.newest_checkpoint(tmp_path) == 40
