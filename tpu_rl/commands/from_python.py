"""Runs that a Python program starts: `tpu_rl.train`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tpu_rl import rewards as reward_registry
from tpu_rl import user_code
from tpu_rl.commands import config as configuration
from tpu_rl.commands import run
from tpu_rl.commands.flags import flag_names, yaml_flags
from tpu_rl.data import files, python_rows
from tpu_rl.diagnosis.secret_settings import refuse_secrets
from tpu_rl.environments import named
from tpu_rl.errors import InputError
from tpu_rl.runtime.host import explain_full_disk
from tpu_rl.runtime.preemption import INTERRUPTED, Preempted

DEFAULTS = {"watchdog.minutes": 0}
"""Overrides that differ from the command line's defaults: a library does not end its program."""


def train(
    preset: str,
    overrides: Mapping[str, Any],
    rows: Any,
    rewards: Sequence[Any] | Callable[..., Any] | None,
    evaluation_rows: Any,
    environment: Any = None,
) -> str:
    """Run `tpu_rl.train` and return the address of the run folder."""
    arguments = {"rows": rows, "evaluation_rows": evaluation_rows}
    sets: list[str] = []
    if isinstance(evaluation_rows, Mapping):
        # As TRL's dict of datasets: name of a set -> rows.
        del arguments["evaluation_rows"]
        for name, rows_of_set in evaluation_rows.items():
            arguments[f"evaluation_rows.{name}"] = rows_of_set
            sets.append(f"{name}={user_code.PYTHON}evaluation_rows.{name}")
    given_rows = {name: given for name, given in arguments.items() if given is not None}
    if isinstance(rewards, str) or callable(rewards):
        rewards = [rewards]  # As TRL takes it.
    terms, functions = reward_terms(rewards or ())
    with ExitStack() as stack:
        stack.enter_context(python_rows.registered_for_run(given_rows))
        stack.callback(files.close_all)
        stack.enter_context(reward_registry.registered_for_run(functions))
        stack.enter_context(explain_full_disk())
        passed: dict[str, Any] = {}
        if isinstance(environment, str):
            passed["environment"] = environment
        elif environment is not None:
            name = user_code.name_of(environment)
            stack.enter_context(named.PASSED.for_run({name: environment}))
            passed["environment"] = f"{user_code.PYTHON}{name}"
        if rows is not None:
            passed["data.path"] = f"{user_code.PYTHON}rows"
        if sets:
            passed["evaluation.sets"] = sets
        elif evaluation_rows is not None:
            passed["data.evaluation-path"] = f"{user_code.PYTHON}evaluation_rows"
        if rewards is not None:
            passed["reward"] = terms
        argv = [preset, *flags(overrides, passed)]
        refuse_secrets(argv)
        config = configuration.parse(argv)
        try:
            run.start(config, "the same call of tpu_rl.train")
        except Preempted as stop:
            print(stop, file=sys.stderr)
            if stop.code == INTERRUPTED:
                raise KeyboardInterrupt(str(stop)) from None
            raise
    return config.run_dir


def flags(overrides: Mapping[str, Any], passed: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags of overrides and of what other arguments say.

    Raises InputError if an override is also given as another argument.
    """
    given: dict[str, Any] = dict(DEFAULTS)
    for name, value in yaml_flags.flat(overrides, "overrides=").items():
        flag = yaml_flags.flag_name(name)
        if flag in passed:
            raise InputError(
                f"{flag} is given twice",
                where=f"the override {name!r}",
                why="another argument of tpu_rl.train says it, too",
                fix="leave out one of them",
            )
        given[flag] = value
    return [
        text
        for flag, value in (given | dict(passed)).items()
        for text in flag_names.arguments(flag, value)
    ]


def reward_terms(rewards: Iterable[Any]) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """Return (terms as `--reward` takes them, the functions that they name, by name).

    Raises InputError if something is no reward, or two functions have the same name.
    """
    functions: dict[str, Callable[..., Any]] = {}

    def registered(name: str, function: Callable[..., Any]) -> str:
        if functions.setdefault(name, function) is not function:
            raise InputError(
                f"two reward functions are called {name}",
                where="rewards=",
                why="metrics and samples could not tell them apart",
                fix="rename one",
            )
        return f"{user_code.PYTHON}{name}"

    terms = []
    for number, given in enumerate(rewards, start=1):
        has_weight = isinstance(given, tuple) and len(given) == 2
        weight, reward = given if has_weight else (None, given)
        if not (isinstance(reward, str) or callable(reward)):
            raise InputError(
                f"reward {number} is neither a function nor a text",
                where="rewards=",
                why=f"it is {reward!r}"[:120],
                fix="as in rewards=[score, (0.2, short), 'gsm8k']",
            )
        text = reward
        if not isinstance(reward, str):
            name = user_code.name_of(reward)
            text = registered(name if name.isidentifier() else f"reward_{number}", reward)
        if callable(weight):
            body = text.partition("?")[0].rpartition(":")[2]
            schedule = f"weight_of_{body}" if body.isidentifier() else f"weight_{number}"
            weight = registered(schedule, weight)
        terms.append(text if weight is None else f"{weight}*{text}")
    return terms, functions
