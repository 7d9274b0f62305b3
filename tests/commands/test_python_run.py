"""Training from Python: `tpu_rl.train` does what the command does, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import jax
import pytest

import tpu_rl
from tests.fixtures.runs import rows_of
from tpu_rl import metrics
from tpu_rl.commands import compose, config, from_python, run
from tpu_rl.data import python_rows
from tpu_rl.environments import named
from tpu_rl.errors import InputError
from tpu_rl.rewards import registry

ROWS = [{"prompt": f"Repeat: word {i}", "answer": f"word {i}"} for i in range(8)]
SMALL = {
    "steps": 2,
    "batch.prompts": 4,
    "batch.group_size": 2,
    "batch.row-length": 64,
    "sampling.max_prompt_tokens": 32,
    "sampling.max_new_tokens": 8,
    "evaluation.rows": 0,
}


def score(completions, answer, **columns):
    return [
        len(set(text) & set(truth)) / 10 + sum(map(ord, text)) % 7 / 100
        for text, truth in zip(completions, answer, strict=True)
    ]


def half(completions, **columns):
    return [0.5 for _ in completions]


def train(checkpoint, run_dir, overrides=(), rows=ROWS, given=(score,), **arguments):
    """Train with GRPO from Python on a tiny model."""
    settings = SMALL | {"model.path": checkpoint, "run_dir": run_dir} | dict(overrides)
    return tpu_rl.train("grpo", settings, rows=rows, rewards=given, **arguments)


@pytest.mark.slow
def test_it_does_what_the_command_does_and_returns_it(checkpoint, tmp_path, capsys):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    trained = train(checkpoint, tmp_path / "python")
    model, params, tokenizer = trained.load()
    assert [row["step"] for row in trained.metrics] == [0, 1, 2]
    assert trained.summary["steps"] == 2
    assert trained.model_dir == tmp_path / "python" / "model"
    assert model.config.vocab.size == params["embedding"].shape[0]
    assert tokenizer.decode(tokenizer.encode("word")) == "word"

    # The same by the command: rows of a file, and the function of a file.
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    flags = ["--model.path", str(checkpoint), "--run-dir", str(tmp_path / "shell")]
    flags += [text for name, value in SMALL.items() for text in (f"--{name}", str(value))]
    flags += ["--data.path", str(rows), "--reward", f"{__file__}:score"]
    assert run.main(["grpo", *flags]) == 0

    def renamed(row):
        return {key.replace("test_python_run.score", "score"): row[key] for key in row}

    assert rows_of(tmp_path / "python") == [renamed(row) for row in rows_of(tmp_path / "shell")]
    digests = [
        json.loads((tmp_path / name / "summary.json").read_text())["params_digest"]
        for name in ("python", "shell")
    ]
    assert len(set(digests)) == 1

    # Nothing stays: neither rewards nor rows, signal handlers, threads or a mesh.
    assert not registry.REGISTERED.by_name
    assert not python_rows.ROWS.by_name
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert not {"watchdog", "signals"} & {thread.name for thread in threading.enumerate()}
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.slow
def test_the_same_call_continues_and_a_finished_run_returns_at_once(checkpoint, tmp_path, capsys):
    train(checkpoint, tmp_path, {"steps": 1})
    longer = train(checkpoint, tmp_path)
    assert "resumed at step 1" in capsys.readouterr().out
    assert [row["step"] for row in longer.metrics] == [0, 1, 2]
    again = train(checkpoint, tmp_path)
    assert "this run is finished" in capsys.readouterr().out
    assert again == longer

    changed = [*ROWS[:2], ROWS[2] | {"answer": "another"}, *ROWS[3:]]
    with pytest.raises(InputError, match="training data changed") as error:
        train(checkpoint, tmp_path, {"steps": 3}, rows=changed)
    assert "python:rows, training row 3" in error.value.where
    with pytest.raises(InputError, match="another configuration"):
        train(checkpoint, tmp_path, given=[(0.5, score)])


@pytest.mark.nightly
def test_ctrl_c_saves_the_step_and_is_a_keyboard_interrupt(checkpoint, tmp_path, monkeypatch):
    write = metrics.Sink.write

    def write_then_interrupt(sink, step, *arguments):
        write(sink, step, *arguments)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Sink, "write", write_then_interrupt)
        with pytest.raises(KeyboardInterrupt, match="step 1 is saved"):
            train(checkpoint, tmp_path)
    assert [row["step"] for row in train(checkpoint, tmp_path).metrics] == [0, 1, 2]


@pytest.mark.nightly
def test_weights_may_follow_the_step(checkpoint, tmp_path):
    """One reward fades as another takes over; texts and functions stand side by side."""
    given = [(lambda step: 1 - step / 2, score), (lambda step: step, half), "0*gsm8k"]
    trained = train(checkpoint, tmp_path, given=given, evaluation_rows=ROWS[:2])
    for row in trained.metrics[1:]:
        expected = (1 - row["step"] / 2) * row["reward/score/mean"] + row["step"] * 0.5
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-6)
        assert "reward/gsm8k/mean" in row


@pytest.mark.slow
def test_evaluation_rows_by_name_are_sets(checkpoint, tmp_path):
    """The run's own rows stay the last ones; rows that are no list are refused by their name."""
    sets = {"few": ROWS[:2], "more": ROWS[:3]}
    settings = {"evaluation.rows": 4, "steps": 1}
    trained = train(checkpoint, tmp_path, settings, evaluation_rows=sets)
    assert [trained.metrics[0][f"eval/{name}/n"] for name in sets] == [2, 3]
    assert set(trained.summary["eval"]["after"]["sets"]) == set(sets)
    with pytest.raises(InputError, match=r"`evaluation_rows\.few` is not a list"):
        train(checkpoint, tmp_path, settings, evaluation_rows={"few": "rows.jsonl"})


