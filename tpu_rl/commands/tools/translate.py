"""Translate a YAML file of TRL or verl into one of ours.

    python launch/translate.py FILE > config.yaml
    python launch/run.py --config config.yaml --reward my_reward.py:score

FILE is a configuration of `trl grpo` (GRPOConfig, its model and its dataset) or of verl. The result
is printed; what it does not carry over is listed on the standard error, a line each. Settings that
FILE leaves out have our defaults, not TRL's or verl's: docs/reference/conventions.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml

from tpu_rl.commands.flags import yaml_flags
from tpu_rl.commands.flags.flag_names import OTHER_FILES, library_of
from tpu_rl.errors import InputError, reported, typed_command

OPTIMIZER = "optimizer.learning-rate"
ADVANTAGES = "algorithm.advantages"
TRL: dict[str, str | tuple[str, Mapping[Any, Any]]] = {
    "model_name_or_path": "model.path",
    "dataset_name": "data.path",
    "dataset_config": "data.config",
    "dataset_train_split": "data.split",
    "output_dir": "run-dir",
    "seed": "seed",
    "learning_rate": OPTIMIZER,
    "warmup_steps": "optimizer.warmup-steps",
    "weight_decay": "optimizer.weight-decay",
    "adam_beta2": "optimizer.beta2",
    "max_grad_norm": "optimizer.max-grad-norm",
    "lr_scheduler_type": (
        "optimizer.schedule",
        {"constant": "constant", "linear": "linear", "cosine": "cosine"},
    ),
    "num_generations": "batch.group-size",
    "num_iterations": "batch.ppo-epochs",
    "max_completion_length": "sampling.max-new-tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top-p",
    "top_k": "sampling.top-k",
    "min_p": "sampling.min-p",
    "repetition_penalty": "sampling.repetition-penalty",
    "epsilon": "algorithm.clip-low",
    "epsilon_high": "algorithm.clip-high",
    "delta": "algorithm.dual-clip",
    "beta": "algorithm.kl-loss-coef",
    "mask_truncated_completions": "algorithm.mask-truncated",
    "scale_rewards": (
        ADVANTAGES,
        {"group": "group", "batch": "batch", "none": "centered", True: "group", False: "centered"},
    ),
    "loss_type": (
        "algorithm.loss-aggregation",
        {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant_length"},
    ),
    "bf16": ("model.dtype", {True: "bfloat16"}),
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "eval_steps": "evaluation.interval",
    "save_steps": "checkpoint.interval",
}
"""TRL's name -> our setting, or our setting and the values that have a counterpart."""

VERL: dict[str, str | tuple[str, Mapping[Any, Any]]] = {
    "actor_rollout_ref.model.path": "model.path",
    "data.train_files": "data.path",
    "data.val_files": "data.evaluation-path",
    "data.train_batch_size": "batch.prompts",
    "data.max_prompt_length": "sampling.max-prompt-tokens",
    "data.max_response_length": "sampling.max-new-tokens",
    "actor_rollout_ref.actor.optim.lr": OPTIMIZER,
    "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight-decay",
    "actor_rollout_ref.actor.grad_clip": "optimizer.max-grad-norm",
    "actor_rollout_ref.actor.ppo_epochs": "batch.ppo-epochs",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip-low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip-high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.dual-clip",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy-coef",
    "actor_rollout_ref.actor.loss_agg_mode": (
        "algorithm.loss-aggregation",
        {
            "token-mean": "token_mean",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum-norm": "constant_length",
            "seq-mean-token-sum": "sequence_sum",
        },
    ),
    "actor_rollout_ref.rollout.n": "batch.group-size",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top-p",
    "algorithm.adv_estimator": (
        ADVANTAGES,
        {"grpo": "group", "rloo": "leave_one_out", "opo": "opo", "gpg": "gpg"},
    ),
    "trainer.total_training_steps": "steps",
    "trainer.default_local_dir": "run-dir",
}
"""As TRL, with dots."""


OF_GRPO = ("num_generations", "reward_funcs", "scale_rewards", "num_iterations", "epsilon")
OF_GRPO += ("generation_batch_size",)
"""Names of GRPOConfig of which its files have one, and those of DPO and SFT none."""


