"""The four subtasks of issues, from a small repository."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.issue_subtasks import make_rows
from tpu_rl import rewards
from tpu_rl.rewards import registry

BEFORE = """\
import math


class Circle:
    def area(self, radius):
        return math.pi * radius

    def name(self):
        return "circle"


def double(x):
    return 2 * x
"""
AFTER = BEFORE.replace("math.pi * radius", "math.pi * radius**2")


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=Name", "-c", "user.email=name@example.com"]
    subprocess.run(["git", "-C", str(folder), *settings, *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    contents = [
        {"shapes.py": BEFORE, "other.py": "x = 1\n"},
        {"shapes.py": AFTER},
        {"other.py": "x = 2\n"},
        {"notes.txt": "no Python\n"},
    ]
    for number, files in enumerate(contents):
        for name, text in files.items():
            (folder / name).write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", f"Change {number}")
    return folder


def rows_of(repository: Path, to: Path) -> dict[str, list[dict]]:
    command = [sys.executable, make_rows.__file__, "--repository", str(repository), "--to", str(to)]
    subprocess.run(command, check=True, capture_output=True)
    names = ("train", "held_out")
    return {
        name: [json.loads(line) for line in (to / f"{name}.jsonl").read_text().splitlines()]
        for name in names
    }


def test_a_commit_makes_four_rows(repository, tmp_path):
    parts = rows_of(repository, tmp_path / "rows")
    rows = {row["kind"]: row for row in parts["train"]}
    assert list(rows) == ["files", "functions", "lines", "edit"]
    assert rows["files"]["answer"] == ["shapes.py"]
    assert rows["functions"]["answer"] == ["shapes.py:Circle.area"]
    assert rows["lines"]["answer"] == ["shapes.py:6"]
    assert (
        "-        return math.pi * radius\n+        return math.pi * radius**2"
        in rows["edit"]["patch"]
    )
    prompt = rows["functions"]["prompt"][0]["content"]
    assert prompt.startswith("An issue of a repository:\n\nChange 1\n")
    assert "shapes.py:Circle.name\nshapes.py:double" in prompt
    assert "radius**2" not in rows["edit"]["prompt"][0]["content"]
    # A change outside of functions asks for files only, and the newest issue is held out.
    assert [row["kind"] for row in parts["held_out"]] == ["files"]


def test_the_recorded_answers_earn_the_whole_reward(repository, tmp_path):
    rows = rows_of(repository, tmp_path / "rows")["train"]
    names = [
        "for_rows(of=f_beta,column=kind,values=files|functions|lines)",
        "for_rows(of=patch_ratio,column=kind,values=edit)",
    ]
    texts = ["\n".join(row.get("answer", ())) or f"```\n{row['patch']}```" for row in rows]
    columns = {name: [row.get(name) for row in rows] for name in ("kind", "answer", "patch")}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    values = [
        function([row["prompt"] for row in rows], completions, **columns)
        for function in registry.reward_functions(names, rewards.DEFAULT_LIMITS).values()
    ]
    assert values == [[1, 1, 1, None], [None, None, None, 1]]


def test_a_repository_without_issues_is_one_error(tmp_path):
    command = [sys.executable, make_rows.__file__, "--repository", str(tmp_path), "--to", "rows"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: git rev-list failed in")
    assert "Traceback" not in result.stderr
