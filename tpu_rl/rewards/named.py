"""Reward functions by the names of `--reward`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpu_rl import rewards, sandbox
from tpu_rl.rewards import reward_model


def reward_functions(
    names: Sequence[str], limits: rewards.RewardLimits, allow_unsandboxed_code: bool = False
) -> dict[str, rewards.Reward]:
    """Return display name -> function, in the order of the names; see `resolve`."""
    return {display_name(name): resolve(name, limits, allow_unsandboxed_code) for name in names}


def display_name(name: str) -> str:
    """Return the name of a reward in metrics and messages: FILE.function for FILE.py:function."""
    return Path(name).name.replace(".py:", ".")


def resolve(
    name: str,
    limits: rewards.RewardLimits = rewards.DEFAULT_LIMITS,
    allow_unsandboxed_code: bool = False,
) -> rewards.Reward:
    """Return a reward function.

    Args:
        name: a built-in reward, FILE.py:function, or the directory or run folder of a trained
            reward model.
        limits: of functions from files, which run in processes of their own.
        allow_unsandboxed_code: run model-written programs unconfined where the kernel cannot
            confine them.

    Raises:
        InputError: if there is no such reward, or if programs cannot be confined.
    """
    if name == "python_tests" and sandbox.refusal():
        if allow_unsandboxed_code:
            return rewards.python_tests_unsandboxed
        sandbox.require()
    if name in rewards.BUILTIN:
        return rewards.BUILTIN[name]
    if Path(name).expanduser().is_dir():
        return reward_model.load(name)
    return rewards.from_path(name, limits)
