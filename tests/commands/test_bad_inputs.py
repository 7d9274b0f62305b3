"""94 bad inputs, by number: each is one clear message, or taken and said. `TESTED` says where.

What, where, why and how to mend it, on one screen, before a device is claimed.
"""

import ast
import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import data, models, tokenizers
from tpu_rl.commands import config, roles, run, saved_run
from tpu_rl.commands.checks import preflight
from tpu_rl.data import files as row_files
from tpu_rl.data import stored_rows
from tpu_rl.diagnosis import host_agreement, secret_settings, training_health
from tpu_rl.errors import InputError, MachineError, TpuRlError
from tpu_rl.models.hf import safetensors_files
from tpu_rl.runtime import agreement, host, processes
from tpu_rl.tasks import arithmetic

SCREEN = 24
"""Lines of a small terminal."""

UNTESTED: dict[int, str] = {}

TESTED = {
    # The file.
    1: "data/test_data.py::test_missing_files_and_directories",
    2: "data/test_data.py::test_missing_files_and_directories",
    3: "data/test_data.py::test_other_formats_are_recognized",
    4: "data/test_data.py::test_other_formats_are_recognized",
    5: "data/test_data.py::test_byte_order_mark_and_windows_line_ends_are_accepted",
    6: "data/test_data.py::test_other_formats_are_recognized",
    7: "data/test_data.py::test_a_bad_line_is_named",
    8: "data/test_data.py::test_a_cut_off_last_line_is_named",
    9: "data/test_data.py::test_other_formats_are_recognized",
    10: "data/test_data.py::test_other_formats_are_recognized",
    11: "data/test_data.py::test_a_bad_line_is_named",
    12: "data/test_data.py::test_a_bad_line_is_named",
    13: "data/test_data.py::test_a_bad_line_is_named",
    14: "data/test_data.py::test_a_bad_line_is_named",
    15: "data/test_data.py::test_a_bad_line_is_named",
    16: "data/test_data.py::test_a_bad_line_is_named",
    17: "commands/test_bad_inputs.py::test_doubtful_rows_are_counted",
    18: "data/test_data.py::test_byte_order_mark_and_windows_line_ends_are_accepted",
    19: "commands/test_bad_inputs.py::test_files_and_rows",
    20: "data/test_data.py::test_other_formats_are_recognized",
    21: "data/test_data.py::test_other_formats_are_recognized",
    22: "data/test_data.py::test_other_formats_are_recognized",
    23: "data/test_data.py::test_other_formats_are_recognized",
    24: "data/test_data.py::test_parquet",
    25: "commands/test_bad_inputs.py::test_files_and_rows",
    26: "data/test_data.py::test_missing_files_and_directories",
    27: "commands/test_bad_inputs.py::test_a_file_that_may_not_be_read",
    28: "data/test_data.py::test_a_state_of_another_stream_is_refused",
    # Rows.
    29: "data/test_data.py::test_a_missing_column_lists_those_present_and_the_nearest",
    30: "data/test_data.py::test_a_missing_column_lists_those_present_and_the_nearest",
    31: "data/test_data.py::test_a_bad_line_is_named",
    32: "data/test_data.py::test_a_bad_line_is_named",
    33: "data/test_data.py::test_a_bad_line_is_named",
    34: "commands/test_bad_inputs.py::test_doubtful_rows_are_counted",
    35: "studies/test_pair_audit.py::test_every_row_is_accounted_for",
    36: "commands/test_bad_inputs.py::test_files_and_rows",
    37: "data/test_data.py::test_a_bad_line_is_named",
    38: "data/test_data.py::test_a_bad_line_is_named",
    39: "commands/test_bad_inputs.py::test_files_and_rows",
    40: "data/test_data.py::test_a_bad_line_is_named",
    41: "commands/test_bad_inputs.py::test_files_and_rows",
    42: "tokenizers/test_tokenizers.py::test_broken_templates_are_input_errors",
    43: "tokenizers/test_tokenizers.py::test_control_tokens_in_messages_stay_text",
    44: "rollout/test_prompts.py::test_prompts_that_are_too_long_are_dropped",
    45: "commands/test_bad_inputs.py::test_a_run_refuses",
    46: "rollout/test_prompts.py::test_prompts_that_are_too_long_are_dropped",
    47: "commands/test_bad_inputs.py::test_a_run_refuses",
    48: "commands/test_bad_inputs.py::test_doubtful_rows_are_counted",
    49: "commands/test_bad_inputs.py::test_a_run_refuses",
    50: "commands/test_bad_inputs.py::test_doubtful_rows_are_counted",
    # Models and tokenizers.
    51: "commands/test_bad_inputs.py::test_models",
    52: "models/test_hf_checkpoint.py::test_vocabulary_beyond_the_tokenizer_is_no_token",
    53: "tokenizers/test_tokenizers.py::test_tokenizer_json_alone_suffices_except_for_its_end",
    54: "tokenizers/test_tokenizers.py::test_tokenizer_json_alone_suffices_except_for_its_end",
    55: "tokenizers/test_tokenizers.py::test_messages_without_a_template_are_refused",
    56: "tokenizers/test_tokenizers.py::test_broken_templates_are_input_errors",
    57: "tokenizers/test_tokenizers.py::test_template_bombs_are_refused",
    58: "commands/test_bad_inputs.py::test_without_jinja2",
    59: "models/test_hf_checkpoint.py::test_damaged_directories",
    60: "commands/test_bad_inputs.py::test_models",
    61: "models/test_hf_checkpoint.py::test_damaged_directories",
    62: "models/test_hf_checkpoint.py::test_misfits_are_named",
    63: "commands/test_bad_inputs.py::test_models",
    64: "models/test_hf_checkpoint.py::test_damaged_directories",
    65: "models/test_decoder.py::test_unsupported_configurations_are_refused",
    66: "commands/test_distill_run.py::test_teacher_with_another_tokenizer_is_refused",
    67: "models/test_lora.py::test_impossible_settings_are_named",
    # Configurations and runs.
    68: "commands/test_run.py::test_an_unknown_flag_names_the_nearest",
    69: "commands/test_bad_inputs.py::test_a_value_that_is_no_number",
    70: "train/test_optimizers.py::test_a_learning_rate_must_be_a_positive_number",
    71: "commands/test_run.py::test_bad_input_is_one_message_and_code_2",
    72: "commands/test_run.py::test_bad_input_is_one_message_and_code_2",
    73: "train/test_sharding.py::test_impossible_meshes_name_those_that_fit",
    74: "algos/test_dpo.py::test_settings_of_judged_completions_out_of_range_are_refused",
    75: "commands/test_run.py::test_bad_input_is_one_message_and_code_2",
    76: "commands/test_bad_inputs.py::test_a_run_refuses",
    77: "commands/test_bad_inputs.py::test_equal_rewards_are_said_after_some_steps",
    78: "commands/test_bad_inputs.py::test_empty_completions_are_said",
    79: "commands/test_run.py::test_a_folder_of_another_configuration_is_refused",
    80: "checkpoint/test_lock.py::test_a_second_job_is_refused_with_the_name_of_the_first",
    81: "checkpoint/test_checkpoint.py::test_a_full_disk_is_said_at_the_latest_when_waiting",
    82: "commands/test_bad_inputs.py::test_a_run_refuses",
    83: "checkpoint/test_checkpoint.py::test_other_arrays_are_refused_by_name",
    84: "checkpoint/test_checkpoint.py::test_other_arrays_are_refused_by_name",
    85: "checkpoint/test_checkpoint.py::test_another_format_is_refused",
    86: "experience/test_pairs.py::test_resume_equals_an_uninterrupted_run",
    87: "rewards/test_rewards.py::test_faults_of_user_files_are_named",
    88: "rewards/test_rewards.py::test_a_wrong_number_of_values_is_an_error_and_costs_one_call",
    89: "commands/test_bad_inputs.py::test_a_tpu_that_another_process_holds",
    90: "commands/test_bad_inputs.py::test_an_accelerator_that_is_not_used_is_said",
    91: "commands/test_bad_inputs.py::test_processes_that_differ_say_in_what",
    92: "test_metrics.py::test_wandb_that_is_not_installed_is_said",
    93: "commands/test_bad_inputs.py::test_a_run_refuses",
    94: "runtime/test_several_processes.py::test_a_port_that_is_taken_is_said",
}


