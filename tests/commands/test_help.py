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


def test_a_word_finds_the_settings_that_name_it_one_line_each(capsys):
    def lines(*flags):
        with pytest.raises(SystemExit) as end:
            config.parse(["grpo", *flags])
        assert end.value.code == 0
        return capsys.readouterr().out.splitlines()

    by_name = lines("--help", "lora", "rank")
    assert by_name[0].startswith("--model.lora.rank INT  Number of columns of A")
    assert all("lora" in line.lower() and "rank" in line.lower() for line in by_name)
    by_text = lines("--help", "Weights & Biases")
    assert [line.split()[0] for line in by_text] == ["--wandb,"]
    assert lines("--help", "max_new_tokens")[0].startswith("--sampling.max-new-tokens INT  Length")
    # Choices that take several lines of tyro's.
    [rejection] = [line for line in lines("--help", "k3") if line.startswith("--algorithm.rej")]
    assert "sequence_max_k3}  Leave out" in rejection
    assert lines("--help", "nosuchword") == ["no setting names nosuchword; --help-all lists all"]


def test_all_flags_are_printed_in_aligned_lines(capsys):
    with pytest.raises(SystemExit):
        config.parse(["sft", "--help-all"])
    lines = capsys.readouterr().out.splitlines()
    texts = [line for line in lines if line.startswith("      ")]
    assert max(map(len, texts)) <= 100
    flags = [line for line in lines if line.startswith("  --")]
    assert len(flags) > 150
    assert {len(line) - len(line.lstrip()) for line in lines if line} == {0, 2, 6}
