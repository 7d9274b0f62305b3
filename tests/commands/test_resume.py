"""Runs that are stopped, or whose files are damaged, resume to the same bits. verify.py names
faults."""

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import pytest

from tests.fixtures.runs import TINY, digest, flip, rows_of, run_until
from tpu_rl.checkpoint import train_state_io
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.commands import config, run, saved_run
from tpu_rl.commands.tools import report, verify
from tpu_rl.errors import InputError
from tpu_rl.runtime import preemption

STEPS = ["--steps", "4"]


def arrays_of(run_dir: Path, step: int) -> Path:
    """Return the largest file of a checkpoint, which has weights."""
    return max(
        (run_dir / "checkpoints" / str(step) / "arrays").rglob("d/*"),
        key=lambda path: path.stat().st_size,
    )


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """Return a copy of the run that may be damaged, as if it had ended before its summary."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


@pytest.mark.slow
def test_fewer_steps_than_the_run_has_taken_leave_its_configuration_readable(copy, capsys):
    assert run.main([*TINY, "--steps", "2", "--run-dir", str(copy)]) == 2
    assert "the run has taken 4 steps already" in capsys.readouterr().err
    assert config.load(copy / "config.yaml").steps == 4
    assert saved_run.load_run(str(copy))[-1] == 4


@pytest.mark.slow
def test_resume_needs_memory_for_one_state(whole, tmp_path, monkeypatch):
    """Neither initial weights nor the state that describes the checkpoint exist while it is
    read."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    restore = train_state_io.restore
    measured_bytes = []

    def live_bytes() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    def measure_and_restore(checkpoints, step, abstract_state):
        measured_bytes.append(live_bytes() - before)
        state, extra = restore(checkpoints, step, abstract_state)
        measured_bytes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        return state, extra

    monkeypatch.setattr(train_state_io, "restore", measure_and_restore)
    before = live_bytes()
    assert run.main([*TINY, "--steps", "5", "--run-dir", str(run_dir)]) == 0
    other_bytes, state_bytes = measured_bytes
    assert other_bytes < 0.1 * state_bytes


@pytest.mark.slow
def test_run_without_a_report_is_not_finished(whole, tmp_path, capsys):
    """After a kill between summary and report, the same command writes the report."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / "report.html").unlink()
    assert run.main([*TINY, *STEPS, "--run-dir", str(run_dir)]) == 0
    assert "done:" in capsys.readouterr().out
    assert (run_dir / "report.html").exists()
    assert rows_of(run_dir) == rows_of(whole)


class FakeCheckpoints:
    """The part of `manager.Checkpoints` that `CheckpointWriter` uses to catch up."""

    def __init__(self, latest_step: int | None):
        self._latest_step = latest_step

    def latest(self) -> int | None:
        return self._latest_step

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("latest", "step", "saved"), [(None, 0, []), (2, 2, []), (2, 3, [3]), (None, 1, [1])]
)
def test_last_step_is_saved_before_the_run_leaves(latest, step, saved, monkeypatch, tmp_path):
    """Also a step whose save in the background was lost."""
    steps = []
    monkeypatch.setattr(
        run.CheckpointWriter, "save", lambda self, step, *rest, wait: steps.append(step)
    )
    writer = run.CheckpointWriter(RunFolder(tmp_path), FakeCheckpoints(latest), 0.0, None)
    writer.catch_up(step, None, dict)
    assert steps == saved
    message = "before the first step" if latest is None else "step 2 is saved"
    with pytest.raises(preemption.Preempted, match=message):
        writer.leave(75)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "code", "word"),
    [(signal.SIGTERM, 75, "pre-empted"), (signal.SIGINT, 130, "interrupted")],
)
def test_signal_saves_the_last_complete_step(
    whole, tmp_path, capsys, monkeypatch, signal_number, code, word
):
    """The signal arrives between two checkpoints, where nothing is saved otherwise."""
    run_dir = tmp_path / "run"
    command = [*TINY, *STEPS, "--run-dir", str(run_dir), "--checkpoint.interval", "100"]
    assert run_until(signal_number, command, 2, monkeypatch) == code
    error = capsys.readouterr().err
    assert f"{word}: step 2 is saved" in error or f"{word}: step 3 is saved" in error
    assert f"python launch/run.py arithmetic_grpo {' '.join(command[1:])}" in error

    assert run.main(command) == 0
    assert "resumed at step" in capsys.readouterr().out
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


@pytest.mark.slow
def test_a_row_that_cannot_be_used_costs_no_step(whole, tmp_path, capsys, monkeypatch):
    """The steps before it are saved, and the run goes on once the row is repaired."""
    run_dir = tmp_path / "run"
    command = [*TINY, *STEPS, "--run-dir", str(run_dir), "--checkpoint.interval", "100"]
    take_step = run.take_step

    def refuse_at_step_3(job, parts, state, step, began):
        if step == 3:
            raise InputError("a row cannot be used", where="rows.jsonl:7")
        return take_step(job, parts, state, step, began)

    monkeypatch.setattr(run, "take_step", refuse_at_step_3)
    assert run.main(command) == 2
    assert "rows.jsonl:7" in capsys.readouterr().err
    monkeypatch.undo()
    assert run.main(command) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert digest(run_dir) == digest(whole)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["muon", "adafactor", "lion", "sgd"])
def test_every_optimizer_resumes_to_the_same_bits(name, tmp_path, monkeypatch):
    flags = [*TINY, *STEPS, "--optimizer.name", name]
    whole_run = [*flags, "--run-dir", str(tmp_path / "whole")]
    assert run.main(whole_run) == 0
    cut_run = [*flags, "--run-dir", str(tmp_path / "cut")]
    assert run_until(signal.SIGTERM, cut_run, 2, monkeypatch) == 75
    assert run.main(cut_run) == 0
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


@pytest.mark.slow
def test_sigterm_during_a_rollout_drops_the_step(whole, tmp_path, capsys, monkeypatch):
    """The resumed run takes the step's rows from the data again."""
    run_dir = tmp_path / "run"
    command = [*TINY, *STEPS, "--run-dir", str(run_dir), "--checkpoint.interval", "100"]
    stop_if_requested = preemption.stop_if_requested
    num_calls = 0

    def stop_in_third_rollout():
        nonlocal num_calls
        if preemption._stoppable:  # Evaluations are not.
            num_calls += 1
        if num_calls == 6:  # Each step calls it at its beginning and after its only segment.
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption._stoppable[-1].stop.wait(10)
        stop_if_requested()

    with monkeypatch.context() as patch:
        patch.setattr(preemption, "stop_if_requested", stop_in_third_rollout)
        assert run.main(command) == 75
    assert num_calls == 6
    assert "pre-empted: step 2 is saved" in capsys.readouterr().err
    assert run.main(command) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


