"""The console command `tpu-rl`, and the scripts of the folder launch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tpu_rl
from tpu_rl.commands import cli, config

ROOT = Path(__file__).parents[2]


def test_presets_are_listed_with_a_line_each(capsys):
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == config.preset_names()
    assert all(len(line.split()) > 2 for line in lines)


def test_the_version_is_told(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["tpu_rl", tpu_rl.__version__]


def test_an_unknown_command_names_the_nearest(capsys):
    assert cli.main(["evalute"]) == 2
    assert "did you mean evaluate?" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert "usage" in capsys.readouterr().out


def test_errors_keep_their_exit_code(capsys):
    assert cli.main(["run", "grp"]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err


def test_the_scripts_of_launch_differ_in_their_names_only():
    texts = {path.stem: path.read_text() for path in (ROOT / "launch").glob("*.py")}
    assert texts.keys() == set(cli.COMMANDS)
    # The docstring is the first line.
    code = {text.partition("\n")[2].replace(f'"{name}"', "NAME") for name, text in texts.items()}
    assert len(code) == 1


REWARD = """
import evaluate


def reward(prompts, completions, **_):
    return [float(evaluate.NAME == "the user's") for _ in completions]
"""


@pytest.mark.slow
def test_a_reward_imports_the_users_modules(tmp_path):
    """`import evaluate` gets the module of that name and not ours: workers get the path, too."""
    (tmp_path / "evaluate.py").write_text('NAME = "the user\'s"\n')
    (tmp_path / "reward.py").write_text(REWARD)
    ended = subprocess.run(
        [
            *(sys.executable, ROOT / "launch" / "run.py", "arithmetic_grpo", "--dry-run"),
            *("--reward", "reward.py:reward", "--run-dir", tmp_path / "run"),
        ],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"reward\.reward +1 +1 +1 ", ended.stdout)
