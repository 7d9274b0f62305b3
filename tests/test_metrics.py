"""Every step stands in metrics.jsonl exactly once, whatever happened before; the console fits what
is measured."""

import io
import json
import math
import sys
import types
from dataclasses import replace

import jax.numpy as jnp
import pytest
import rich.console

from tpu_rl import metrics, run_files
from tpu_rl.commands import config
from tpu_rl.commands.checks import preflight
from tpu_rl.errors import DamagedDataError, InputError, MachineError


def open_quietly(run_dir, resume_step=-1, **settings):
    return metrics.open_metrics(run_dir, resume_step, 10, **{"tensorboard": False, **settings})


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path):
    return [row["step"] for row in rows(path)]


def test_half_a_surrogate_pair_becomes_an_escape(tmp_path):
    file = metrics.JsonLines(tmp_path / "samples.jsonl")
    file.append({"step": 1, "error": "half \ud800 of é"})
    file.close()
    assert rows(tmp_path / "samples.jsonl") == [{"step": 1, "error": "half \ud800 of é"}]


def test_a_file_that_is_removed_under_a_run_is_one_error(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open_quietly(tmp_path / "run") as sink:
            sink.write(1, {"reward/mean": 0.5}, [{"completion": "a"}])
            (tmp_path / "run" / name).unlink()
            with pytest.raises(DamagedDataError, match=name) as error:
                sink.write(2, {"reward/mean": 0.5}, [{"completion": "a"}])
        assert error.value.why == "it was removed while the run went on"
    with pytest.raises(DamagedDataError, match="checkpoints"):
        run_files.require_there(tmp_path / "checkpoints")


def test_a_row_is_step_time_and_json_safe_floats(tmp_path):
    with open_quietly(tmp_path / "new" / "run") as sink:
        sink.write(
            1, {"reward/mean": jnp.float32(0.1), "policy/entropy": math.nan, "rollout/tokens": 7}
        )
        row = rows(tmp_path / "new" / "run" / "metrics.jsonl")[
            0
        ]  # on the disk before the sink is closed
    assert list(row) == ["step", "time", "reward/mean", "policy/entropy", "rollout/tokens"]
    assert row["reward/mean"] == float(jnp.float32(0.1))
    assert row["policy/entropy"] is None
    assert abs(row["time"] - (tmp_path / "new" / "run" / "metrics.jsonl").stat().st_mtime) < 60


def test_no_step_twice(tmp_path):
    with open_quietly(tmp_path) as sink:
        sink.write(2, {})
        with pytest.raises(ValueError, match="step 2"):
            sink.write(2, {})


@pytest.mark.parametrize(
    ("resume_step", "kept"), [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3, 4])]
)
def test_resume_cuts_off_what_came_after_the_checkpoint(tmp_path, resume_step, kept):
    with open_quietly(tmp_path) as sink:
        for step in range(5):
            sink.write(
                step,
                {"x": step},
                [{"prompt": "é\n", "completion": "b", "reward": 1.0, "parts": {}}] * 2,
            )
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 1')  # torn by a crash
    open_quietly(tmp_path, resume_step).close()
    assert steps(tmp_path / "metrics.jsonl") == kept
    assert steps(tmp_path / "samples.jsonl") == sorted(kept * 2)
    with open_quietly(tmp_path, resume_step) as sink:
        sink.write(7, {})
    assert steps(tmp_path / "metrics.jsonl") == [*kept, 7]


def test_samples_are_kept_whole(tmp_path):
    sample = {
        "prompt": "1 + 1 =\n",
        "completion": "zwei\u2028 ✓",
        "reward": math.nan,
        "parts": {"correct": 1.0},
    }
    with open_quietly(tmp_path) as sink:
        sink.write(3, {}, [sample])
    assert rows_by_newline(tmp_path / "samples.jsonl") == [{"step": 3, **sample, "reward": None}]