def test_every_number_is_tested_or_says_why_not():
    assert sorted(TESTED | UNTESTED) == list(range(1, 95))
    assert not TESTED.keys() & UNTESTED.keys()
    assert len(TESTED) >= 85
    files = {place.partition("::")[0] for place in TESTED.values()}
    trees = {file: ast.parse((Path(__file__).parents[1] / file).read_text()).body for file in files}
    there = {
        f"{file}::{node.name}"
        for file in files
        for node in trees[file]
        if isinstance(node, ast.FunctionDef)
    }
    assert not {number: place for number, place in TESTED.items() if place not in there}


def require_one_screen(text: str) -> None:
    assert "Traceback" not in text
    assert len(text.splitlines()) <= SCREEN
    assert max(map(len, text.splitlines())) < 600


def require_remedy(error: TpuRlError) -> None:
    """What, and where or how to mend it, on one screen."""
    require_one_screen(str(error))
    assert error.where or error.fix


# --- data ---

ROWS = {
    19: ({"prompt": "a" * stored_rows.MAX_ROW_BYTES}, ("prompt",), "more than 10,000,000 bytes"),
    36: (
        {"prompt": "a", "chosen": "", "rejected": "b"},
        ("prompt", "chosen", "rejected"),
        "`chosen` is empty",
    ),
    39: ({"prompt": [{"role": "usr", "content": "a"}]}, ("prompt",), "did you mean 'user'?"),
    41: (
        {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        ("prompt",),
        "last message is the assistant's",
    ),
}


@pytest.mark.parametrize("number", [19, 25, 36, 39, 41])
def test_files_and_rows(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    if number == 25:
        columns, message, where = ("prompt",), "no file matches the pattern", tmp_path / "*.parquet"
        path = where
    else:
        row, columns, message = ROWS[number]
        path.write_text(
            '{"prompt": "first", "chosen": "a", "rejected": "b"}\n' + json.dumps(row) + "\n"
        )
        where = f"{path}:2"
        if number in (39, 41):  # of another kind than the first row: keep to one
            path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=re.escape(message)) as error:
        data.read(path, columns)
    assert error.value.where == str(where)
    require_remedy(error.value)


def test_a_pattern_lists_what_it_matches(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(InputError, match=r"a\.jsonl"):
        data.read(tmp_path / "*.jsonl")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(InputError, match="not a regular file"):
        data.read(tmp_path / "rows.jsonl")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(path: Path, mode: str) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(InputError, match="cannot read the data file") as error:
        data.read(path)
    assert error.value.why == "Permission denied"
    require_remedy(error.value)


DOUBTS = {
    17: ([{"prompt": "a\0b"}], [], "1 rows hold the character NUL"),
    34: ([{"prompt": " \n"}], [], "1 prompts are nothing but white space"),
    48: ([{"prompt": "a"}] * 3 + [{"prompt": "b"}], [], "2 prompts repeat earlier ones"),
    35: ([{"prompt": "a", "completion": ""}], [], "1 rows have an answer without a text"),
    51: (
        [{"prompt": "a", "chosen": "b", "rejected": ""}],
        [],
        "1 rows have an answer without a text",
    ),
    52: (
        [{"prompt": "a", "completion": text, "label": True} for text in "bc"],
        [],
        "2 completions have the label true, and none has the other",
    ),
    49: (
        [{"prompt": "Why? ", "chosen": "Why? So.", "rejected": "Why? No."}],
        [],
        "1 pairs repeat their prompt in both answers",
    ),
    50: (
        [{"prompt": "a"}],
        [{"prompt": "a"}, {"prompt": "b"}],
        "1 of the 2 held-out rows are among the training rows",
    ),
}


@pytest.mark.parametrize("number", DOUBTS)
def test_doubtful_rows_are_counted(number):
    rows, held_out, message = DOUBTS[number]
    assert [line for line in row_files.warnings(rows, held_out) if message in line]


def test_ordinary_rows_have_no_warnings():
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert row_files.warnings([{"prompt": "a"}, {"prompt": "b"}], [{"prompt": "c"}]) == []
    assert row_files.warnings([pair, {**pair, "rejected": "d"}], []) == []
    good = {"prompt": "a", "completion": "b", "label": 1}
    equal = [{"prompt": "a", "seed": seed} for seed in range(3)]
    assert row_files.warnings(equal[:2], equal[2:])
    assert row_files.warnings(equal[:2], equal[2:], compares_prompts=False) == []
    assert row_files.warnings([good, good | {"label": 0}], []) == []
    assert row_files.warnings([{"messages": [{"role": "user", "content": "a"}]}], []) == []


# --- models and tokenizers ---

TOKENIZER = tokenizers.characters(arithmetic.ALPHABET, chat_template="{{ messages[0].content }}")
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def directory(tmp_path) -> Path:
    """A whole model directory of one small layer."""
    model = models.from_config({"model_type": "llama", "vocab_size": TOKENIZER.vocab_size} | SIZES)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    models.save(tmp_path / "model", model, params, TOKENIZER)
    return tmp_path / "model"


def change_config(directory: Path, **values) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def set_tensor(directory: Path, name: str, value: float) -> None:
    path = directory / "model.safetensors"
    tensors = {
        key: np.array(stored.read()) for key, stored in safetensors_files.read_header(path).items()
    }
    tensors[name].flat[3] = value
    safetensors_files.write_file(
        path, {key: (t.dtype, t.shape) for key, t in tensors.items()}, tensors.values()
    )


MODELS = {
    51: (lambda path: change_config(path, vocab_size=12), "ids and the model's embedding 12"),
    60: (
        lambda path: change_config(path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}),
        "brings its own code, which is never run",
    ),
    63: (
        lambda path: set_tensor(path, "model.norm.weight", float("nan")),
        "1 of 12 tensors hold NaN or infinity",
    ),
}


@pytest.mark.parametrize("number", MODELS)
def test_models(directory, number):
    change, message = MODELS[number]
    change(directory)
    with pytest.raises(InputError, match=message) as error:
        models.load(directory)
    require_remedy(error.value)


@pytest.mark.parametrize("role", ["policy", "teacher"])
def test_a_classifier_does_not_write(directory, role):
    """Its embedding would pass for a vocabulary's head, and its text would be noise."""
    flags = {
        "policy": ["arithmetic_grpo", "--model.path", str(directory)],
        "teacher": ["arithmetic_gkd", "--algorithm.teacher", str(directory)],
    }
    settings = config.parse(flags[role])
    change_config(directory, architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(InputError, match="a head of 1 numbers and writes no text") as error:
        roles.role_models(settings, roles.from_config(settings, roles.model_directory(settings)))
    require_remedy(error.value)
    assert str(directory) in str(error.value.where)


def test_a_language_model_is_no_critic(directory):
    """Its new head would be random, and A-LoL would subtract noise."""
    flags = ["scored_completions", "--model.path", str(directory), "--data.path", "rows.jsonl"]
    a_lol = ["--algorithm.loss", "a_lol", "--algorithm.critic", str(directory)]
    settings = config.parse([*flags, *a_lol])
    with pytest.raises(InputError, match="no head of 1 number") as error:
        roles.role_models(settings, roles.from_config(settings, roles.model_directory(settings)))
    require_remedy(error.value)


def test_the_run_of_a_reward_model_does_not_write(tmp_path):
    """For chat, serve and --kl-to, before any checkpoint is read."""
    settings = config.parse(["reward_model", "--model.path", "builtin:arithmetic"])
    config.save(settings, tmp_path / "config.yaml")
    with pytest.raises(
        InputError, match="the run trained the role 'reward' and no policy"
    ) as error:
        saved_run.load_language(str(tmp_path), settings)
    require_remedy(error.value)


def test_without_jinja2(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MachineError, match="jinja2") as error:
        TOKENIZER.render([{"role": "user", "content": "a"}])
    assert error.value.fix == "pip install jinja2"


# --- configurations and runs ---

SECRET = "hf_" + "s3cret" * 6

FILE = [
    "gsm8k_grpo",
    "--data.format",
    "plain",
    "--model.path",
    "builtin:arithmetic",
    "--data.path",
    "{file}",
]
SHORT = ["--sampling.max-prompt-tokens", "16", "--sampling.max-new-tokens", "16"]
FLAGS = {
    45: (["--sampling.max-prompt-tokens", "500", "--batch.row-length", "1000"], "context is 512"),
    47: ([*FILE, *SHORT, "--batch.prompts", "8"], "3 training rows are fewer than a batch of 8"),
    49: (
        [*FILE, *SHORT, "--batch.prompts", "2", "--reward", "{reward}:judge"],
        "needs a column 'solution'",
    ),
    76: (["--sampling.max-new-tokens", "0"], "it must be at least 1"),
    82: (["--run-dir", "s3://bucket/run"], "neither local nor gs://"),
    93: (["--hub-token", SECRET], "revoke this secret"),
}


@pytest.mark.parametrize("number", FLAGS)
def test_a_run_refuses(tmp_path, capsys, number):
    flags, message = FLAGS[number]
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(3))
    )
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def judge(prompts, completions, solution):\n    return [0.0] * len(prompts)\n"
    )
    given = [flag.format(file=file, reward=reward) for flag in flags]
    assert (
        run.main(given if "--run-dir" in flags else [*given, "--run-dir", str(tmp_path / "run")])
        == 2
    )
    printed = capsys.readouterr()
    assert message in printed.err
    assert SECRET not in printed.err + printed.out
    require_one_screen(printed.err)


