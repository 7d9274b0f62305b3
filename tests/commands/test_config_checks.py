"""Settings that do not go together are refused before anything is loaded."""

import dataclasses
import re
from dataclasses import replace

import pytest
import yaml

from tpu_rl.algos import GrpoConfig
from tpu_rl.commands import config
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.config import Phase
from tpu_rl.commands.flags import flag_names
from tpu_rl.errors import InputError
from tpu_rl.plain_values import to_dict
from tpu_rl.runtime import processes

MISFITS = {
    "negative": (["arithmetic_sft", "--sampling.temperature", "-1"], "--sampling.temperature"),
    "no step": (["arithmetic_grpo", "--samples.interval", "0"], "--samples.interval"),
    "fewer than none": (
        ["arithmetic_grpo", "--samples.max-per-step", "-1"],
        "--samples.max-per-step",
    ),
    "no k of tokens": (["arithmetic_grpo", "--sampling.top-k", "-1"], "--sampling.top-k"),
    "more than certain": (["arithmetic_grpo", "--sampling.top-p", "2"], "--sampling.top-p"),
    "beyond the likeliest": (["arithmetic_grpo", "--sampling.min-p", "1.5"], "--sampling.min-p"),
    "an infinite penalty": (
        ["arithmetic_grpo", "--sampling.repetition-penalty", "0"],
        "--sampling.repetition-penalty",
    ),
    "a moment that forgets nothing": (
        ["arithmetic_grpo", "--optimizer.beta2", "1"],
        "--optimizer.beta2",
    ),
    "a buffer before the first token": (
        ["arithmetic_grpo", "--algorithm.overlong-buffer", "1000"],
        "--algorithm.overlong-buffer, --sampling.max-new-tokens",
    ),
    "two lists": (["arithmetic_grpo", "--reward", "gsm8k", "--reward=choice"], "--reward"),
    "two spellings": (
        ["grpo", "--sampling.stop-strings", "a", "--sampling.stop_strings", "b"],
        "--sampling.stop-strings",
    ),
    "groups are equal": (
        ["arithmetic_grpo", "--sampling.temperature", "0"],
        "--sampling.temperature",
    ),
    "no log-probs": (["arithmetic_ppo", "--sampling.temperature", "0"], "--sampling.temperature"),
    "no log-probs, REINFORCE": (
        ["arithmetic_reinforce", "--sampling.temperature", "0"],
        "--sampling.temperature",
    ),
    "a group of one": (["arithmetic_grpo", "--batch.group-size", "1"], "--batch.group-size"),
    "staleness below none": (
        ["arithmetic_grpo", "--batch.staleness", "-1"],
        "--batch.staleness",
    ),
    "a sampler that waits for updates": (
        ["arithmetic_grpo", "--sampling.devices", "1"],
        "--sampling.devices, --batch.staleness",
    ),
    "exact, and older": (
        ["arithmetic_grpo", "--batch.staleness", "1", "--sampling.devices", "1"]
        + ["--model.exact-sampling"],
        "--model.exact-sampling, --sampling.devices",
    ),
    "a sampler on the training mesh": (
        ["arithmetic_grpo", "--batch.staleness", "1", "--sampling.devices", "1"]
        + ["--sampling.tensor-parallel", "train-mesh"],
        "--sampling.devices, --sampling.tensor-parallel",
    ),
    "a mask that moves in a batch": (
        ["arithmetic_nlpo", "--batch.num-minibatches", "8"],
        "--algorithm.mask-every",
    ),
    "a mask of an older policy yet": (
        ["arithmetic_nlpo", "--batch.staleness", "1"],
        "--algorithm.mask-top-p, --batch.staleness",
    ),
    "no mask": (["arithmetic_ppo", "--algorithm.mask-every", "4"], "--algorithm.mask-every"),
    "a mask of the head alone": (
        ["arithmetic_nlpo", "--algorithm.critic.trunk", "shared"],
        "--algorithm.mask-top-p, --algorithm.critic.trunk",
    ),
    "a temperature that moved": (
        ["arithmetic_grpo", "--algorithm.sampled-entropy", "0.3", "--rollout.partial", "2"],
        "--algorithm.sampled-entropy, --rollout.partial",
    ),
    "an odd opponent": (["arithmetic_xpo", "--batch.group-size", "5"], "--batch.group-size"),
    "groups of two models": (
        ["arithmetic_xpo", "--rollout.dynamic-sampling-rounds", "2"],
        "--algorithm.pairs, --rollout.dynamic-sampling-rounds",
    ),
    "optimism about no one": (
        ["arithmetic_dpo", "--algorithm.optimism-coef", "0.1"],
        "--algorithm.optimism-coef, --algorithm.pairs",
    ),
    "half a pair": (["arithmetic_dpo", "--batch.row-length", "128"], "--batch.row-length"),
    "groups of one never differ": (
        ["arithmetic_ppo", "--batch.group-size", "1", "--rollout.dynamic-sampling-rounds", "3"],
        "--rollout.dynamic-sampling-rounds, --batch.group-size",
    ),
    "one reward is not normalized": (
        ["arithmetic_grpo", "--rollout.normalize-rewards"],
        "--rollout.normalize-rewards, --reward",
    ),
    "a group of one reward is not normalized": (
        ["arithmetic_ppo", "--batch.group-size", "1", "--rollout.normalize-rewards"]
        + ["--reward", "arithmetic", "2*math"],
        "--rollout.normalize-rewards, --batch.group-size",
    ),
    "one reward has no variance": (
        ["arithmetic_ppo", "--batch.group-size", "1", "--rollout.keep-variance-share", "0.5"],
        "--rollout.keep-variance-share, --batch.group-size",
    ),
    "more than all": (
        ["arithmetic_grpo", "--rollout.keep-variance-share", "1.5"],
        "--rollout.keep-variance-share",
    ),
    "pairs are another choice": (
        ["arithmetic_dpo", "--rollout.keep-variance-share", "0.5"],
        "--rollout.keep-variance-share, --algorithm",
    ),
    "three kept, two minibatches": (
        ["arithmetic_grpo", "--batch.prompts", "12", "--batch.num-minibatches", "2"]
        + ["--rollout.keep-variance-share", "0.25"],
        "--rollout.keep-variance-share, --batch.num-minibatches",
    ),
    "routing of given completions": (
        ["arithmetic_dpo", "--rollout.replay-routing"],
        "--rollout.replay-routing, --algorithm",
    ),
    "routing of a policy that does not learn": (
        ["arithmetic_grpo", "--algorithm", "value_pretraining", "--rollout.replay-routing"],
        "--rollout.replay-routing, --algorithm",
    ),
    "routing of what is read anew": (
        ["arithmetic_grpo", "--rollout.replay-routing", "--rollout.partial", "2"],
        "--rollout.replay-routing, --rollout.partial",
    ),
    "routing of drafts": (
        ["arithmetic_grpo", "--rollout.replay-routing", "--sampling.speculation.tokens", "2"],
        "--rollout.replay-routing, --sampling.speculation.tokens",
    ),
    "routing of conversations": (
        ["arithmetic_multi_attempt", "--rollout.replay-routing"],
        "--rollout.replay-routing, --environment",
    ),
    "routing of agents": (
        ["arithmetic_grpo", "--rollout.replay-routing", "--agent", "my_agent.py:run"],
        "--rollout.replay-routing, --agent",
    ),
    "an agent's length": (
        ["arithmetic_grpo", "--algorithm.overlong-buffer", "8", "--agent", "my_agent.py:run"],
        "--algorithm.overlong-buffer, --agent",
    ),
    "pairs that nothing tells apart": (
        ["arithmetic_dpo", "--reward"],
        "--algorithm, --reward",
    ),
    "a rounded reference": (
        ["arithmetic_dpo", "--sampling.kv-cache-dtype", "int8"],
        "--sampling.kv-cache-dtype",
    ),
    "a quantized reference": (
        ["arithmetic_dpo", "--sampling.weight-dtype", "int8"],
        "--sampling.weight-dtype",
    ),
    "a rounded reference, judged": (
        ["arithmetic_bco", "--sampling.kv-cache-dtype", "int8"],
        "--sampling.kv-cache-dtype",
    ),
    "a sampler compared with itself": (
        ["arithmetic_grpo", "--algorithm.importance-sampling-cap", "2"]
        + ["--algorithm.old-log-probs", "sampler"],
        "--algorithm.old-log-probs",
    ),
    "a mode of no weights": (
        ["arithmetic_ppo", "--algorithm.importance-sampling-mode", "sequence_mask"],
        "--algorithm.importance-sampling-mode",
    ),
    "a reference elsewhere": (
        ["arithmetic_dpo", "--sampling.temperature", "0.7"],
        "--sampling.temperature",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_refused(name):
    flags, where = MISFITS[name]
    with pytest.raises(InputError) as error:
        config.parse(flags)
    assert error.value.where == where
    assert error.value.fix


@pytest.mark.parametrize("words", [["--batch.share-prefixes", "true"], ["--wandb=False"]])
def test_a_switch_with_a_value_is_explained(words):
    with pytest.raises(InputError) as error:
        config.parse(["arithmetic_grpo", *words])
    assert "a switch has no value" in error.value.fix


def test_every_phase_is_looked_at():
    one = config.parse(["arithmetic_ppo", "--batch.group-size", "1"])
    with pytest.raises(InputError, match="teaches nothing"):
        replace(one, phases=(Phase(GrpoConfig(), until=5),))


def test_a_frozen_policy_may_answer_greedily():
    """Only what learns from log-probs needs them; a reward model does not care how its pairs were
    drawn."""
    assert config.parse(["arithmetic_sft", "--sampling.temperature", "0"]).sampling.temperature == 0
    assert (
        config.parse(
            ["arithmetic_reward_model", "--sampling.kv-cache-dtype", "int8"]
        ).sampling.kv_cache_dtype
        == "int8"
    )


def test_a_sampler_with_devices_of_its_own_needs_a_single_process(monkeypatch):
    flags = ["arithmetic_grpo", "--batch.staleness", "1", "--sampling.devices", "1"]
    run_config = config.parse(flags)
    preflight.check_processes(run_config)
    monkeypatch.setattr(processes, "count", lambda: 2)
    with pytest.raises(InputError, match="several processes"):
        preflight.check_processes(run_config)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--batch.no-share-prefix", "--batch.no-share-prefixes"),
        ("--batch.share-prefix", "--batch.share-prefixes"),
        ("--batch.prompt=3", "--batch.prompts"),
    ],
)
def test_a_mistyped_flag_names_the_nearest_one(flag, meant):
    """A switch has two names, of which the nearer one is meant."""
    with pytest.raises(InputError, match="Unrecognized") as error:
        config.parse(["arithmetic_grpo", flag])
    assert error.value.fix == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--checkpoint-every=5", "--checkpoint.interval"),
        ("--samples.every=2", "--samples.interval"),
        ("--samples.most=2", "--samples.max-per-step"),
        ("--phases.0.forget=q", "--phases.0.reset-roles"),
    ],
)
def test_a_flag_of_an_earlier_version_names_the_new_one(old, new):
    with pytest.raises(InputError) as error:
        config.parse(["arithmetic_q_sharp", old])
    assert error.value.fix == f"did you mean {new}?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning_rate=1e-5", "--optimizer.learning-rate"),
        ("--num_generations", "--batch.group-size"),
        ("--per-device-train-batch-size", "--batch.prompts"),
        ("--num_train_epochs", "--epochs"),
    ],
)
def test_words_of_trl_are_understood(typed, meant):
    with pytest.raises(InputError) as error:
        config.parse(["arithmetic_grpo", typed, "3"])
    assert error.value.fix.startswith("TRL's ")
    assert f" is {meant}" in error.value.fix


