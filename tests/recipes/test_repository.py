"""Small repositories with faults: the environment, its verdicts, and the rows."""

import json

import pytest
from transformers import AutoTokenizer

from recipes.repository import make_rows
from recipes.repository.environment import PASS, Repository, Shell
from tests.fixtures import sandboxes
from tpu_rl.environments import contract

ROW = {
    "files": {
        "core.py": "def add(a, b):\n    return a - b\n",
        "shop/__init__.py": "",
        "shop/cart.py": "from core import add\n\ndef total(prices):\n    return add(*prices)\n",
    },
    "tests": ["assert total([2, 3]) == 5"],
    "hidden_tests": ["assert add(4, 4) == 8", "assert total([1, 6]) == 7"],
}
DEMONSTRATIONS, TRAIN, HELD_OUT = 60, 20, 10


def begun(kind):
    environment = kind()
    contract.reset(environment, ROW, 0)
    return environment


@sandboxes.confined
def test_tools_list_read_edit_and_run_tests_over_packages():
    about = contract.describe(begun(Repository), "")
    names = [tool["function"]["name"] for tool in about.tools]
    assert names == ["edit_file", "list_files", "read_file", "run_tests"]
    assert about.is_resumable
    repository = begun(Repository)
    calls = [
        ("list_files", {}),
        ("run_tests", {}),
        ("read_file", {"path": "core.py"}),
        ("edit_file", {"path": "core.py", "old": "a", "new": "b"}),
        ("edit_file", {"path": "other.py", "old": "a", "new": "b"}),
    ]
    printed = [text for _, text, _ in contract.call(repository, names, calls)]
    assert printed == [
        "core.py\nshop/__init__.py\nshop/cart.py",
        "total([2, 3]) == 5",
        "1 def add(a, b):\n2     return a - b",
        "the old text is in the file 3 times",
        "no such file",
    ]
    assert contract.reward(repository) == 0.0
    assert repository.edit_file("core.py", "a - b", "a + b") == "done"
    assert repository.run_tests() == PASS
    assert contract.reward(repository) == 1.0
    contract.reset(repository, {"files": ROW["files"]}, 0)
    assert contract.reward(repository) is None


@sandboxes.confined
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("def add(a, b: return", "SyntaxError"),
        ("def add(a, b):\n    return 5\n", PASS),
        ("import os\nos._exit(0)\n", ""),
        ("def add(a, b):\n    return c\n", "total([2, 3]) == 5 NameError name 'c' is not defined"),
    ],
)
def test_what_repairs_nothing_earns_nothing(text, shown):
    repository = begun(Repository)
    repository.files["core.py"] = text
    assert repository.run_tests().startswith(shown)
    assert contract.reward(repository) == 0.0


@sandboxes.confined
def test_the_shell_edits_lines_and_goes_on_elsewhere():
    shell = begun(Shell)
    commands = {
        "read core": "1 def add(a, b):\n2     return a - b\n$ ",
        "read no": "1 no such file\n$ ",
        "edit core 9 x": "no such line\n$ ",
        "edit core 2": "bad command\n$ ",
        "": "bad command\n$ ",
        "ls": "core.py\nshop/__init__.py\nshop/cart.py\n$ ",
        "edit core 2 return a + b": "ok\n$ ",
    }
    for command, answer in commands.items():
        assert contract.step(shell, command) == (answer, None, False), command
    other = Shell()
    other.__setstate__(contract.saved_state(shell))
    assert contract.step(other, "test") == (f"{PASS}\n$ ", None, False)
    assert contract.step(other, "done") == ("", None, True)
    assert contract.reward(other) == 1.0


@pytest.fixture(scope="module")
def parts():
    counts = {"demonstrations": DEMONSTRATIONS, "train": TRAIN, "held_out": HELD_OUT}
    return make_rows.rows(counts)


def test_rows_are_as_many_and_the_held_out_prompts_are_others(parts):
    assert [len(part) for part in parts.values()] == [DEMONSTRATIONS, TRAIN, HELD_OUT]
    prompts = {name: {row["prompt"] for row in part} for name, part in parts.items()}
    assert prompts["held_out"].isdisjoint(prompts["demonstrations"] | prompts["train"])
    again = make_rows.rows({"demonstrations": 0, "train": 1, "held_out": 0})
    assert again["train"] == parts["train"][:1]
    assert all("completion" not in row for row in parts["train"] + parts["held_out"])


@sandboxes.confined
def test_demonstrations_are_what_the_shell_prints_and_every_repository_can_be_repaired(parts):
    shell = Shell()
    for row in parts["demonstrations"][:12]:
        contract.reset(shell, row, 0)
        typed = ""
        is_done = False
        while not is_done:
            command = row["completion"].removeprefix(typed).partition("\n")[0]
            answer, _, is_done = contract.step(shell, command)
            typed += f"{command}\n{answer}"
        assert typed == row["completion"]
    row = parts["train"][0]
    contract.reset(shell, row, 0)
    assert contract.reward(shell) == 0.0
    for path, text in row["files"].items():
        names = [line[4:].partition("(")[0] for line in text.splitlines() if line[:4] == "def "]
        shell.files[path] = make_rows.text_of(
            {name: make_rows.FUNCTIONS[name][1] for name in names}
        )
    assert shell.run_tests() == PASS
    assert contract.reward(shell) == 1.0


def test_the_tokenizer_knows_every_row(parts, tmp_path):
    make_rows.write_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == len(tokenizer)
    for row in parts["demonstrations"]:
        text = row["prompt"] + row["completion"]
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert len(tokenizer(row["prompt"]).input_ids) <= 24
        assert len(ids) <= 200
