"""Runs that end early by --stop, and whose model is that of their best evaluation."""

import json
import shutil

import pytest

from tests.fixtures.runs import TINY, digest, rows_of
from tpu_rl.commands import config, evaluators, run, stages
from tpu_rl.commands.config import StopConfig
from tpu_rl.commands.saved_run import load_run
from tpu_rl.commands.tools import verify
from tpu_rl.errors import InputError


def rows(metric: str, values: list[float | None]) -> list[dict]:
    return [
        {"step": step} | ({} if value is None else {metric: value})
        for step, value in enumerate(values, start=1)
    ]


def reasons(stop: StopConfig, given: list[dict]) -> tuple[list[bool], int]:
    """Return where a run would end, and the step of the best evaluation."""
    rules = stages.EndRules(stop)
    return [bool(rules.add(row)) for row in given], rules.best_step


def test_patience_counts_evaluations_without_a_better_value():
    given = rows("eval/accuracy", [0.2, None, 0.4, 0.3, None, 0.4, 0.5])
    stop = StopConfig("eval/accuracy", patience=2)
    assert reasons(stop, given) == ([False] * 5 + [True, False], 7)
    assert reasons(StopConfig("eval/accuracy", patience=3), given)[0] == [False] * 7
    lowest = StopConfig("eval/accuracy", "lowest", best=True)
    assert reasons(lowest, given) == ([False] * 7, 1)


def test_bounds_are_of_means_over_whole_windows():
    given = rows("reward/std", [0.0, 0.3, 0.1, None, 0.0, 0.2])
    # Means of the last two values: 0.15, 0.2, 0.05, 0.1.
    stop = StopConfig(when=("reward/std<0.1",), over=2)
    assert reasons(stop, given)[0] == [False, False, False, False, True, False]
    stop = StopConfig(when=("reward/std>0.18", "other<1"), over=2)
    assert reasons(stop, given)[0] == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--stop.when", "reward/std"], "is no bound of a metric"),
        (["--stop.when", "reward/std<x"], "is no bound of a metric"),
        (["--stop.patience", "2"], "patience does nothing without metric"),
        (["--stop.metric", "eval/accuracy"], "metric does nothing without patience or best"),
        (["--stop.over", "0"], "--stop.over"),
    ],
)
def test_wrong_rules_are_refused(flags, expected):
    with pytest.raises(InputError) as raised:
        config.parse([*TINY, *flags])
    assert expected in str(raised.value)


def test_metrics_that_a_run_lacks_are_refused():
    stop = StopConfig("eval/acuracy", best=True, when=("reward/sd<1",))
    with pytest.raises(InputError, match="eval/accuracy"):
        stages.require_metrics(stop, {"eval/accuracy": 1, "reward/std": 1}, "eval/")
    with pytest.raises(InputError, match="reward/std"):
        stages.require_metrics(stop, {"reward/std": 1}, "")
    # A run without evaluations looks, too, and would never stop.
    assert evaluators.Evaluations(evaluators._nothing, evaluators._nothing).measure_nothing
    with pytest.raises(InputError, match="evaluations do not measure it"):
        stages.require_metrics(stop, {}, "eval/")


def test_a_run_of_before_there_were_rules_has_the_same_identity():
    settings = config.fixed_settings(config.parse(TINY))
    assert not any(name.startswith("stop") for name in settings)
    flags = [*TINY, "--stop.metric", "eval/accuracy", "--stop.best"]
    one, other = config.parse(flags), config.parse([*flags, "--evaluation.interval", "1"])
    assert config.differences(one, other) == ["evaluation.interval: 2 -> 1"]


@pytest.mark.slow
def test_a_run_ends_early_with_its_best_model_and_resumes_exactly(tmp_path, capsys, monkeypatch):
    """The best evaluation is made to be that of step 2, and the run ends two evaluations later."""
    measured = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.5}
    evaluate = run.evaluate
    steps = iter(range(5))

    def planned(parts, state, in_full):
        state, row = evaluate(parts, state, in_full)
        step = next(steps)
        return state, row | {"eval/accuracy": measured.get(step, 0.0)}

    flags = [*TINY, "--steps", "9", "--evaluation.interval", "1", "--stop.metric", "eval/accuracy"]
    flags += ["--stop.patience", "2", "--stop.best"]
    # In full, an evaluation that ends the run is made again.
    numbers = [0, 1, 2, 3, 4, 4]
    steps = iter(numbers)
    monkeypatch.setattr(run, "evaluate", planned)
    whole = tmp_path / "whole"
    assert run.main([*flags, "--run-dir", str(whole)]) == 0
    assert "the run ends with step 4: eval/accuracy was best at step 2" in capsys.readouterr().out
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["steps"], summary["model_step"]) == (4, 2)
    assert "eval/greedy_accuracy" in rows_of(whole)[-1]
    assert load_run(str(whole))[2] == 2
    assert verify.main([str(whole)]) == 0
    assert run.main([*flags, "--run-dir", str(whole)]) == 0
    assert "this run is finished" in capsys.readouterr().out

    # The model is that of a run of two steps.
    steps = iter([0, 1, 2])
    two = tmp_path / "two"
    assert run.main([*flags[: flags.index("--steps")], "--steps", "2", "--run-dir", str(two)]) == 0
    assert digest(two) == digest(whole)

    # Killed after step 3: its checkpoint and what came later are gone.
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    for name in ("checkpoints/4", "summary.json", "report.html"):
        path = cut / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    steps = iter([4, 4])
    assert run.main([*flags, "--run-dir", str(cut)]) == 0
    assert "resumed at step 3" in capsys.readouterr().out
    assert digest(cut) == digest(whole)
    assert rows_of(cut) == rows_of(whole)
