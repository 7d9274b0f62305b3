"""The console command runs what the folder launch holds."""

import pytest

import tpu_rl
from launch import config
from tpu_rl import cli


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
