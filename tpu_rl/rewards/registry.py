"""Reward functions by the names of `--reward`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpu_rl import rewards, sandbox
from tpu_rl.errors import InputError
from tpu_rl.rewards import RewardTerm, reward_model, terms


def reward_functions(
    names: Sequence[str], limits: rewards.RewardLimits, allow_unsandboxed_code: bool = False
) -> dict[str, rewards.Reward]:
    """Return display name -> function, in the order of the names; see `resolve`."""
    return {display_name(name): resolve(name, limits, allow_unsandboxed_code) for name in names}


def displayed(total: Sequence[RewardTerm]) -> tuple[RewardTerm, ...]:
    """Return terms with display names, which are the names of `reward_functions`.

    Raises:
        InputError: if two rewards have the same display name.
    """
    paths: dict[str, str] = {}
    for name in terms.names_of(total):
        path = paths.setdefault(display_name(name), name)
        if path != name:
            raise InputError(
                f"two rewards are called {display_name(name)}",
                where=f"--reward {path} {name}",
                why="metrics and samples could not tell them apart",
                fix="rename one; a reward model is also found by the name of its run folder",
            )
    return tuple(term.renamed(display_name) for term in total)


def display_name(name: str) -> str:
    """Return the name of a reward in metrics and messages: FILE.function for FILE.py:function."""
    return Path(name.removeprefix(rewards.PYTHON)).name.replace(".py:", ".")


def files(names: Sequence[str]) -> list[str]:
    """Return FILE.py of each name FILE.py:function."""
    return [name.rpartition(":")[0] for name in names if ".py:" in name]


def resolve(
    name: str,
    limits: rewards.RewardLimits = rewards.DEFAULT_LIMITS,
    allow_unsandboxed_code: bool = False,
) -> rewards.Reward:
    """Return a reward function.

    Args:
        name: a built-in reward, FILE.py:function, python:NAME of a registered function, or the
            directory or run folder of a trained reward model.
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
    if name.startswith(rewards.PYTHON):
        return rewards.registered(name)
    if Path(name).expanduser().is_dir():
        return reward_model.load(name)
    return rewards.from_path(name, limits)