@pytest.mark.parametrize(
    "words",
    [
        ["--wandb-api-key=abcdefgh"],
        ["--model.path", "https://me:pa55word@host/model"],
        ["--reward", "AKIA" + "A" * 16],
        ["-----BEGIN RSA PRIVATE KEY-----"],
    ],
)
def test_secrets_are_known_by_their_names_and_shapes(words):
    with pytest.raises(InputError, match="a secret was given") as error:
        secret_settings.refuse_secrets(words)
    assert not any(part in str(error.value) for part in ("abcdefgh", "pa55word", "AKIAA"))


def test_ordinary_flags_are_no_secrets():
    flags = "arithmetic_grpo --sampling.max-new-tokens 16 --run-dir /data/runs/key"
    flags += " --model.path owner/sk-model"
    secret_settings.refuse_secrets(flags.split())


def test_a_value_that_is_no_number(capsys):
    """Number 69."""
    assert run.main(["--optimizer.learning-rate", "1e-5x"]) == 2
    printed = capsys.readouterr().err
    assert "--optimizer.learning-rate" in printed
    assert "1e-5x" in printed
    require_one_screen(printed)


def test_equal_rewards_are_said_after_some_steps():
    watch = training_health.HealthMonitor(patience=3)
    samples = [{"reward": 0.0, "completion": "a"}] * 3 + [{"reward": 1.0, "completion": "a"}]
    equal, unequal = {"reward/zero_std_groups": 1.0}, {"reward/zero_std_groups": 0.5}
    said = [
        watch.observe(metrics, samples)
        for metrics in (equal, equal, unequal, equal, equal, equal, equal)
    ]
    assert [bool(lines) for lines in said] == [False] * 5 + [True, False]
    assert "for 3 steps" in said[5][0]
    assert "0: 9, 1: 3" in said[5][0]