@pytest.mark.slow
def test_run_resumes_from_the_checkpoint_before_a_damaged_one(whole, copy, capsys):
    flip(arrays_of(copy, 4))
    command = [*TINY, *STEPS, "--run-dir", str(copy)]
    assert run.main(command) == 0
    printed = capsys.readouterr()
    assert "Checkpoint 4 is damaged" in printed.err
    assert str(copy / "checkpoints" / "damaged" / "4") in printed.err
    assert "resumed at step 3 (digest ok)" in printed.out
    assert digest(copy) == digest(whole)
    assert rows_of(copy) == rows_of(whole)
    assert verify.main([str(copy)]) == 0
    assert "checkpoint 4 is damaged and was set aside" in capsys.readouterr().out


@pytest.mark.slow
def test_a_copied_checkpoint_is_set_aside(whole, copy, capsys):
    """It is whole, and of another step."""
    shutil.rmtree(copy / "checkpoints" / "4")
    shutil.copytree(copy / "checkpoints" / "3", copy / "checkpoints" / "4")
    assert "checkpoint 4 is a copy of checkpoint 3" in faults_of(copy)
    assert run.main([*TINY, *STEPS, "--run-dir", str(copy)]) == 0
    printed = capsys.readouterr()
    assert "Checkpoint 4 is damaged: it is a copy of checkpoint 3" in printed.err
    assert "resumed at step 3 (digest ok)" in printed.out
    assert digest(copy) == digest(whole)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(copy, capsys):
    """It is not set aside: the file with the run's name may be what changed."""
    (copy / "run_id").write_text("another\n")
    assert run.main([*TINY, *STEPS, "--run-dir", str(copy)]) == 4
    assert "Checkpoint 4 is not of this run" in capsys.readouterr().err
    assert (copy / "checkpoints" / "4").is_dir()
    assert any("checkpoint 4 is of another run" in fault for fault in faults_of(copy))


