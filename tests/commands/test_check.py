"""`tpu-rl check`: the proofs of an algorithm, by name or in a file."""

import pytest

from tpu_rl.commands import cli
from tpu_rl.commands.tools import check
from tpu_rl.proofs import PROOFS

BROKEN = """
from dataclasses import dataclass
from tpu_rl.algos.grpo import GrpoConfig, grpo

@dataclass(frozen=True)
class Config(GrpoConfig):
    pass

def broken(config: Config, roles, sampling):
    algorithm = grpo(config, roles, sampling)
    return algorithm._replace(loss=lambda params, batch: batch.no_such_field)
"""


def test_the_flag_knows_every_proof():
    assert list(check.ProofName.__args__) == list(PROOFS)


def test_a_built_in_algorithm_by_its_name(capsys):
    names = [name for name in PROOFS if name != "learned"]
    assert cli.main(["check", "sft", "--skip", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "learned" in line] == ["ok", "skipped"][:1]
    assert sum(line.startswith("skipped") for line in lines) == len(names)


def test_an_exception_is_a_failed_proof(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    assert check.main([f"{file}:broken", "--skip", "bits"]) == 1
    output = capsys.readouterr().out
    assert "FAILED  cut" in output
    assert "AttributeError: 'PolicyBatch' object has no attribute 'no_such_field'" in output
    assert "mine.py:11:" in output


def test_a_factory_without_a_result_is_exit_code_2(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from tpu_rl.algos import GrpoConfig\ndef mine(config: GrpoConfig, roles, sampling): pass\n"
    )
    assert check.main([f"{file}:mine"]) == 2
    assert "it returned None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grop"], "did you mean grpo?"),
        (["missing.py:factory"], "no such algorithm file"),
        (["mine.py"], "name its factory: mine.py:FACTORY"),
        (["grpo", "--gamma", "0.5"], "gamma is not read with credit episode"),
        (["grpo", "--clip-low", "-1"], "where: --clip-low"),
        (["grpo", "--no-such-setting", "1"], "no-such-setting"),
        (["grpo", "--skip", "everything"], "everything"),
    ],
    ids=["name", "file", "no factory", "settings", "number", "flag", "proof"],
)
def test_unusable_input_is_exit_code_2(capsys, arguments, message):
    try:
        code = check.main(arguments)
    except SystemExit as exit_of_parser:
        code = exit_of_parser.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