def test_it_runs_in_another_thread_on_a_dataset(checkpoint, tmp_path):
    datasets = pytest.importorskip("datasets")
    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            train(checkpoint, tmp_path, rows=datasets.Dataset.from_list(ROWS))
        )
    )
    thread.start()
    thread.join()
    assert results[0].summary["steps"] == 2


@pytest.mark.parametrize(
    ("overrides", "given", "message", "where"),
    [
        ({"batch.promts": 3}, {}, "Unrecognized options: --batch.promts=3", "--batch.prompts"),
        ({"model.exactsampling": 1}, {}, "did you mean --model.exact-sampling?", ""),
        ({"steps": "many"}, {}, "Error parsing --steps", "--steps"),
        ({"algorithm.separators": "1,2"}, {}, "with spaces, not with commas", "separators"),
        ({"steps": True}, {}, "Missing value for argument '--steps'", ""),
        ({"data.path": "x"}, {}, "data.path is given twice", "data.path"),
        ({}, {"rows": [*ROWS[:2], "text"]}, "a dict: column -> value", "row 3 of rows"),
        ({}, {"rows": [*ROWS[:2], {"answer": "1"}]}, "lacks the column", "row 3 of rows"),
        ({}, {"rows": [*ROWS[:2], {"prompt": ""}]}, "`prompt` is empty", "row 3 of rows"),
        ({}, {"rows": [ROWS[0] | {"x": float("nan")}]}, "`x` is nan", "row 1 of rows"),
        ({}, {"rows": [{"prompt": "\ud800"}]}, "surrogate", "row 1 of rows"),
        ({}, {"rows": []}, "0 rows", "python:rows"),
        ({}, {"rows": iter(ROWS)}, "`rows` is not a list of rows", "rows="),
        ({}, {"rows": {"prompt": ["a"]}}, "`rows` is not a list of rows", "rows="),
        ({}, {"given": [3]}, "reward 1 is neither a function nor a text", "rewards="),
        ({}, {"given": ["0.5*gsm8"]}, "gsm8k", ""),
        ({}, {"given": [(lambda step: step / 0, score)]}, "gives no weight", "step 1"),
        ({}, {"given": [(lambda step: "x", score)]}, "gives no weight", "step 1"),
    ],
)
def test_bad_input_is_one_error(checkpoint, tmp_path, overrides, given, message, where):
    with pytest.raises(InputError) as error:
        train(checkpoint, tmp_path, overrides, **given)
    assert message in str(error.value)
    assert where in str(error.value)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_two_functions_of_one_name_are_refused(checkpoint, tmp_path):
    def other(completions, **columns):
        return [0.0 for _ in completions]

    other.__name__ = "score"
    with pytest.raises(InputError, match="two reward functions are called score"):
        train(checkpoint, tmp_path, given=[score, other])


def test_a_dry_run_prints_the_plan_and_trains_nothing(checkpoint, tmp_path, capsys):
    planned = train(checkpoint, tmp_path / "run", {"dry_run": True}, given=score)
    assert "one step of the run" in capsys.readouterr().out
    assert (planned.metrics, planned.summary) == ([], {})
    assert not planned.run_dir.exists()


def test_overrides_may_be_nested():
    given = from_python.flags({"batch": {"group_size": 4}, "steps": 2}, {})
    assert {"--batch.group-size=4", "--steps=2"} <= set(given)


def test_rows_for_a_preset_that_makes_its_own_are_refused():
    with pytest.raises(InputError, match="arithmetic_grpo makes its own problems"):
        tpu_rl.train("arithmetic_grpo", rows=ROWS)


def test_a_function_in_a_configuration_is_refused():
    functions: Any = (score,)
    with pytest.raises(InputError, match="a reward of a configuration is a text") as error:
        replace(config.preset("grpo"), reward=functions)
    assert "tpu_rl.train" in error.value.fix


@pytest.mark.slow
def test_another_process_is_told_that_rows_and_rewards_came_from_python(
    checkpoint, tmp_path, capsys
):
    train(checkpoint, tmp_path, {"steps": 1})
    saved = tmp_path / "config.yaml"
    assert run.main([str(saved), "--run-dir", str(tmp_path), "--steps", "2"]) == 2
    assert "the argument rows came from Python" in capsys.readouterr().err


def test_importing_the_package_loads_no_jax():
    program = "import sys, tpu_rl; print('jax' in sys.modules, callable(tpu_rl.train))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == ["False", "True"]


class Repeat:
    """An environment that asks again once."""

    def reset(self, answer, **row):
        self.answer = answer
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "Again: ", score([text], [self.answer])[0], self.turns == 2, {}


def test_a_dict_of_classes_is_the_environment():
    with named.PASSED.for_run({"dict": {"again": Repeat}}):
        settings = config.parse(["grpo", "--environment", "python:dict"])
        answering = compose.environment(settings)
    assert answering is not None
    assert list(answering.pool.descriptions) == ["again"]


@pytest.mark.nightly
def test_a_class_is_the_environment(checkpoint, tmp_path):
    settings = {"sampling.max_new_tokens": 24, "sampling.max-turns": 3}
    trained = train(checkpoint, tmp_path, settings, given=(), environment=Repeat)
    steps = [row for row in trained.metrics if "env/turns" in row]
    assert len(steps) == 2
    assert all(1 <= row["env/turns"] <= 2 for row in steps)
    assert all(row["reward/mean"] == row["reward/Repeat/mean"] for row in steps)
