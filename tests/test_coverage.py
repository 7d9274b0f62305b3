"""docs/coverage.md: every method has a command that is accepted, or a reason."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tyro

from tpu_rl import wings
from tpu_rl.commands import cli, config
from tpu_rl.commands.evaluate import check_reward, compare, evaluate
from tpu_rl.commands.recipe import answers, recipe_file
from tpu_rl.commands.tools import combine

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("coverage", ROOT / "docs" / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COVERAGE = load()
METHODS = COVERAGE.read()


def test_the_page_is_that_of_the_table():
    written = COVERAGE.PAGE.read_text(encoding="utf-8")
    assert written == COVERAGE.page(METHODS), "run: python docs/coverage.py"


def test_every_id_stands_once_in_its_order():
    ids = [method.id for method in METHODS]
    assert len(ids) == len(set(ids)) == 210
    numbers = {
        letter: [int(name[1:]) for name in ids if name[0] == letter and name[1:].isdecimal()]
        for letter in COVERAGE.IDS
    }
    assert {letter: sorted(found) for letter, found in numbers.items()} == {
        letter: list(range(1, count + 1)) for letter, count in COVERAGE.IDS.items()
    }
    assert set(ids) - {name for name in ids if name[1:].isdecimal()} == {"D20b"}


def test_every_method_has_a_command_or_a_reason():
    for method in METHODS:
        assert method.title
        assert method.status in COVERAGE.STATUSES
        if method.status != "not applicable":
            assert bool(method.command) == (method.status != "no"), method.id
        assert method.command or not method.measured, method.id
        assert method.note or method.status == "yes", method.id
        if method.command:
            names = [command.split()[0] for command in method.commands]
            assert all(name in cli.COMMANDS or (ROOT / f"{name}.py").exists() for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", sorted({command for method in METHODS for command in method.commands})
)
def test_the_command_is_accepted(command):
    name, *arguments = shlex.split(command)
    if name in ("run", "plan"):
        if name == "plan":
            arguments = arguments[:1]  # Its other flags are the planner's.
        config.parse(arguments)
    elif "/" in name:
        shown = subprocess.run(
            [sys.executable, ROOT / f"{name}.py", "--help"], capture_output=True, text=True
        )
        assert shown.returncode == 0, shown.stderr
        assert all(flag in shown.stdout for flag in arguments if flag.startswith("--"))
    elif name == "recipe":
        stages = recipe_file.read(ROOT / arguments[0]).stages
        assert all(config.parse(stage.argv) for stage in stages)
    elif name == "test_time":
        _, problems = answers.split(arguments)
        config.parse(problems[0])
    elif name == "check_reward":
        reward = tyro.cli(check_reward.Flags, args=arguments).reward
        assert reward in wings.VERIFIERS or reward.endswith("DIR")
    else:
        arguments, problems = answers.split(arguments)
        assert all(config.parse(flags) for flags in problems)
        flags = {"evaluate": evaluate, "combine": combine, "compare": compare}[name].Flags
        tyro.cli(flags, args=arguments)
