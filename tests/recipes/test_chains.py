"""The rows and the fine-grained reward of the chains on arithmetic."""

from recipes.chains import make_rows, steps
from tpu_rl.tasks import arithmetic


def test_rows_are_solved_and_only_held_out_ones_are_of_the_evaluation_split():
    files = make_rows.files()
    assert set(files) == set(make_rows.FILES)
    texts = files.pop("texts")
    assert len(texts) > make_rows.ROWS / 2
    assert {arithmetic.split_of(row["text"].partition("=")[0]) for row in texts} == {"train"}
    for name, rows in files.items():
        splits = {arithmetic.split_of(row["prompt"][:-1]) for row in rows}
        assert splits == {"eval" if name == "held_out_products" else "train"}
        for row in rows:
            assert row["answer"] == str(arithmetic.evaluate(row["prompt"][:-1]))
            assert row["completion"].endswith(f"#{row['answer']}")
            assert (row["concept"] == "products") == ("*" in row["prompt"])
    assert len(files["half_a"]) == len(files["half_b"]) == make_rows.ROWS / 2
    assert all(row["completion"].startswith("#") for row in files["bare"])
    assert {row["concept"] for row in files["sums"]} == {"sums"}


def test_a_share_of_the_reward_is_for_each_right_step():
    solution = "3+8=11;11-4=7;#7"
    texts = [solution, "3+8=11;11-4=8;#8", "#7", "11-4=7;#7;3+8=11;"]
    assert steps.right_steps([""] * 4, texts, [solution] * 4) == [1.0, 0.5, 0.0, 1.0]
