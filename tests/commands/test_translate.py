"""`tpu-rl translate`: configurations of TRL and verl."""

import pytest
import yaml

from tpu_rl.commands import config
from tpu_rl.commands.tools import translate
from tpu_rl.errors import InputError

TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: openai/gsm8k
learning_rate: 1.0e-6
generation_batch_size: 64
num_generations: 16
max_completion_length: 256
epsilon: 0.1
beta: 0.04
scale_rewards: none
loss_type: dr_grpo
bf16: true
lora_r: 8
use_vllm: true
deepspeed: null
loss_weights: [1.0]
"""
VERL = """
data: {train_files: train.jsonl, train_batch_size: 64, max_response_length: 512}
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-0.5B}
  actor:
    optim: {lr: 1.0e-6}
    ppo_mini_batch_size: 16
    use_kl_loss: true
    kl_loss_coef: 0.001
    loss_agg_mode: seq-mean-token-mean
  rollout: {n: 8, name: vllm}
algorithm: {adv_estimator: rloo}
trainer: {total_training_steps: 20}
"""


def run(tmp_path, text, capsys):
    """Return (exit code, the configuration, what was not carried over)."""
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    code = translate.main([str(path)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def parsed(tmp_path, text):
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    return config.parse(["--config", str(path), "--reward", "gsm8k"])


def test_a_file_of_trl_becomes_a_configuration(tmp_path, capsys):
    code, text, left = run(tmp_path, TRL, capsys)
    made = parsed(tmp_path, text)
    assert code == 0
    assert (made.batch.prompts, made.batch.group_size) == (4, 16)
    assert (made.algorithm.clip_low, made.algorithm.clip_high) == (0.1, 0.1)
    assert made.algorithm.kl_loss_coef == 0.04
    assert made.algorithm.advantages == "centered"
    assert made.algorithm.loss_aggregation == "constant_length"
    assert (made.model.dtype, made.model.lora.rank) == ("bfloat16", 8)
    assert left.splitlines() == [
        "not carried over: use_vllm: True",
        "not carried over: loss_weights: [1.0]",
    ]


def test_a_file_of_verl_becomes_a_configuration(tmp_path, capsys):
    code, text, left = run(tmp_path, VERL, capsys)
    made = parsed(tmp_path, text)
    assert code == 0
    assert (made.batch.prompts, made.batch.group_size, made.batch.num_minibatches) == (64, 8, 4)
    assert made.algorithm.kl_loss_coef == 0.001
    assert made.algorithm.advantages == "leave_one_out"
    assert made.algorithm.loss_aggregation == "sequence_mean"
    assert made.steps == 20
    assert left.splitlines() == [
        "not carried over: actor_rollout_ref.rollout.name: 'vllm'",
    ]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("generation_batch_size: 60", "not carried over: generation_batch_size: 60"),
        ("loss_type: sapo", "not carried over: loss_type: 'sapo'"),
        ("scale_rewards: [group]", "not carried over: scale_rewards: ['group']"),
        ("max_steps: -1", "not carried over: max_steps: -1"),
    ],
)
def test_what_has_no_exact_counterpart_is_named(line, shown, tmp_path, capsys):
    code, text, left = run(tmp_path, f"num_generations: 8\n{line}\n", capsys)
    assert code == 0
    assert yaml.safe_load(text) == {"preset": "grpo", "batch.group-size": 8}
    assert left == shown + "\n"


def test_generalized_advantages_are_those_of_ppo(tmp_path, capsys):
    theirs = "actor_rollout_ref.rollout.n: 1\nalgorithm.adv_estimator: gae\n"
    _, text, _ = run(tmp_path, theirs, capsys)
    made = parsed(tmp_path, text)
    assert type(made.algorithm).__name__ == "PpoConfig"


@pytest.mark.parametrize(
    ("text", "library"),
    [
        # DPO's beta and the default preset would have made a run of GRPO.
        ("model_name_or_path: m\nbeta: 0.01\nloss_type: sigmoid\n", "TRL"),
        ("model_name_or_path: m\nlearning_rate: 2.0e-4\npacking: true\n", "TRL"),
        ("base_model: m\nadapter: lora\nlora_r: 16\n", "axolotl"),
        ("model_name_or_path: m\nstage: sft\nlearning_rate: 1.0e-4\n", "LLaMA-Factory"),
        ("model: {name: m}\ncheckpointer: {output_dir: a}\nseed: 1\n", "torchtune"),
        ("rlhf_type: dpo\nmodel: m\nseed: 1\n", "ms-swift"),
        ("max_steps: 20\norchestrator: {batch_size: 8}\n", "prime-rl"),
        ("trainer: {epochs: 2}\ngenerator: {n_samples_per_prompt: 5}\n", "SkyRL"),
        ("grpo: {num_prompts_per_step: 32}\npolicy: {model_name: m}\n", "NeMo RL"),
        ("pretrain: m\nrollout_batch_size: 128\n", "OpenRLHF"),
    ],
)
def test_a_file_of_another_method_or_library_is_none_of_grpo(text, library, tmp_path, capsys):
    code, out, left = run(tmp_path, text, capsys)
    assert (code, out) == (2, "")
    assert f"but of {library}" in left
    ours = tmp_path / "ours.yaml"
    ours.write_text(text)
    with pytest.raises(InputError) as error:
        config.parse(["--config", str(ours)])
    assert library in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "a: b: c", "something: 1"])
def test_another_file_is_refused(text, tmp_path, capsys):
    code, out, left = run(tmp_path, text, capsys)
    assert code == 2
    assert out == ""
    assert left.startswith("error: ")