def cut(path: Path) -> None:
    """Remove the last row of a file."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))


def change_a_number(path: Path) -> None:
    """Change the last digit of a file of rows."""
    content = path.read_bytes()
    at = max(content.rfind(b"%d" % digit) for digit in range(10))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def link_to_itself(path: Path) -> None:
    """Put a loop of links in place of a file."""
    path.unlink()
    path.symlink_to(path.name)


DAMAGED_FILES = [
    ("metrics.jsonl", Path.unlink),
    ("metrics.jsonl", cut),
    ("metrics.jsonl", change_a_number),
    ("metrics.jsonl", link_to_itself),
    ("samples.jsonl", cut),
    ("config.yaml", Path.unlink),
    ("config.yaml", flip),
    ("config.yaml", cut),
    ("run_id", Path.unlink),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED_FILES)
def test_damaged_files_beside_checkpoints_are_exit_code_4(copy, capsys, name, damage):
    damage(copy / name)
    assert run.main([*TINY, *STEPS, "--run-dir", str(copy)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert name in error
    assert verify.main([str(copy)]) == 4
    if name != "run_id":
        assert report.main([str(copy)]) == 4


def test_verify_names_a_flip_in_the_model(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    weights = tmp_path / "run" / "model" / "model.safetensors"
    flip(weights)
    assert faults_of(tmp_path / "run") == [f"changed: {weights}"]


@pytest.mark.slow
def test_run_without_an_intact_checkpoint_is_an_error_each_time(copy, capsys):
    """The run does not start again on top of the metrics of its earlier steps."""
    rows = (copy / "metrics.jsonl").read_bytes()
    for step in (3, 4):
        flip(arrays_of(copy, step))
    for _ in range(2):
        assert run.main([*TINY, *STEPS, "--run-dir", str(copy)]) == 4
        assert "No checkpoint of this run is whole" in capsys.readouterr().err
    assert (copy / "metrics.jsonl").read_bytes() == rows


def test_second_job_in_a_run_folder_is_refused(whole, capsys, monkeypatch):
    def refuse(file, how):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("fcntl.lockf", refuse)
    assert run.main([*TINY, *STEPS, "--run-dir", str(whole)]) == 2
    assert "another job is working in this run folder" in capsys.readouterr().err


def test_full_disk_is_one_message(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(run, "run", full)
    assert run.main([*TINY, *STEPS, "--run-dir", str(tmp_path / "run")]) == 3
    assert "error: the disk is full\n  where: metrics.jsonl" in capsys.readouterr().err


def test_verify_refuses_a_folder_that_is_not_a_run(tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_verify_finds_no_fault_in_an_undisturbed_run(whole, capsys):
    assert verify.main([str(whole)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("all files as they were written") == 2
    assert "metrics.jsonl: 5 whole rows, up to step 4" in printed
    assert f"{whole}: whole" in printed


def test_verify_names_files_that_changed(copy, capsys):
    flip(arrays_of(copy, 4))
    (copy / "checkpoints" / "3" / "record" / "metadata").unlink()
    (copy / "checkpoints" / "3" / "new").touch()
    assert verify.main([str(copy)]) == 4
    printed = capsys.readouterr().out
    assert f"checkpoint 4: changed {arrays_of(copy, 4)}" in printed
    assert f"checkpoint 3: missing {copy / 'checkpoints' / '3' / 'record' / 'metadata'}" in printed
    assert f"checkpoint 3: added {copy / 'checkpoints' / '3' / 'new'}" in printed
    assert f"{copy}: 3 faults" in printed


FAULTY_METRICS = {
    "a step twice": (lambda lines: [*lines[:3], *lines[2:]], "step 2 appears twice"),
    "a step missing": (lambda lines: [*lines[:2], *lines[4:]], "steps 2 to 3 missing"),
    "out of order": (
        lambda lines: [*lines[:2], lines[3], lines[2], lines[4]],
        "step 2 comes after step 3",
    ),
    "not JSON": (lambda lines: [lines[0], b"{\n", *lines[1:]], "line 2, is not a row"),
    "no step": (lambda lines: [*lines, b'{"time": 1}\n'], "line 6, is not a row"),
}


def faults_of(run_dir: Path) -> list[str]:
    return [finding.text for finding in verify.verify(str(run_dir)) if finding.is_fault]


@pytest.mark.parametrize(("change", "message"), FAULTY_METRICS.values(), ids=FAULTY_METRICS)
def test_verify_names_faulty_metrics(copy, change, message):
    path = copy / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert any(message in fault for fault in faults_of(copy))


def test_verify_names_faulty_samples(copy):
    path = copy / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    of_step_two = [line for line in lines if json.loads(line)["step"] == 2]
    at = lines.index(of_step_two[0])
    for changed, message in (
        ([*lines[:at], *of_step_two, *lines[at:]], "all rows of step 2 appear twice"),
        ([*lines, *of_step_two], "step 2 comes after step 4"),
    ):
        path.write_bytes(b"".join(changed))
        assert f"samples.jsonl: {message}" in faults_of(copy)


def test_incomplete_last_step_is_no_fault(copy):
    """A run that ended while it wrote leaves samples of a step without metrics, and half a line."""
    shutil.rmtree(copy / "checkpoints" / "4")  # Its rows were whole when it was saved.
    metrics_file = copy / "metrics.jsonl"
    lines = metrics_file.read_bytes().splitlines(keepends=True)
    metrics_file.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    findings = verify.verify(str(copy))
    assert not any(finding.is_fault for finding in findings)
    texts = "; ".join(finding.text for finding in findings)
    assert "metrics.jsonl, line 5, is cut off" in texts
    assert "samples.jsonl: step 4 has no row in metrics.jsonl: the job ended between" in texts
    (copy / "samples.jsonl").unlink()
    texts = [finding.text for finding in verify.verify(str(copy))]
    assert "samples.jsonl is missing" in texts
