"""code_grpo from end to end: a user's model and problems, programs judged in the sandbox, and rows
that are refused."""

import itertools
import json
from pathlib import Path

import pytest

from tests.fixtures.sandboxes import confined
from tpu_rl.algos import GrpoConfig
from tpu_rl.commands import run
from tpu_rl.commands.config import FileData
from tpu_rl.data import files
from tpu_rl.errors import InputError
from tpu_rl.experience.rows import tasks
from tpu_rl.sandbox import unit_tests
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.verifiers.programs import python_tests

PROBLEMS = Path(__file__).parents[1] / "fixtures" / "data" / "code" / "problems.jsonl"
NEEDS = GrpoConfig().experience

KNOWS_ALL = """Here it is:
```python
import sys
{functions}
words = sys.stdin.read().split()
if words and words[0].isdigit():
    print(sum(int(word) for word in words[1:] if int(word) % 2 == 0))
elif words:
    print(*words[::-1])
```
"""


def command(checkpoint: Path, run_dir: Path, data: Path, *flags: str) -> list[str]:
    return [
        "code_grpo",
        "--model.path",
        str(checkpoint),
        "--data.path",
        str(data),
        "--run-dir",
        str(run_dir),
        "--steps",
        "2",
        "--batch.prompts",
        "2",
        "--batch.group-size",
        "2",
        "--model.dtype",
        "float32",
        "--sampling.max-new-tokens",
        "8",
        "--sampling.max-prompt-tokens",
        "256",
        "--batch.row-length",
        "512",
        *flags,
    ]


@pytest.mark.slow
@confined
def test_two_steps_in_which_programs_really_run(checkpoint, tmp_path, monkeypatch):
    """A random model writes no program: of every two texts the first is one that solves all
    problems."""
    rows = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
    program = KNOWS_ALL.format(
        functions="".join(row["solution"] for row in rows if "def " in row["solution"])
    )
    turn, outcomes, run_all, decode = itertools.count(), [], unit_tests.all_pass, Tokenizer.decode

    def spied(*arguments):
        verdicts = run_all(*arguments)
        outcomes.extend(verdicts)
        return verdicts

    monkeypatch.setattr(unit_tests, "all_pass", spied)

    def decode_every_other(self, ids, skip_special=True):
        if skip_special and next(turn) % 2 == 0:
            return program
        return decode(self, ids, skip_special)

    monkeypatch.setattr(Tokenizer, "decode", decode_every_other)
    flags = (
        "--data.evaluation-path",
        str(PROBLEMS),
        "--evaluation.rows",
        "2",
        "--evaluation.no-greedy",
    )
    assert run.main(command(checkpoint, tmp_path, PROBLEMS, *flags)) == 0

    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["eval/accuracy"] for step in (steps[0], steps[-1])] == [0.5, 0.5]
    for step in steps[1:]:
        assert step["reward/mean"] == step["reward/python_tests/mean"] == 0.5
        assert step["reward/errors"] == step["reward/zero_std_groups"] == 0
        assert step["optim/grad_norm"] > 0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["reward"] for sample in samples] == [1, 0] * 4
    assert all(sample["prompt"].endswith("in a fenced block.") for sample in samples)
    assert outcomes.count(True) == len(outcomes) // 2 >= 4


@confined
def test_the_problems_are_solved_by_their_solutions():
    rows = files.read(PROBLEMS, ("prompt", "tests", "solution"))
    tests = [row["tests"] for row in rows]
    assert python_tests(tests, [row["solution"] for row in rows], tests=tests) == [1.0] * 6
    assert (
        python_tests(tests, [rows[i - 1]["solution"] for i in range(6)], tests=tests) == [0.0] * 6
    )


BAD_ROWS = {
    "no tests": ({}, "a row lacks the column `tests`"),
    "a name that is near": ({"test": ["assert f() == 1"]}, "did you mean `test`?"),
    "none": ({"tests": []}, "no tests; write"),
    "not Python": ({"tests": "assert f( == 1"}, "is not Python"),
    "an input without an output": (
        {"tests": [{"input": "1"}]},
        "a test is {'input': text, 'output': text}",
    ),
    "lists of different lengths": ({"tests": {"inputs": ["1"], "outputs": []}}, "no tests"),
    "no assert": ({"tests": ["f()"]}, "asserts nothing"),
    "a package": (
        {"tests": ["import numpy\nassert numpy.array(f()) == 1"]},
        "what the test imports must be of",
    ),
}


@pytest.mark.parametrize(("columns", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_cannot_be_judged_are_refused_by_their_line(tmp_path, columns, message):
    good = PROBLEMS.read_text().splitlines()[0]
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{good}\n\n{json.dumps({'prompt': 'Write f.'} | columns)}\n")
    with pytest.raises(InputError) as error:
        tasks.read_rows(FileData(format="code"), str(path), NEEDS)
    assert error.value.where == f"{path}:3"
    assert message in str(error.value)


def test_a_run_refuses_them_before_it_begins(checkpoint, tmp_path, capsys):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "Write f."}\n')
    assert run.main(command(checkpoint, tmp_path / "run", path)) == 2
    error = capsys.readouterr().err
    assert "a row lacks the column `tests`" in error
    assert f"{path}:1" in error
