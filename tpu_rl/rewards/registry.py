"""Reward functions by the names of `--reward`, and Python functions that get such names."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpu_rl import user_code
from tpu_rl.errors import InputError, MachineError, did_you_mean
from tpu_rl.rewards import terms
from tpu_rl.rewards.scoring import DEFAULT_LIMITS, Reward
from tpu_rl.rewards.terms import RewardTerm
from tpu_rl.rewards.verifier import Verifier
from tpu_rl.rewards.worker_pool import IsolatedReward, RewardLimits
from tpu_rl.runtime import verl_rewards
from tpu_rl.runtime.worker_child import as_number, shorten
from tpu_rl.user_code import PYTHON, Passed
from tpu_rl.wings import VERIFIERS


def reward_functions(
    names: Sequence[str], limits: RewardLimits, allow_unsandboxed_code: bool = False
) -> dict[str, Reward]:
    """Return display name -> function, in the order of the names; see `resolve`."""
    return {display_name(name): resolve(name, limits, allow_unsandboxed_code) for name in names}


def displayed(total: Sequence[RewardTerm]) -> tuple[RewardTerm, ...]:
    """Return terms with display names, which are the names of `reward_functions`.

    Raises InputError if two rewards have the same display name.
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
    base, settings = settings_of(name)
    if settings:
        values = ", ".join(f"{key}={display_name(value)}" for key, value in settings.items())
        return f"{base}({values})"
    return Path(name.removeprefix(PYTHON)).name.replace(".py:", ".")


def files(names: Sequence[str]) -> list[str]:
    """Return FILE.py of each name FILE.py:function, also of those in settings."""
    parts = [part for name in names for part in parts_of(name)]
    return [part.rpartition(":")[0] for part in parts if ".py:" in part]


def settings_of(name: str) -> tuple[str, dict[str, str]]:
    """Return the name and the settings of `NAME(KEY=VALUE, ...)`; no settings for other names.

    Raises InputError if the settings of a built-in reward cannot be read.
    """
    base, has_settings, text = name.partition("(")
    if not has_settings or base not in VERIFIERS or not name.endswith(")"):
        return name, {}
    text = text[:-1]
    settings = {}
    # Commas inside of further parentheses belong to the settings of another reward.
    found = re.findall(r"(?:[^,()]|\([^()]*(?:\([^()]*\)[^()]*)*\))+", text)
    if ",".join(found) != text:
        raise _setting_error(name, "its parentheses or commas do not match")
    for setting in found:
        key, has_value, value = setting.partition("=")
        if not has_value or key.strip() in settings:
            raise _setting_error(name, f"{setting.strip()!r} is not one KEY=VALUE")
        settings[key.strip()] = value.strip()
    return base, settings


def parts_of(name: str) -> list[str]:
    """Return the names of the rewards that a name stands for: its own, and those in settings."""
    base, settings = settings_of(name)
    make = VERIFIERS[base].make if settings else None
    if make is None:
        return [name]
    defaults = {key: p.default for key, p in inspect.signature(make).parameters.items()}
    others = [value for key, value in settings.items() if callable(defaults.get(key))]
    return [base, *(part for other in others for part in parts_of(other))]


def _made(name: str, row: Verifier, settings: Mapping[str, str], *how: Any) -> Reward:
    """Return the reward of a row with settings; `how` is what `resolve` takes besides a name."""
    if row.make is None:
        raise _setting_error(name, "it has no settings")
    known = inspect.signature(row.make).parameters
    if missing := [key for key in row.required if not settings.get(key)]:
        raise _setting_error(name, f"it needs {missing[0]}=")
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in known:
            raise _setting_error(name, f"{key!r} is none of {', '.join(known)}")
        default = known[key].default
        if callable(default) and not text:
            raise _setting_error(name, f"{key}= names no reward")
        if callable(default):
            values[key] = resolve(text, *how)
            continue
        try:
            values[key] = _BOOLS[text] if isinstance(default, bool) else type(default)(text)
        except (KeyError, ValueError):
            kind = type(default).__name__
            raise _setting_error(name, f"{key}={text} is no {kind}, as in {default}") from None
        if isinstance(values[key], float) and not math.isfinite(values[key]):
            raise _setting_error(name, f"{key}={text} is not finite")
    return row.make(**values)


_BOOLS = {"true": True, "True": True, "false": False, "False": False}


def _setting_error(name: str, why: str) -> InputError:
    return InputError(
        "not the settings of a reward",
        where=f"--reward {name!r}",
        why=why,
        fix="write NAME(KEY=VALUE, ...), as in repetition(size=4); docs/reference/rewards.md",
    )


