"""tests/affected.py: the tests that a change can touch."""

import subprocess
import sys

import pytest

from tests import affected

ALWAYS = {*affected.DOCUMENTS, "tests/test_layers.py"}


@pytest.mark.parametrize(
    ("changed", "touched", "untouched"),
    [
        # A module, those that import it, the tests of all of them, and the mirrored folder.
        (
            "tpu_rl/losses/masked.py",
            {"tests/losses", "tests/algos/test_grpo.py", "tests/proofs/test_battery.py"},
            {"tests/report", "tests/data", "tests/commands/test_help.py"},
        ),
        ("tpu_rl/commands/run.py", {"tests/commands"}, {"tests/losses", "tests/models"}),
        ("launch/run.py", {"tests/commands"}, {"tests/losses"}),
        ("tests/fixtures/source_lines.py", {"tests/diagnosis/test_debug_nans.py"}, {"tests/algos"}),
        ("tests/algos/test_sft.py", {"tests/algos/test_sft.py"}, {"tests/algos/test_dpo.py"}),
        ("recipes/sapo.py", {"tests/recipes"}, {"tests/algos/test_sft.py"}),
    ],
)
def test_what_a_module_touches(changed, touched, untouched):
    tests = set(affected.affected([changed]))
    assert touched | ALWAYS <= tests | {"tests/recipes/test_commands.py"}
    assert not untouched & tests
    assert all((affected.ROOT / test).exists() for test in tests)


def test_documents_touch_the_tests_of_documents():
    assert set(affected.affected(["README.md"])) == set(affected.DOCUMENTS)


@pytest.mark.parametrize("path", affected.EVERYTHING)
def test_settings_touch_everything(path):
    assert (affected.ROOT / path).is_file()
    assert affected.affected([path, "README.md"]) == ["tests"]


def test_no_change_touches_nothing():
    assert affected.affected([]) == []


def test_the_changes_are_those_of_the_branch_and_of_the_folder(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        settings = ("-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main")
        subprocess.run(["git", "-C", tmp_path, *settings, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "old.py").write_text("")
    (tmp_path / "changed.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "first")
    git("checkout", "-qb", "branch")
    (tmp_path / "committed.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "second")
    (tmp_path / "changed.py").write_text("1")
    (tmp_path / "new.py").write_text("")
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    assert sorted(affected.changed_files("main")) == ["changed.py", "committed.py", "new.py"]


@pytest.mark.slow
def test_the_command_prints_what_pytest_takes():
    command = [sys.executable, str(affected.ROOT / "tests" / "affected.py"), "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if result.returncode and "not a git repository" in result.stderr:
        pytest.skip("no git repository")
    assert result.returncode == 0, result.stderr
    assert all(line.startswith("tests") for line in result.stdout.splitlines())