@dataclass(frozen=True)
class Flags:
    file: tyro.conf.Positional[Path]
    """A YAML file of TRL or verl."""


@reported
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    flags = tyro.cli(Flags, args=argv, prog=typed_command("translate"), description=__doc__)
    ours, left = translate(read(flags.file))
    print(yaml.safe_dump(ours, sort_keys=False), end="")
    for name, value in left.items():
        print(f"not carried over: {name}: {value!r}", file=sys.stderr)
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a file, nested names joined by dots.

    Raises:
        InputError: it is no YAML file with settings.
    """
    return dict(_flat(yaml_flags.read_mapping(path)))


def _flat(content: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for name, value in content.items():
        nested = isinstance(value, dict) and bool(value)
        pairs += _flat(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", value)]
    return pairs


def translate(theirs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our settings, and those that have none here.

    Raises:
        InputError: the file is of another library, or of another method of TRL.
    """
    table = VERL if any(name.startswith("actor_rollout_ref.") for name in theirs) else TRL
    if table is TRL and not {*OF_GRPO} & theirs.keys():
        library = library_of(*theirs) or "another library"
        raise InputError(
            f"the file is not one of `trl grpo` or of verl, but of {library}",
            why=f"it has none of {', '.join(OF_GRPO)}",
            fix=f"choose a preset, as sft or dpo, and {OTHER_FILES}",
        )
    ours: dict[str, Any] = {"preset": "grpo"}
    left = {}
    for name, value in theirs.items():
        entry = table.get(name)
        if entry is None or value is None:
            left |= {} if value is None else {name: value}
            continue
        setting, convert = (entry, None) if isinstance(entry, str) else entry
        if convert is not None and (isinstance(value, list) or value not in convert):
            left[name] = value
            continue
        ours[setting] = value if convert is None else convert[value]
    for name, (setting, compute) in COMPUTED.items():
        if name in left and (value := compute(theirs, left[name])) is not None:
            ours[setting] = value
            del left[name]
    if "algorithm.kl-loss-coef" in ours:
        left.pop("actor_rollout_ref.actor.use_kl_loss", None)
    if left.get("algorithm.adv_estimator") == "gae":
        ours["preset"] = "ppo"
        del left["algorithm.adv_estimator"]
    if "algorithm.clip-low" in ours:
        ours.setdefault("algorithm.clip-high", ours["algorithm.clip-low"])
    return ours, left


def _prompts(theirs: Mapping[str, Any], size: Any) -> int | None:
    return _quotient(size, theirs.get("num_generations", 8))


def _minibatches(theirs: Mapping[str, Any], size: Any) -> int | None:
    return _quotient(theirs.get("data.train_batch_size"), size)


def _kl(theirs: Mapping[str, Any], coefficient: Any) -> Any:
    """Return the coefficient, which verl only reads where its loss is on."""
    return coefficient if theirs.get("actor_rollout_ref.actor.use_kl_loss") is True else None


def _positive(theirs: Mapping[str, Any], value: Any) -> int | None:
    """Return a number of steps; -1 stands for none."""
    return value if isinstance(value, int) and value > 0 else None


def _quotient(dividend: Any, divisor: Any) -> int | None:
    """Return a whole quotient, None if there is none."""
    whole = all(isinstance(one, int) and one > 0 for one in (dividend, divisor))
    return dividend // divisor if whole and dividend % divisor == 0 else None


COMPUTED: dict[str, tuple[str, Callable[[Mapping[str, Any], Any], Any]]] = {
    "generation_batch_size": ("batch.prompts", _prompts),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("batch.num-minibatches", _minibatches),
    "actor_rollout_ref.actor.kl_loss_coef": ("algorithm.kl-loss-coef", _kl),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": ("optimizer.warmup-steps", _positive),
    "max_steps": ("steps", _positive),
    "trainer.test_freq": ("evaluation.interval", _positive),
    "trainer.save_freq": ("checkpoint.interval", _positive),
}
"""Their name -> our setting, and a function of their settings and the value."""
