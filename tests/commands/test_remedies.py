"""Remedies that can be followed: each is, to the letter, on the input that printed it."""

import re

import pytest

from tests.fixtures.dry_runs import inspect
from tpu_rl.commands import run
from tpu_rl.errors import TpuRlError

ASKED = {"role": "user", "content": "2+2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
TALK = {"messages": [ASKED]}
ROWS = {
    "question": ("grpo", {"question": "2+2?", "answer": "4"}),
    "object": ("grpo", {"input": TALK, "answer": "4"}),
    "inputs": ("sft", {"inputs": "2+2?", "targets": "4"}),
    "pairs": ("dpo", {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"}),
    "output": ("dpo", {"prompt": "2+2?", "preferred_output": "4", "non_preferred_output": "5"}),
    "openai": ("dpo", {"input": TALK, "preferred_output": [GOOD], "non_preferred_output": [BAD]}),
    "one of two": ("dpo", {"prompt": "2+2?", "response_j": "4", "other": "5"}),
    "ids": ("sft", {"input_ids": [1, 2, 3]}),
    "kto": ("kto", {"prompt": "2+2?", "completion": "4", "kto_tag": True}),
    "verl": ("grpo", {"prompt": [ASKED], "reward_model": {"ground_truth": "4"}}),
    "list": ("grpo", {"prompt": "2+2?", "answer": ["4"]}),
    "text": ("grpo", {"prompt": "2+2?", "answer": '["4"]'}),
    "object of answers": ("grpo", {"prompt": "2+2?", "answer": {"value": "4"}}),
}


def attempt(checkpoint, folder, capsys, method, row, flags):
    rows = [row] * 8
    code = inspect(checkpoint, folder, method, rows, *flags)
    return code, capsys.readouterr()


@pytest.mark.parametrize("name", ROWS)
def test_columns_that_a_remedy_names_work(checkpoint, tmp_path, capsys, name):
    method, row = ROWS[name]
    flags = ["--reward", "gsm8k"] if method == "grpo" else []
    code, printed = attempt(checkpoint, tmp_path, capsys, method, row, flags)
    if code == 0:
        return
    remedy = re.search(r"--data\.columns ((?:\w+=[\w.]+ ?)+)", printed.err)
    assert "COLUMN" not in printed.err
    if remedy is None:
        return
    flags = [*flags, "--data.columns", *remedy[1].split()]
    code, again = attempt(checkpoint, tmp_path, capsys, method, row, flags)
    assert code == 0 or again.err != printed.err, again.err


SCORES = """
def verifiers(completion, answer, **kw):
    return [1.0]

def of_one(prompt, completion, answer, info):
    return 1.0

def easy_r1(reward_inputs):
    return [1.0]

def logs(prompts, completions, log_extra=None, **kw):
    log_extra("n", [1])
    return [1.0] * len(completions)

def state(prompts, completions, trainer_state=None, **kw):
    return [trainer_state.global_step] * len(completions)

def state_needed(prompts, completions, trainer_state, **kw):
    return [1.0]

def verl_old(solution_str, **kw):
    return 1.0
"""


@pytest.mark.parametrize("gold", [{}, {"completion": "4"}])
@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("verifiers", "verifiers"),
        ("of_one", "verifiers"),
        ("easy_r1", "EasyR1"),
        ("logs", "if log_extra:"),
        ("state", "name `step`"),
        ("state_needed", "name `step`"),
        ("verl_old", "ground_truth"),
    ],
)
def test_other_forms_of_rewards_are_named_and_no_column_takes_the_place_of_a_completion(
    checkpoint, tmp_path, capsys, function, named, gold
):
    row = {"prompt": "2+2?", "answer": "4", "reward_model": {"ground_truth": "4"}} | gold
    (tmp_path / "scores.py").write_text(SCORES)
    flags = ["--reward", f"{tmp_path}/scores.py:{function}"]
    code, printed = attempt(checkpoint, tmp_path, capsys, "grpo", row, flags)
    assert code == 2
    fix = next(line for line in printed.err.splitlines() if line.startswith("  fix:"))
    assert named in fix
    assert "completion=" not in fix
    assert "did you mean" not in fix


FILES = {
    "verl": "actor_rollout_ref: {model: {path: m}}\ntrainer: {nnodes: 1}\n",
    "axolotl": "base_model: m\ndatasets:\n  - path: a\n    type: alpaca\n",
    "LLaMA-Factory": "model_name_or_path: m\nfinetuning_type: lora\nstage: sft\n",
}


@pytest.mark.parametrize("library", FILES)
def test_files_of_other_libraries_are_named(tmp_path, capsys, library):
    file = tmp_path / "other.yaml"
    file.write_text(FILES[library])
    for arguments in ([str(file)], ["--config", str(file)]):
        try:
            run.main(arguments)
        except TpuRlError as error:
            print(error)
        assert library in "".join(capsys.readouterr())


@pytest.mark.parametrize("behind", [[], ["--reward", "gsm8k"]])
def test_settings_in_the_form_of_hydra_are_named(capsys, behind):
    try:
        run.main(["grpo", *behind, "data.train_files=a.parquet", "+algorithm.adv_estimator=grpo"])
    except TpuRlError as error:
        print(error, error.fix)
    assert "data.train_files is a setting of verl" in "".join(capsys.readouterr())