def test_a_short_name_in_a_group_gets_the_flag_that_is_meant():
    with pytest.raises(InputError, match="did you mean --optimizer.learning-rate"):
        config.parse(["arithmetic_grpo", "--optimizer.lr", "1e-3"])
    # The same last part is right in another group, and stays what it is.
    assert config.parse(["arithmetic_dpo", "--algorithm.beta", "0.2"]).algorithm.beta == 0.2


def test_lengths_that_nobody_set_fit_the_model(tmp_path, capsys):
    flags = ["grpo", "--model.path", "builtin:arithmetic", "--data.path", "rows.jsonl"]

    def lengths(*more: str) -> tuple[int, int]:
        sampling = config.parse([*flags, *more]).sampling
        return sampling.max_prompt_tokens, sampling.max_new_tokens

    assert lengths() == (256, 256)
    said = "the model's context is 512 tokens: --sampling.max-prompt-tokens 256 "
    assert said in capsys.readouterr().err
    assert lengths("--sampling.max-new-tokens=512") == (512, 512)  # Refused later.
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    flags[2] = str(tmp_path)
    assert lengths() == (512, 512)
    assert not capsys.readouterr().err


def test_a_warm_up_that_never_ends_is_said():
    parsed = config.parse(["arithmetic_grpo", "--steps", "3", "--optimizer.warmup-steps", "4"])
    assert "ends at 75%" in preflight.check_warmup(parsed)[0]
    assert not preflight.check_warmup(dataclasses.replace(parsed, steps=4))