def resolve(
    name: str, limits: RewardLimits = DEFAULT_LIMITS, allow_unsandboxed_code: bool = False
) -> Reward:
    """Return a reward function.

    Args:
        name: a built-in reward, also with settings, FILE.py:function, python:NAME of a registered
            function, or the directory or run folder of a trained reward model.
        limits: of functions from files, which run in processes of their own.
        allow_unsandboxed_code: run model-written programs unconfined where the kernel cannot
            confine them.

    Raises:
        InputError: if there is no such reward, or if programs cannot be confined.
    """
    base, settings = settings_of(name)
    if settings or (name in VERIFIERS and VERIFIERS[name].required):
        return _made(name, VERIFIERS[base], settings, limits, allow_unsandboxed_code)
    if name in VERIFIERS:
        return _built_in(VERIFIERS[name], allow_unsandboxed_code)
    if name.startswith(PYTHON):
        return registered(name)
    if Path(name).expanduser().is_dir():
        # Reward workers import this file, and must not load JAX.
        from tpu_rl.rewards import reward_model

        return reward_model.load(name)
    return from_path(name, limits)


def _built_in(row: Verifier, allow_unsandboxed_code: bool) -> Reward:
    """Return the function of a row that this machine can run; see `resolve`."""
    try:
        if row.require_sandbox is not None:
            row.require_sandbox()
    except MachineError:
        if not allow_unsandboxed_code:
            raise
        return functools.partial(row.score, confine=False)
    return row.score


def from_path(path: str, limits: RewardLimits = DEFAULT_LIMITS) -> Reward:
    """Return the function that "file.py:function" names.

    It runs in a process of its own unless `limits.isolate` is False. Raises InputError if there is
    no such function, or its file does not load.
    """
    file_name, _, name = path.rpartition(":")
    file = Path(file_name).expanduser().absolute()
    if not file_name or not name.isidentifier():
        raise InputError(
            f"{path!r} does not name a reward function",
            fix=did_you_mean(path, list(VERIFIERS))
            or f"write FILE.py:function, a directory, or one of {', '.join(VERIFIERS)}",
        )
    user_code.require_file(file, "reward", file_name)
    if limits.isolate:
        return IsolatedReward(path, limits)
    return verl_rewards.adapt(user_code.load_function(path, "reward"))


# --- functions of this process ---

REGISTERED = Passed("reward", "tpu_rl.rewards.register(NAME, function), or name FILE.py:function")
registered = REGISTERED.find


def register(name: str, function: Callable[..., Any]) -> str:
    """Make a Python function a reward of this process, and return the name that it has there.

    The name, "python:NAME", goes wherever `--reward` names a reward. The function is called in this
    process, without limits on time and memory. If it raises, or returns what is not a number, its
    rows have no reward. A later call with the same name replaces the function.

    Args:
        name: an identifier, such as the function's own name.
        function: a function by the convention of `tpu_rl.rewards.scoring`; it may be async.

    Raises:
        InputError: if the name is no identifier, or there is nothing to call.
    """
    if not name.isidentifier() or not callable(function) or inspect.isclass(function):
        raise InputError(
            "not the name of a reward, and a function",
            where=f"register({name!r}, {shorten(function)})",
            why="names have letters, digits and underscores, and begin with no digit",
            fix="as in register('score', score), with score(prompts, completions, **columns)",
        )
    REGISTERED.by_name[name] = verl_rewards.adapt(function)
    return f"{PYTHON}{name}"


@contextmanager
def registered_for_run(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Register functions, name -> function, in this context only."""
    with REGISTERED.for_run({}):
        for name, function in functions.items():
            register(name, function)
        yield


def at_step(terms: Sequence[RewardTerm], step: int) -> tuple[RewardTerm, ...]:
    """Return the terms with the weights that their schedules give them at a step, from 1.

    Raises InputError if a schedule is not registered, fails, or returns no finite number.
    """
    return tuple(
        dataclasses.replace(term, weight=_scheduled_weight(term, step)) if term.schedule else term
        for term in terms
    )


def _scheduled_weight(term: RewardTerm, step: int) -> float:
    try:
        schedule = term.schedule or ""
        weight = (terms.schedule_of(schedule) or registered(schedule))(step)
        number = as_number(weight)
    except InputError:
        raise
    # The user's function may raise anything.
    except Exception as error:
        number = f"{type(error).__name__}: {error}"
    if isinstance(number, str):
        raise InputError(
            f"the schedule of the reward {term.name} gives no weight",
            where=f"step {step}",
            why=number,
            fix="return a finite number for every step from 1 to --steps",
        )
    return number