def rows_by_newline(path):
    return [json.loads(line) for line in path.read_text().strip().split("\n")]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"x": 1}'])
def test_an_unreadable_row_is_never_cut_off_silently(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DamagedDataError, match=r"metrics.jsonl:2"):
        open_quietly(tmp_path, 3)


def test_rows_as_they_are_written_are_not_parsed_again(tmp_path, monkeypatch):
    """Other spellings of a row are, and a step that is no integer is found."""
    with open_quietly(tmp_path) as sink:
        for step in range(3):
            sink.write(step, {}, [{"prompt": '{"step": 9}', "completion": "", "reward": 0.0}])
    with monkeypatch.context() as patch:
        patch.setattr(run_files, "parse_row", None)
        open_quietly(tmp_path, 1).close()
    assert steps(tmp_path / "samples.jsonl") == [0, 1]
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"x": 0, "step": 2}\n{"step": 3, "x": 0}\n')
    run_files.truncate_after(path, 2)
    assert steps(path) == [1, 2]
    for step in ("1.0", "01", "true", "1 "):
        path.write_text(f'{{"step": {step}}}\n')
        if step == "1 ":
            run_files.truncate_after(path, 2)
            continue
        with pytest.raises(DamagedDataError, match="metrics.jsonl:1"):
            run_files.truncate_after(path, 2)


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with open_quietly(tmp_path / "run") as sink:
        sink.write(1, {"x": 1.0}, [{"prompt": ""}])
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_step_once(tmp_path):
    with open_quietly(tmp_path, tensorboard=True) as sink:
        for step in (1, 2, 3):
            sink.write(step, {"reward/mean": step / 2, "policy/entropy": math.nan})
    events = tensorboard_events(tmp_path)
    assert [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ] == [(step, name, step / 2) for step in (1, 2, 3) for name in ("reward/mean", "train/reward")]
    assert [event.step for event in events if event.HasField("session_log")] == [0]