def test_a_run_without_flags_is_read_and_an_emptied_flag_may_be_given_again():
    assert config.parse([]).reward
    flags = ["arithmetic_grpo", "--reward", "--batch.prompts", "4", "--reward", "arithmetic"]
    assert config.parse(flags).reward == ("arithmetic",)


def test_rows_that_are_computed_in_vain_are_said_once():
    watch = training_health.HealthMonitor()
    shares = (0.75, 0.75, 0.5, 0.75, 0.75, 0.75, 0.75)
    said = [watch.observe({"perf/empty_rows": share}, []) for share in shares]
    assert [bool(lines) for lines in said] == [False] * 5 + [True, False]
    assert "75% of the packed rows" in said[5][0]


def test_empty_completions_are_said():
    empty, full = {"reward": 0.0, "completion": ""}, {"reward": 0.0, "completion": "a"}
    assert (
        "2 of 3 completions are empty"
        in training_health.HealthMonitor().observe({}, [empty, empty, full])[0]
    )
    assert training_health.HealthMonitor().observe({}, [empty, full]) == []
    assert training_health.HealthMonitor().observe({}, []) == []


def test_a_tpu_that_another_process_holds(tmp_path, monkeypatch):
    for pid, target in (
        ("41", "/dev/null"),
        ("42", "/dev/accel0"),
        (str(os.getpid()), "/dev/accel0"),
    ):
        (tmp_path / "proc" / pid / "fd").mkdir(parents=True)
        (tmp_path / "proc" / pid / "comm").write_text("python\n")
        (tmp_path / "proc" / pid / "fd" / "3").symlink_to(target)

    def busy():
        raise RuntimeError(
            "Unable to initialize backend 'tpu': the TPU is already in use\nand more"
        )

    monkeypatch.setattr(host.jax, "devices", busy)
    with pytest.raises(MachineError, match=r"pid 42 \(python\)") as error:
        host.claim_devices(tmp_path)
    assert "41" not in error.value.fix
    assert error.value.why.endswith("already in use")


