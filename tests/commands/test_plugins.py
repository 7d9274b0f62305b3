"""`--algorithm NAME|FILE.py:factory`: another algorithm without a change to the library."""

import textwrap
from dataclasses import replace

import pytest

from tests.fixtures.runs import TINY, rows_of
from tpu_rl import algos
from tpu_rl.algos import GrpoConfig, GspoConfig, plugins
from tpu_rl.commands import config, run
from tpu_rl.commands.tools import model_card
from tpu_rl.errors import InputError

HALVED = """
from __future__ import annotations

from dataclasses import dataclass

from tpu_rl.algos.grpo import GroupPolicyConfig, group_policy_gradient
from tpu_rl.losses.policy_gradient import clipped_surrogate


@dataclass(frozen=True)
class HalvedConfig(GroupPolicyConfig):
    \"\"\"GRPO whose loss is multiplied by a number.\"\"\"

    share: float = 1.0
    \"\"\"The number.\"\"\"


def halved(config: HalvedConfig, roles, sampling):
    def surrogate(*arguments, **settings):
        value = clipped_surrogate(*arguments, clip_low=0.2, clip_high=0.2, **settings)
        return value._replace(losses=config.share * value.losses)

    return group_policy_gradient(config, roles, sampling, surrogate)
"""


@pytest.fixture
def halved(tmp_path):
    file = tmp_path / "my_method.py"
    file.write_text(HALVED)
    return f"{file}:halved"


@pytest.mark.slow
def test_an_algorithm_of_a_file_trains_and_its_run_is_read_again(halved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["--algorithm", "my_method.py:halved", "--algorithm.share", "0.5"]
    flags = [*TINY, *own, "--steps", "1", "--run-dir", "own"]
    assert run.main(flags) == 0
    assert run.main([*TINY, "--steps", "1", "--run-dir", "grpo"]) == 0
    gradients = [rows_of(tmp_path / name)[1]["optim/grad_norm"] for name in ("own", "grpo")]
    assert gradients[0] == pytest.approx(0.5 * gradients[1], rel=1e-4)
    # The run folder names the file by its absolute path, so it is read from any folder.
    monkeypatch.chdir("/")
    saved = config.load(tmp_path / "own" / "config.yaml")
    assert saved.algorithm.share == 0.5
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert config.differences(saved, config.parse(flags)) == []
    assert model_card.method_name(saved) == "halved"
    assert config.plugin_files(saved) == [tmp_path / "my_method.py"]


def test_a_built_in_algorithm_keeps_the_settings_that_the_preset_changed():
    preset = replace(config.preset("grpo"), algorithm=GrpoConfig(kl_loss_coef=0.1))
    assert config.with_algorithm(preset, "gspo").algorithm == GspoConfig(kl_loss_coef=0.1)
    parsed = config.parse(["grpo", "--algorithm=gspo", "--algorithm.clip-low", "0.1"])
    assert parsed.algorithm == GspoConfig(clip_low=0.1)


CONFIG = """
from dataclasses import dataclass
from tpu_rl.algos import GrpoConfig
"""


@pytest.mark.parametrize(
    ("source", "name", "parts"),
    [
        ("", "gsop", ["unknown algorithm 'gsop'", "did you mean gspo?"]),
        ("", "", ["has no value", "my_algorithm.py:factory"]),
        ("", "nowhere.py:mine", ["no such algorithm file", "nowhere.py"]),
        ("1 / 0", "mine", ["does not load", "mine.py:1", "division by zero"]),
        ("def other(): pass", "mine", ["no function 'mine'", "defines other"]),
        ("def mine(config): pass", "mine", ["not the factory", "its parameters are (config)"]),
        ("def mine(c, roles, sampling): pass", "mine", ["the annotation of c is no dataclass"]),
        (
            "@dataclass(frozen=True)\nclass C: pass\nclass D(C): a: int = 1\n"
            "def mine(c: D, roles, sampling): pass",
            "mine",
            ["the annotation of c is no dataclass", "D"],
        ),
        (
            "@dataclass\nclass C: pass\ndef mine(c: C, roles, sampling): pass",
            "mine",
            ["C is not frozen"],
        ),
        (
            "@dataclass(frozen=True)\nclass C: pass\ndef mine(c: C, roles, sampling): pass",
            "mine",
            ["C has no experience and no roles"],
        ),
        (
            "@dataclass(frozen=True)\nclass C:\n    a: int\n    experience = roles = None\n"
            "def mine(c: C, roles, sampling): pass",
            "mine",
            ["a setting has no default", "'a'"],
        ),
        ("def mine(c: 'Lost', roles, sampling): pass", "mine", ["annotations cannot be read"]),
    ],
)
def test_what_is_no_algorithm_is_refused(source, name, parts, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(source if source == "1 / 0" else CONFIG + textwrap.dedent(source))
    path = name if "." in name or not source else f"{file}:{name}"
    with pytest.raises(InputError) as error:
        config.parse(["grpo", "--algorithm", path])
    assert all(part in str(error.value) for part in parts), error.value


def test_two_factories_may_take_the_same_configuration_and_must_return_an_algorithm(tmp_path):
    source = CONFIG + "def {0}(config: GrpoConfig, roles, sampling): return '{0}'\n"
    kinds = []
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(source.format(name))
        kinds.append(plugins.find(f"{tmp_path / name}.py:{name}"))
    for kind, name in zip(kinds, ("first", "second"), strict=True):
        with pytest.raises(InputError, match=f"it returned '{name}'"):
            algos.factory_of(kind)(kind(), {}, None)
    assert [plugins.display_name(kind()) for kind in kinds] == ["first", "second"]