def test_words_of_trl_name_flags_that_exist_and_hide_none():
    named = set(re.findall(r"--([a-z][\w.-]*)", " ".join(flag_names.TRL.values())))
    presets = [config.preset(name) for name in ("grpo", "dpo", "kto")]
    flags = {name.replace("_", "-") for preset in presets for name in flattened(preset)}
    switches = {"wandb", "trackio", config.EPOCHS_FLAG.removeprefix("--")}
    assert named <= flags | switches | {"reward"}
    assert not flags & flag_names.TRL.keys()


def flattened(value, prefix=""):
    """Yield the names of all settings below a configuration."""
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(part):
            yield from flattened(part, f"{prefix}{field.name}.")


def test_a_configuration_of_an_earlier_version_is_read(tmp_path):
    preset = replace(
        config.preset("arithmetic_q_sharp"), samples=config.SamplesConfig(7, max_per_step=9)
    )
    values = to_dict(preset)
    values["checkpoint_every"] = values.pop("checkpoint")["interval"]
    values["samples"] = {"kind": "SamplesConfig", "every": 7, "most": 9}
    for phase in values["phases"]:
        phase["forget"] = phase.pop("reset_roles")
    old = tmp_path / "config.yaml"
    old.write_text(yaml.safe_dump(values))
    assert config.load(old) == config.load_file(old) == preset


def test_a_run_of_maxrl_reads_its_own_configuration(tmp_path):
    run = config.parse(["arithmetic_grpo", "--algorithm.advantages", "max_rl"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(to_dict(run)))
    assert config.load(path) == run


def test_settings_that_left_are_read_at_their_defaults_alone(tmp_path):
    """A run of before that set none goes on with its identity; one that set some is refused."""
    run = config.preset("arithmetic_ppo")
    values = config.with_removed(run, to_dict(run))
    assert values["algorithm"]["kl_reward_estimator"] == "k1"
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    assert config.load_file(path) == run
    for name, value in (("kl_reward_estimator", "k3"), ("kl_estimator", "k3+")):
        path.write_text(yaml.safe_dump(values | {"algorithm": values["algorithm"] | {name: value}}))
        with pytest.raises(InputError, match=f"{name} .* is no longer a setting of PpoConfig"):
            config.load_file(path)
    with pytest.raises(InputError) as error:
        config.parse(["arithmetic_ppo", "--algorithm.kl-reward-estimator", "k3"])
    assert error.value.fix == "leave it out: it is no longer a setting, and always k1"
