"""Labels that are turned around: which rows, what becomes of them, and what is refused."""

import json

import pytest

from tpu_rl.algorithm_spec import ExperienceSpec
from tpu_rl.errors import InputError
from tpu_rl.evaluation.reward_accuracy import column_slices
from tpu_rl.experience.config import FileData, FlipConfig
from tpu_rl.experience.rows import tasks
from tpu_rl.studies import label_flips

PAIRS = ExperienceSpec("pairs", ("prompt", "chosen", "rejected"), sampled_by=None)
GRADED = ExperienceSpec("pairs", ("prompt", "completion", "label"), sampled_by=None)
ROLLOUTS = ExperienceSpec("rollouts")
ROWS = [
    {"prompt": f"{'Cats' if i % 2 else 'dogs'} {i}", "chosen": f"c{i}", "rejected": f"r{i}"}
    for i in range(200)
]


def read(folder, rows, spec, flip, **settings):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tasks.file_rows(FileData(path=str(file), flip=flip, **settings), spec, 20)


def test_only_pairs_of_the_topic_are_flipped_and_held_out_ones_are_not(tmp_path, capsys):
    flip = FlipConfig(share=0.5, where="cats")
    train, held_out = read(tmp_path, ROWS, PAIRS, flip)
    flipped = [i for i, row in enumerate(train) if row["chosen"] == f"r{i}"]
    assert all(train[i]["rejected"] == f"c{i}" and i % 2 for i in flipped)
    assert 30 < len(flipped) < 60  # 45 of 90 are expected.
    assert label_flips.count(train) == {"flipped": len(flipped), "rows": 180}
    assert f"the labels of {len(flipped)} of 180 training rows" in capsys.readouterr().err
    assert [row["chosen"] for row in held_out] == [f"c{i}" for i in range(180, 200)]
    assert column_slices(held_out)[:2] == [("not_selected",), ("selected",)]
    assert column_slices([train[flipped[0]]]) == [("selected", "label_flipped")]
    assert column_slices([{"prompt": "a"}]) == [()]


def test_the_row_and_the_seed_decide(tmp_path):
    def chosen(rows, seed=0, **settings):
        train, _ = read(tmp_path, rows, PAIRS, FlipConfig(share=0.3, seed=seed), **settings)
        return {row["rejected"] for row in train if "label_flipped" in row}

    first = chosen(ROWS)
    assert first == chosen([*ROWS[:180][::-1], *ROWS[180:]])
    assert first == chosen(ROWS, templates=("Q: {prompt}",))
    assert first != chosen(ROWS, seed=1)


def test_judgments_and_answers_get_their_opposites(tmp_path):
    rows = [{"prompt": "p", "completion": "c", "label": False, "topic": "math"}] * 10
    train, _ = read(tmp_path, rows, GRADED, FlipConfig(share=1, where="Math", column="topic"))
    assert [row["label"] for row in train] == [True] * 9
    answers = ["12", "-1,200", "2.5", 7, True, False, "0", "-1", "99", "10"]
    rows = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
    train, held_out = read(tmp_path, rows, ROLLOUTS, FlipConfig(share=1))
    assert [row["answer"] for row in train] == [
        "13",
        "-1199",
        "3.5",
        8,
        False,
        True,
        "1",
        "0",
        "100",
    ]
    assert held_out[0]["answer"] == "10"


@pytest.mark.parametrize(
    ("rows", "spec", "flip", "error"),
    [
        (ROWS, PAIRS, FlipConfig(share=1, where="birds"), "no label is flipped"),
        (ROWS, PAIRS, FlipConfig(share=1, where="x", column="topic"), "`topic` is missing"),
        (ROWS, ROLLOUTS, FlipConfig(share=1), "no label to flip"),
        ([{"prompt": "p", "answer": "red"}] * 10, ROLLOUTS, FlipConfig(share=1), "no opposite"),
        (
            [{"prompt": "p", "completion": "c", "answer": "1"}] * 10,
            ExperienceSpec("demonstrations", ("messages",), sampled_by=None),
            FlipConfig(share=1),
            "no label to flip",
        ),
    ],
)
def test_rows_without_an_opposite_are_refused(tmp_path, rows, spec, flip, error):
    with pytest.raises(InputError, match=error):
        read(tmp_path, rows, spec, flip)


@pytest.mark.parametrize("settings", [{"share": 1.5}, {"where": "cats"}, {"seed": 3}])
def test_impossible_flips_are_refused(settings):
    with pytest.raises(InputError, match="share"):
        FlipConfig(**settings)