def test_processes_that_differ_say_in_what(monkeypatch):
    """Number 91."""
    first, second = (
        host_agreement.identity(
            config.to_dict(config.parse(["--seed", seed, "--run-dir", "runs/a"])),
            (run.CODE_FOLDER,),
        )
        for seed in "01"
    )
    assert agreement.differences(first, second) == ["seed is 1 there and 0 on the first"]
    assert agreement.differences(first, dict(first)) == []
    more = first | {"algorithm.another": "1"}
    assert agreement.differences(first, more) == [
        "algorithm.another is 1 there and missing on the first"
    ]
    assert agreement.differences(more, first) == [
        "algorithm.another is missing there and 1 on the first"
    ]

    monkeypatch.setattr(processes, "count", lambda: 3)
    monkeypatch.setattr(
        processes,
        "gather",
        lambda value: [value, value, {"host": "b", "settings": value["settings"] | {"code": "0"}}],
    )
    settings = config.to_dict(config.parse(["--run-dir", "runs/a"]))
    with pytest.raises(InputError, match="processes of this run differ") as error:
        host_agreement.require_same_run(settings, (run.CODE_FOLDER,))
    assert error.value.where == "process 2 on host b"
    assert error.value.why.startswith("code is 0 there and ")
    require_remedy(error.value)


