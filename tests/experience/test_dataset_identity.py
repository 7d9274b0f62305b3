"""Rows that changed since a run began are refused, or accepted and recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpu_rl import data
from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.commands import config as configuration
from tpu_rl.data import row_stream
from tpu_rl.errors import DamagedDataError, InputError
from tpu_rl.experience.rows import dataset_identity

ROWS = [{"prompt": f"{i} + {i} = ", "answer": 2 * i} for i in range(20)]
SPEC = ExperienceSpec("rollouts")


def make_stream(
    run_dir: Path,
    rows: list[dict],
    spec: ExperienceSpec = SPEC,
    seed: int = 0,
    accept_change: bool = False,
) -> data.RowStream:
    return dataset_identity.make_stream(
        rows,
        spec,
        batch_size=4,
        seed=seed,
        run_dir=run_dir,
        data_path="problems.jsonl",
        accept_change=accept_change,
    )


@pytest.fixture
def state(tmp_path) -> dict:
    """Return the data position in the checkpoint of a run in `tmp_path`."""
    stream = make_stream(tmp_path, ROWS)
    for _ in range(2):
        next(stream)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    return stream.get_state()


def test_a_picture_that_became_another_file_is_a_change(tmp_path):
    """Names of pictures are relative to the data. A text may be the picture itself."""
    (tmp_path / "a.png").write_bytes(b"12345")
    rows = [{"images": ["a.png", "data:" + "A" * 9000, "x\0", {"path": "a.png"}]}, {"images": None}]
    before = data.digests(rows, tmp_path)
    assert before[0] == data.digests(rows, tmp_path)[0]
    (tmp_path / "a.png").write_bytes(b"123456")
    after = data.digests(rows, tmp_path)
    assert after[0] != before[0]
    assert (after[1] != before[1]).tolist() == [True, False]


def test_a_picture_with_one_other_pixel_is_a_change(tmp_path):
    """A PNG's checksums tell, also where the file has the size that it had."""
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    digests = []
    for level in (10, 11):
        pixels[0, 0, 0] = level
        Image.fromarray(pixels).save(tmp_path / "a.png", compress_level=0)
        digests.append(data.digests([{"images": ["a.png"]}], tmp_path))
        digests.append((tmp_path / "a.png").stat().st_size)
    assert digests[1] == digests[3] > 2 * row_stream.PICTURE_END
    assert digests[0][0] != digests[2][0]


def test_pictures_of_other_sizes_are_another_run():
    """--data.max-pixels changes the tokens of prompts, so a run does not go on with another one."""
    flags = ["sft", "--model.path", "m", "--data.path", "rows.jsonl", "--data.max-pixels"]
    before, after = (configuration.parse([*flags, most]) for most in ("512", "1024"))
    assert configuration.differences(before, after) == ["data.max_pixels: 512 -> 1024"]


CHANGED_ROWS = {
    "one byte": (
        [*ROWS[:5], ROWS[5] | {"prompt": "5 + 5 =  "}, *ROWS[6:]],
        6,
        "1 of 20 rows, the first of them row 6",
    ),
    "a row more": (
        [*ROWS, {"prompt": "new"}],
        21,
        "21 rows in place of 20, the first 20 as they were",
    ),
    "a row less": (ROWS[:-1], 20, "19 rows in place of 20, the first 19 as they were"),
    "a row dropped": (
        [*ROWS[:9], *ROWS[10:]],
        10,
        "19 rows in place of 20, and row 10 is the first that differs",
    ),
    "two swapped": (
        [ROWS[0], ROWS[2], ROWS[1], *ROWS[3:]],
        2,
        "the same rows in another order, from row 2 on",
    ),
    "a column more": (
        [ROWS[0] | {"kind": "sum"}, *ROWS[1:]],
        1,
        "1 of 20 rows, the first of them row 1",
    ),
}


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize(("rows", "first", "message"), CHANGED_ROWS.values(), ids=CHANGED_ROWS)
def test_error_names_the_first_row_that_differs(tmp_path, rows, first, message):
    with pytest.raises(InputError, match="changed since the run began") as error:
        make_stream(tmp_path, rows)
    assert error.value.what.endswith(message)
    assert error.value.where == f"problems.jsonl, training row {first}"
    row = json.dumps(rows[first - 1])[:160] if first <= len(rows) else "not there any more"
    assert error.value.why == f"that row is now: {row}"
    assert "--accept-dataset-change" in error.value.fix


@pytest.mark.parametrize(("rows", "first", "message"), CHANGED_ROWS.values(), ids=CHANGED_ROWS)
def test_accepted_change_is_recorded_once(tmp_path, state, capsys, rows, first, message):
    """The flag is not needed again, also if the run ends before its next checkpoint."""
    for accept in (True, False):
        stream = make_stream(tmp_path, rows, accept_change=accept)
        stream.set_state(state)
        assert next(stream)[0].tolist() == [8, 9, 10, 11]
    assert f"accepted: {message}" in capsys.readouterr().err
    lines = (tmp_path / dataset_identity.CHANGES_FILE).read_text().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert (line["was"], line["is"]) == (data.fingerprint(ROWS), data.fingerprint(rows))
    assert (line["what"], line["first_row"], line["checkpoint"]) == (message, first, 7)


def test_same_rows_are_no_change(tmp_path, state):
    stream = make_stream(tmp_path, [dict(reversed(row.items())) for row in ROWS])
    stream.set_state(state)
    assert next(stream)[0].tolist() == [8, 9, 10, 11]
    assert not (tmp_path / dataset_identity.CHANGES_FILE).exists()


def test_accepted_change_does_not_allow_another_seed(tmp_path, state):
    stream = make_stream(tmp_path, ROWS[:-1], seed=1, accept_change=True)
    with pytest.raises(InputError, match="another seed"):
        stream.set_state(state)


def test_rows_may_change_before_the_first_checkpoint(tmp_path):
    make_stream(tmp_path, ROWS)
    make_stream(tmp_path, ROWS[:-1])
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    make_stream(tmp_path, ROWS[:-1])
    with pytest.raises(InputError, match="20 rows in place of 19"):
        make_stream(tmp_path, ROWS)


@pytest.mark.usefixtures("state")
def test_stage_that_reads_other_columns_has_its_own_digests(tmp_path):
    make_stream(tmp_path, ROWS[:-1], ExperienceSpec("rollouts", ("question",)))


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half an archive", b"no archive"])
def test_damaged_digests_are_an_error(tmp_path, content):
    path = next(tmp_path.glob("data/*.npz"))
    path.write_bytes(content)
    with pytest.raises(DamagedDataError, match="digests of the training rows"):
        make_stream(tmp_path, ROWS)


def test_row_digests_do_not_depend_on_the_order_of_columns():
    swapped = [{"answer": row["answer"], "prompt": row["prompt"]} for row in ROWS]
    assert np.array_equal(data.digests(ROWS)[1], data.digests(swapped)[1])
    assert len(set(data.digests(ROWS)[1].tolist())) == len(ROWS)
    assert data.digests([])[1].shape == (0,)


def test_newest_checkpoint_of_a_folder_and_of_a_spool(tmp_path):
    assert dataset_identity.newest_checkpoint(tmp_path) == -1
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "checkpoints" / "damaged").mkdir()
    assert dataset_identity.newest_checkpoint(tmp_path) == 20
    (tmp_path / "checkpoints" / "40.json").touch()
    assert dataset_identity.newest_checkpoint(tmp_path) == 40
