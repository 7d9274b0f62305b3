"""`--help` fits on a screen, and what it names exists."""

import pytest

from tpu_rl.commands import config
from tpu_rl.commands.flags import help_text


@pytest.mark.parametrize("name", config.preset_names())
def test_help_fits_on_a_screen(name):
    text = help_text.short_help(name, config.preset(name), config.preset_names())
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    assert f"{name} --help-all" in text


def test_it_names_all_methods_and_only_flags_that_exist(capsys):
    with pytest.raises(SystemExit) as end:
        config.parse(["grpo", "--steps", "3", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        config.parse(["grpo", "--help-all"])
    every_flag = capsys.readouterr().out.split()
    common = [word for line in shown.splitlines() for word in line.split()[:1] if word[:2] == "--"]
    assert len(common) == len(help_text.COMMON) + 1
    assert {flag for flag in common if {flag, f"{flag},"}.isdisjoint(every_flag)} == set()
    assert set(help_text.METHODS) <= set(config.preset_names())