@pytest.mark.parametrize(
    ("flags", "who", "remedy"),
    [
        (["arithmetic_grpo"], "policy would", "--model.lora.rank"),
        (["arithmetic_ppo"], "policy and value would", "--model.lora.rank"),
        (
            ["arithmetic_ppo", "--model.lora.rank", "2"],
            "the head of value would",
            "--model.param-dtype float32",
        ),
        (["arithmetic_grpo", "--model.lora.rank", "2"], None, ""),
        (
            ["arithmetic_grpo", "--model.param-dtype", "float32", "--model.dtype", "bfloat16"],
            None,
            "",
        ),
    ],
)
def test_updates_that_bfloat16_loses_are_said(flags, who, remedy):
    doubts = preflight.check(
        config.parse([flags[0], "--model.param-dtype", "bfloat16", *flags[1:]])
    )
    if who is None:
        assert not doubts
        return
    (doubt,) = doubts
    assert doubt.startswith(who + " learn in bfloat16")
    assert remedy in doubt


DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}.104.05  Sat Aug 19\nGCC version: gcc 12"
)


@pytest.mark.parametrize(
    ("file", "content", "advice"),
    [
        ("proc/driver/nvidia/version", DRIVER.format(580), 'CPU: pip install "jax[cuda13]=='),
        ("proc/driver/nvidia/version", DRIVER.format(535), 'CPU: pip install "jax[cuda12]=='),
        ("proc/driver/nvidia/version", DRIVER.format(470), "driver 470 is too old, install 525"),
        ("proc/driver/nvidia/version", "", 'CPU: pip install "jax[cuda13]=='),
        ("dev/accel0", "", 'CPU: pip install "jax[tpu]=='),
    ],
)
def test_an_accelerator_that_is_not_used_is_said(tmp_path, file, content, advice):
    assert host.unused_accelerator(tmp_path) is None
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(content)
    assert advice in str(host.unused_accelerator(tmp_path))


def test_a_plugin_of_another_version_is_named(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/accel0").touch()
    plugins = {"jax-cuda13-plugin": [SimpleNamespace(version="0.7.2")]}
    monkeypatch.setattr(
        host.importlib.metadata, "distributions", lambda name: plugins.get(name, [])
    )
    advice = f"the CPU, because jax-cuda13-plugin 0.7.2 does not fit jax {jax.__version__}: pip"
    assert advice in str(host.unused_accelerator(tmp_path))


@pytest.mark.slow
def test_no_device_is_claimed_before_the_input_is_checked(tmp_path):
    """With a platform that does not exist, whoever touches a device fails otherwise than with the
    user's error."""
    bad = [
        ["--model.path", "no/such/dir/at/all"],
        FLAGS[45][0],
        [*FILE[:-1], str(tmp_path / "none.jsonl")],
    ]
    commands = [[*command, "--run-dir", str(tmp_path / "run")] for command in bad]
    program = "import sys, json; from tpu_rl.commands import run; "
    program += "[print(run.main(c)) for c in json.loads(sys.argv[1])]"
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(commands)],
        env=os.environ | {"JAX_PLATFORMS": "nowhere"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.stdout.split() == ["2", "2", "2"], result.stderr
