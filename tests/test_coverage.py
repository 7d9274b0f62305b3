"""docs/coverage.md: every method has a command that is accepted, or a reason."""

import importlib.util
import json
import shlex
import shutil
import string
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest
import tyro

from tests.commands.conftest import QWEN
from tpu_rl import models, tokenizers, wings
from tpu_rl.algorithm_spec import ScoreReadout
from tpu_rl.commands import cli, config
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.evaluate import check_reward, compare, evaluate
from tpu_rl.commands.recipe import answers, recipe_file
from tpu_rl.commands.tools import combine
from tpu_rl.errors import InputError, MachineError
from tpu_rl.rewards import reward_model

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
        assert reward.partition("(")[0] in wings.VERIFIERS or reward.endswith("DIR")
    else:
        arguments, problems = answers.split(arguments)
        assert all(config.parse(flags) for flags in problems)
        flags = {"evaluate": evaluate, "combine": combine, "compare": compare}[name].Flags
        tyro.cli(flags, args=arguments)


# --- stand-ins ---

TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
    "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    "{% if add_generation_prompt %}<bos>{% endif %}"
)
OF_POLICIES = (
    *("arithmetic_grpo", "gsm8k_grpo", "sft", "stable", "mini_shell_sft", "search_calls"),
)
OF_JUDGES = (
    *("process_reward", "arithmetic_process_reward", "arithmetic_sentence_reward"),
    "reward_model",
)
RUNS = sorted(
    {command for method in METHODS for command in method.commands if command.startswith("run ")}
)
ROW = {
    "prompt": "What is 1+2?",
    "answer": "3",
    "solution": "1+2=3\n#### 3",
    "kind": "chart",
}
COLUMNS = {
    "sft": {"completion": "#### 3"},
    "distill": {"completion": "#### 3"},
    "unlearn": {"completion": "#### 3", "forget": False},
    "dpo": {
        "chosen": "#### 3",
        "rejected": "#### 4",
        "topic": "politics",
        "prompt": "1+2, in politics",
    },
    "reward_model": {"chosen": "#### 3", "rejected": "#### 4"},
    "kto": {"completion": "#### 3", "label": True},
    "scored_completions": {"completions": ["#### 3", "#### 4"], "scores": [1, 0]},
    "process_reward": {"completions": ["1+2=3\n", "#### 3"], "labels": [True, True]},
}
"""Method -> what its rows have beside a prompt."""
REWARDS = {
    "python_tests": {"tests": ["assert f(1) == 2"]},
    "python_speed": {"tests": ["assert f(1) == 2"]},
    "code_grpo": {"tests": ["assert f(1) == 2"]},
    "rubric": {"rubric": [{"text": "3", "weight": 1}]},
    "box_iou": {"answer": "[0, 0, 2, 2]"},
    "ordered_keys": {"keys": ["three"], "checks": ["len(answer) > 0"]},
    "patch_ratio": {"patch": "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-1\n+2\n"},
    "sql": {"query": "SELECT 1", "database": "CREATE TABLE t (a INT);"},
    "doubt": {},
    "verdict": {"answer": "Yes"},
}
SMALL_VOCABULARY = ("151668", "3")
"""The end of a thought in a vocabulary of words -> one of the stand-in's."""
REFUSED = {
    "--optimizer.continued": "no run wrote the model",
    "--model.router-balance": "no model that learns is a mixture of experts",
}
"""Flag -> why the stand-in is refused: everything else was accepted before."""
CODE = """
def score(completions, **columns):
    return [0.0] * len(completions)

form = step = safe = verdict = judge = chrf = score

class Class:
    text_game = True

    def reset(self, prompt, **row):
        pass

    def step(self, text):
        return "", 0.0, True, {}

Attack = Class

async def run(*arguments, **settings):
    return 0.0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what capital words in commands stand for, and with runs of other commands."""
    folder = tmp_path_factory.mktemp("coverage")
    tokenizer = tokenizers.characters(string.printable, chat_template=TEMPLATE)
    policy = models.from_config(QWEN)
    models.save(str(folder / "DIR"), policy, policy.init(jax.random.key(0)), tokenizer)
    judge = models.variant(policy, num_outputs=1)
    models.save(str(folder / "JUDGE"), judge, judge.init(jax.random.key(0)), tokenizer)
    reward_model.write_reading(folder / "JUDGE", ScoreReadout())
    for name in ("AUTHOR", "TEACHER", *(f"runs/{run}/model" for run in OF_POLICIES)):
        shutil.copytree(folder / "DIR", folder / name)
    for run in ("arithmetic_dpo", "arithmetic_dpo_reverse"):
        shutil.copytree(ROOT / "tpu_rl/pretrained/arithmetic", folder / f"runs/{run}/model")
    for name in ("JUDGE_DIR", "REWARD_MODEL_DIR", *(f"runs/{run}/model" for run in OF_JUDGES)):
        shutil.copytree(folder / "JUDGE", folder / name)
        if "process" in name or "sentence" in name:
            reward_model.write_reading(folder / name, ScoreReadout("steps", (1,), "min"))
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for name in ("agent.py", "my.py", "FILE.py", "my_metric.py"):
        (folder / name).write_text(CODE, encoding="utf-8")
    (folder / "documents.jsonl").write_text('{"id": "3", "text": "three"}\n', encoding="utf-8")
    (folder / "texts.jsonl").write_text('{"text": "3+4=#7"}\n' * 40, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.nightly if i % 6 else [])
        for i, command in enumerate(RUNS)
    ],
)
def test_the_command_passes_the_checks_of_a_run(command, place, monkeypatch):
    """Rows, rewards, models and environments are loaded, before a device would be claimed."""
    monkeypatch.chdir(place)
    _, *argv = shlex.split(command)
    if argv[0].startswith("arithmetic"):
        argv = [word.replace("TEACHER", "builtin:arithmetic") for word in argv]
    method = argv[argv.index("--algorithm") + 1] if "--algorithm" in argv else argv[0]
    row = ROW | COLUMNS.get(method, {})
    for reward, columns in REWARDS.items():
        if reward in command:
            row |= columns
    if "raw_text" in command or "text.jsonl" in command:
        row = {"text": "One and two are three."}
    for word in argv:
        if word.endswith(".jsonl") and word != "texts.jsonl":
            for name in word.rpartition("=")[2].split(","):
                rows = [dict(row) for _ in range(600)]
                for number, other in enumerate(rows):
                    if "prompt" in other:
                        other["prompt"] = f"{name} {number}: {other['prompt']}"
                text = "".join(json.dumps(other) + "\n" for other in rows)
                (place / name).write_text(text, encoding="utf-8")
    argv = [word.replace(*SMALL_VOCABULARY) for word in argv]
    try:
        preflight.check(config.parse(argv))
    except MachineError as error:
        pytest.skip(str(error))
    except InputError as error:
        refused = next((text for flag, text in REFUSED.items() if flag in argv), None)
        if refused is None or refused not in str(error):
            raise