def tensorboard_events(run_dir) -> list:
    """Return the events of a run's only TensorBoard file."""
    from tensorboardX import record_writer
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (run_dir / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:  # each record: length (8 bytes), checksum (4), event, checksum (4)
        length = int.from_bytes(data[:8], "little")
        assert data[8:12] == record_writer.masked_crc32c(data[:8]).to_bytes(4, "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


SETTINGS = {
    "kind": "ExperimentConfig",
    "steps": 10,
    "data": {"path": ["https://me:pa55word@host/rows.jsonl"], "limit": None},
    "reward": ("0.5*exact_match",),
}


def test_tensorboard_gets_the_configuration_without_secrets(tmp_path):
    open_quietly(tmp_path, tensorboard=True, config=SETTINGS).close()
    (text,) = [
        value.tensor.string_val[0].decode()
        for event in tensorboard_events(tmp_path)
        for value in event.summary.value
    ]
    assert "    steps: 10\n" in text
    assert "https://<secret>@host/rows.jsonl" in text
    assert "pa55word" not in text


class FakeWandb(types.ModuleType):
    """The part of wandb and of trackio that `metrics` uses."""

    class Table:
        def __init__(self, columns, data):
            self.columns = columns
            self.data = data

    def __init__(self):
        super().__init__("wandb")
        self.settings = []
        self.logged = []
        self.is_finished = False

    def init(self, **settings):
        self.settings.append(settings)
        self.name = settings["name"] + "-2" * (settings["resume"] == "never")
        return self

    def log(self, content, step):
        self.logged.append((step, content))

    def finish(self):
        self.is_finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_wandb_gets_scalars_and_the_configuration_without_secrets(tmp_path, fake_wandb):
    with open_quietly(tmp_path / "first", wandb=True, config=SETTINGS) as sink:
        sink.write(3, {"reward/mean": 0.5, "policy/entropy": math.nan})
    assert fake_wandb.logged == [(3, {"reward/mean": 0.5, "train/reward": 0.5})]
    assert fake_wandb.is_finished
    (settings,) = fake_wandb.settings
    assert settings["project"] == "tpu_rl"
    assert settings["name"] == "first"
    assert settings["config"] == {
        "kind": "ExperimentConfig",
        "steps": 10,
        "data": {"path": ["https://<secret>@host/rows.jsonl"], "limit": None},
        "reward": ["0.5*exact_match"],
    }


def test_the_environment_names_project_and_run_of_wandb(tmp_path, fake_wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setenv("WANDB_NAME", "seventh")
    open_quietly(tmp_path, wandb=True).close()
    assert fake_wandb.settings[0]["project"] == "ours"
    assert fake_wandb.settings[0]["name"] == "seventh"
    monkeypatch.setenv("WANDB_PROJECT", "")
    open_quietly(tmp_path, 0, wandb=True).close()
    assert fake_wandb.settings[1]["project"] == "tpu_rl"


def test_a_resumed_run_goes_on_in_wandb_with_other_settings(tmp_path, fake_wandb):
    open_quietly(tmp_path, wandb=True, config={"steps": 1}).close()
    open_quietly(tmp_path, 0, wandb=True, config={"steps": 2}).close()
    first, second = fake_wandb.settings
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert second["allow_val_change"] is True


def test_wandb_gets_tables_of_some_completions(tmp_path, fake_wandb, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "abcdefgh12345678")
    samples = [
        {
            "prompt": [{"role": "user", "content": f"{number}?"}] if number else "0?",
            "completion": "abcdefgh12345678 é",
            "reward": math.nan if number == 2 else number,
            "parts": {"format": 0.5} if number == 4 else {"correct": None},
        }
        for number in range(40)
    ]
    with open_quietly(tmp_path, wandb=True) as sink:
        for step in range(42):
            sink.write(step, {"x": 1.0}, samples if step else [])
    tables = {step: content["samples"] for step, content in fake_wandb.logged if len(content) > 1}
    assert list(tables) == [1, 20, 40]
    table = tables[20]
    columns = ["step", "prompt", "completion", "reward", "reward/correct"]
    assert table.columns == columns
    assert len(table.data) == metrics.TABLE_ROWS
    hidden = "<secret: SERVICE_TOKEN> é"
    assert table.data[:3] == [
        [20, "0?", hidden, 0.0, None],
        [20, '[{"role": "user", "content": "2?"}]', hidden, None, None],
        [20, '[{"role": "user", "content": "5?"}]', hidden, 5.0, None],
    ]
    assert metrics.sample_table(1, samples[3:5])[0] == [*columns, "reward/format"]


def test_wandb_that_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MachineError, match=r"pip install"):
        open_quietly(tmp_path, wandb=True)
    with pytest.raises(MachineError, match=r"pip install"):  # before a device is claimed
        preflight.check(replace(config.preset("arithmetic_grpo"), wandb=True))


@pytest.fixture
def fake_trackio(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for name in ("TRACKIO_PROJECT", "TRACKIO_NAME"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_trackio_gets_the_same_and_resumes_by_name(tmp_path, fake_trackio, monkeypatch):
    sample = {"prompt": "0?", "completion": "0", "reward": 1.0, "parts": {}}
    with open_quietly(tmp_path / "first", trackio=True, config=SETTINGS) as sink:
        sink.write(1, {"reward/mean": 0.5, "policy/entropy": math.nan}, [sample])
    assert fake_trackio.is_finished
    ((step, content),) = fake_trackio.logged
    assert (step, content["reward/mean"]) == (1, 0.5)
    assert content["samples"].data == [[1, "0?", "0", 1.0]]
    monkeypatch.setenv("TRACKIO_PROJECT", "ours")
    open_quietly(tmp_path / "first", 1, trackio=True).close()
    first, second = fake_trackio.settings
    assert (first["project"], first["name"], first["resume"]) == ("tpu_rl", "first", "never")
    assert (second["project"], second["name"], second["resume"]) == ("ours", "first-2", "allow")
    assert first["config"]["data"]["path"] == ["https://<secret>@host/rows.jsonl"]


def test_trackio_that_is_not_installed_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MachineError, match=r"tpu_rl\[trackio\]"):
        preflight.check(replace(config.preset("arithmetic_grpo"), trackio=True))


def test_dashboards_get_names_of_trl_where_it_logs_the_same(tmp_path, fake_wandb):
    row = {
        "policy/kl_reference": 0.25,
        "eval/loss": 1.0,
        "reward/my_reward.score/mean": 0.5,
        "reward/a.same/mean": 0.5,
        "reward/b.same/mean": 0.75,
    }
    with open_quietly(tmp_path, wandb=True) as sink:
        sink.write(1, row)
    ((_, content),) = fake_wandb.logged
    assert content == row | {"train/kl": 0.25, "train/rewards/score/mean": 0.5}
    assert not set(rows(tmp_path / "metrics.jsonl")[0]) & {"train/kl", "kl"}


class FakeMlflow(types.ModuleType):
    """The part of mlflow that `metrics` uses."""

    class MlflowException(Exception):
        pass

    def __init__(self):
        super().__init__("mlflow")
        self.params = {}
        self.logged = []
        self.texts = {}
        self.runs = []
        self.is_down = False

    def set_experiment(self, name):
        if self.is_down:
            raise self.MlflowException("no answer")
        self.experiment = name

    def get_tracking_uri(self):
        return "http://127.0.0.1:1"

    def start_run(self, run_id=None, run_name=None):
        self.runs.append((run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id7"))

    def log_params(self, params):
        assert len(params) <= 100
        assert not params.keys() & self.params.keys()
        self.params |= params

    def log_metrics(self, numbers, step, synchronous):
        self.logged.append((step, numbers))

    def log_text(self, text, path):
        if self.is_down:
            raise self.MlflowException("no answer")
        self.texts[path] = text

    def flush_async_logging(self):
        pass

    def end_run(self):
        self.runs.append("end")


def test_mlflow_gets_the_same_and_an_outage_ends_no_run(tmp_path, monkeypatch, capsys):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    sample = {"prompt": "0?", "completion": "0", "reward": 1.0, "parts": {}}
    many = {f"setting{number}": number for number in range(150)}
    with open_quietly(tmp_path / "first", mlflow=True, config=SETTINGS | many) as sink:
        sink.write(1, {"reward/mean": 0.5, "reward/f(x)/mean": 0.5}, [sample])
        fake.is_down = True
        sink.write(21, {"reward/mean": 0.75}, [sample])
    assert "warning: MLflow did not get step 21: no answer" in capsys.readouterr().err
    first = {"reward/mean": 0.5, "reward": 0.5, "reward/f_x_/mean": 0.5}
    assert fake.logged == [(1, first), (21, {"reward/mean": 0.75, "reward": 0.75})]
    assert list(fake.texts) == ["samples/step_1.md"]
    assert len(fake.params) == 155
    assert fake.params["data.path"] == '["https://<secret>@host/rows.jsonl"]'
    with pytest.raises(MachineError, match="MLflow does not take this run"):
        open_quietly(tmp_path / "second", mlflow=True)
    fake.is_down = False
    open_quietly(tmp_path / "first", 21, mlflow=True, config={"steps": 11}).close()
    assert fake.runs == [(None, "first"), "end", ("id7", None), "end"]
    assert fake.experiment == "tpu_rl"


def test_tables_come_with_the_first_completions_after_each_border():
    table_steps = metrics.TableSteps()
    kept = [step for step in range(1, 130) if step == 1 or step % 50 == 0]
    assert [step for step in kept if table_steps.is_due(step, [{}])] == [1, 50, 100]
    assert not table_steps.is_due(200, [])


def test_tensorboard_gets_tables_of_some_completions(tmp_path):
    sample = {"prompt": "a|b\n<i>", "completion": "`c`", "reward": math.nan, "parts": {}}
    with open_quietly(tmp_path, tensorboard=True) as sink:
        sink.write(1, {}, [sample])
    (text,) = [
        value.tensor.string_val[0].decode()
        for event in tensorboard_events(tmp_path)
        for value in event.summary.value
    ]
    assert text.splitlines() == [
        "| step | prompt | completion | reward |",
        "| --- | --- | --- | --- |",
        "| 1 | a&#124;b<br>&#60;i&#62; | &#96;c&#96; |  |",
    ]


def test_summary_is_written_whole(tmp_path):
    metrics.write_summary(tmp_path, {"steps": 3, "eval": {"after": {"accuracy": math.nan}}})
    metrics.write_summary(tmp_path, {"steps": 4, "eval": {"after": {"accuracy": math.nan}}})
    summary = run_files.read_summary(tmp_path)
    assert len(summary.pop("sha256")) == 64
    assert summary == {"steps": 4, "eval": {"after": {"accuracy": None}}}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def console_output(terminal: bool, *written: dict, show: int = 0, samples=()) -> str:
    file = io.StringIO()
    console = metrics.Console(
        0, 100, rich.console.Console(file=file, force_terminal=terminal, width=200), show
    )
    for row in written:
        console.write({"time": 0.0, **row}, samples)
    console.close()
    return file.getvalue()


def test_plain_lines_show_what_is_measured():
    text = console_output(
        False,
        {
            "step": 9,
            "reward/mean": 0.25,
            "reward/std": 0.5,
            "policy/log_prob_gap_max": 2e-6,
            "policy/entropy": None,
        },
        {"step": 10, "reward/mean": 0.5, "eval/accuracy": 0.625},
    )
    first, second = text.splitlines()
    assert first.startswith("step   9/100  reward 0.250  ± 0.500  gap 2e-06")
    assert first.endswith("gap 2e-06")  # It compiled, so that it tells no time.
    assert second.startswith("step  10/100  reward 0.500  accuracy 62.5%  ")
    assert second.endswith(" left")


def test_the_best_and_the_worst_completion_of_every_second_step():
    rewards = {"four": 0.5, "[red]\nfive\x1b[31m": 1.0, "six": 0.0, "seven": None, "nan": math.nan}
    samples = [
        {"prompt": "2+3=", "completion": text, "reward": reward} for text, reward in rewards.items()
    ]
    text = console_output(False, {"step": 1}, {"step": 2}, show=2, samples=samples)
    assert text.splitlines()[2:] == [
        "  best 1.000  2+3= -> [red]\\nfive",
        "  worst 0.000  2+3= -> six",
    ]
    assert list(metrics.extremes(samples[3:])) == []
    assert len(list(metrics.extremes(samples[:1]))) == 1


def test_completions_are_shown_only_where_some_are_kept():
    shown = config.parse(["arithmetic_grpo", "--samples.show", "2"])
    assert shown.samples.show == 2
    with pytest.raises(InputError, match="max_per_step 0 does not go with show"):
        config.parse(["arithmetic_grpo", "--samples.show", "2", "--samples.max-per-step", "0"])


def test_supervised_runs_show_their_loss():
    row = {"step": 1, "sft/loss": 1.5, "perf/train_tokens_per_second": 12345.0, "time/step": 0.5}
    assert console_output(False, row).startswith(
        "step   1/100  loss 1.5000  learned/s 12,345  seconds 0.50"
    )


def test_a_terminal_gets_a_bar_below_the_lines():
    text = console_output(True, {"step": 50, "reward/mean": 0.5})
    assert "0.500" in text
    assert "50/100" in text
    assert "\x1b[" in text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations(seconds, text):
    assert metrics._duration(seconds) == text
