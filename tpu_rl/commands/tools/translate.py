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
from tpu_rl.commands.flags.flag_names import OTHER_FILES, TRANSLATED, library_of
from tpu_rl.errors import InputError, reported, typed_command

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
    of_verl = any(name.startswith("actor_rollout_ref.") for name in theirs)
    table = TRANSLATED["verl" if of_verl else "trl"]
    if not of_verl and not {*OF_GRPO} & theirs.keys():
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
        if isinstance(entry, str):
            ours[entry] = value
            continue
        [(setting, convert)] = entry.items()
        if isinstance(value, list) or value not in convert:
            left[name] = value
        else:
            ours[setting] = convert[value]
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
