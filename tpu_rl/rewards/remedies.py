"""Remedies for reward functions that want what nothing passes. Only their errors load this file."""

from __future__ import annotations

from collections.abc import Sequence

from tpu_rl.errors import InputError, did_you_mean

FOREIGN = {
    "queries": "OpenRLHF's form is not called: write "
    "score(prompts, completions, labels, **columns), which returns one number for each completion",
    "solution_strs": "of verl's forms only that of one completion is called: "
    "compute_score(data_source, solution_str, ground_truth, extra_info)",
    "solution_str": "verl's form is compute_score(data_source, solution_str, ground_truth, "
    "extra_info): name `ground_truth`, too",
    "trainer_state": "there is no trainer: name `step`, the step of the run for each completion",
    "log_extra": "write `if log_extra:` before its use, and the default None: samples.jsonl has "
    "what each reward gave",
    "log_metric": "write `if log_metric:` before its use, and the default None: a reward of weight "
    "0 is measured and not added",
    **dict.fromkeys(
        ("completion", "response", "prompt", "reward_inputs", "sample", "state", "parser")
        + ("message_log_batch",),
        "the form of another library is not called (verifiers, EasyR1, NeMo RL): write "
        "score(prompts, completions, answer, **columns), which returns one number for each",
    ),
}
"""Parameters of other libraries' functions -> how to write these here."""

GOLD_COLUMNS = ("answer", "ground_truth", "final_answer", "expected_answer", "correct_answer")
GOLD_COLUMNS += ("answerKey", "target", "gold", "reference_answer", "solution")
"""Columns in which published rows have what rewards here call `answer`."""

OF_RUNS = {
    **dict.fromkeys(("environments", "environment_rewards"), "name an environment: --environment"),
    "tests": "name them by --data.columns tests=COLUMN; rows of HumanEval and MBPP are read by the "
    "preset code_grpo",
}
"""Parameter of a reward function of another library -> the way to have its value in a run."""


def of_absent(parameters: Sequence[str]) -> str:
    """Name the parameters that other libraries pass, with a remedy for each; "" for others."""
    foreign = [name for name in parameters if name in FOREIGN]
    return "; ".join(f"`{name}` is not passed here: {FOREIGN[name]}" for name in foreign)


def error_of(
    function: str, parameters: Sequence[str], absent: str | None, columns: Sequence[str]
) -> InputError:
    """Return the error of a function that lacks a column, or reads no completions.

    Args:
        function: its name.
        parameters: the names of its parameters.
        absent: the column that it needs and the data lack; None if it lacks none.
        columns: those of the data.
    """
    if absent is None and "completion" in parameters:
        return InputError(
            f"the reward function {function} gets no completions",
            where=function,
            why="the parameter `completion` would be a column of the data, the right answer",
            fix=FOREIGN["completion"],
        )
    if absent is None:
        return InputError(
            f"the reward function {function} reads nothing: neither completions nor a column",
            where=function,
            fix="name `completions`; of a function that makes one, name what it returned",
        )
    # verl's rows have the answer in an object.
    held = [column for column in GOLD_COLUMNS if column in columns]
    column = "reward_model.ground_truth" if "reward_model" in columns else [*held, "COLUMN"][0]
    return InputError(
        f"the reward function {function} needs a column {absent!r} that the data lack",
        where=f"columns present: {', '.join(columns) or 'none'}",
        fix=next((FOREIGN[name] for name in parameters if name in FOREIGN), None)
        or OF_RUNS.get(absent)
        or did_you_mean(absent, list(columns))
        or f"name the column that holds it: --data.columns {absent}={column}",
    )
