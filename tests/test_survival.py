"""A run that is ended, or whose files are damaged, goes on to the same bits, and verify.py says what is at fault."""

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import pytest

from launch import preemption, run, states, verify
from tests.test_launch import TINY, rows_of
from tpu_rl import metrics, run_lock

STEPS = ["--steps", "4"]


def digest(run_dir: Path) -> str:
    return json.loads((run_dir / "summary.json").read_text())["params_digest"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def arrays_of(run_dir: Path, step: int) -> Path:
    """The file with the weights of a checkpoint."""
    return max((run_dir / "checkpoints" / str(step) / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of four steps that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert run.main([*TINY, *STEPS, "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """The same, to be damaged; as if its job had ended just before it was finished."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


def run_until(received: signal.Signals, command: list[str], last: int, monkeypatch) -> int:
    """The exit code of a run that is told to end when it has written the row of a step."""
    write = metrics.Sink.write

    def end_after_it(sink, step, *arguments):
        write(sink, step, *arguments)
        if step == last:
            os.kill(os.getpid(), received)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Sink, "write", end_after_it)
        return run.main(command)


def test_a_run_that_goes_on_needs_room_for_one_state(whole, tmp_path, monkeypatch):
    """Neither the first weights nor those that say what is wanted are there while a checkpoint is read."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    restore, live, there = states.restore, jax.live_arrays, []

    def measured(checkpoints, step, wanted):
        there.append(sum(array.nbytes for array in live()) - before)
        state, extra = restore(checkpoints, step, wanted)
        there.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        return state, extra

    monkeypatch.setattr(states, "restore", measured)
    before = sum(array.nbytes for array in live())
    assert run.main([*TINY, "--steps", "5", "--run-dir", str(run_dir)]) == 0
    others, state = there
    assert others < 0.1 * state


def test_an_old_report_is_no_sign_of_a_finished_run(whole, tmp_path, monkeypatch, capsys):
    """A kill between summary and report: the same command writes the report."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / "report.html").unlink()
    assert run.main([*TINY, *STEPS, "--run-dir", str(run_dir)]) == 0
    assert "done:" in capsys.readouterr().out
    assert (run_dir / "report.html").exists()
    assert rows_of(run_dir) == rows_of(whole)


class Kept:
    """Checkpoints as far as `Saves` asks them."""

    def __init__(self, latest: int | None):
        self.latest, self.close = lambda: latest, lambda: None


@pytest.mark.parametrize(("latest", "step", "saved"), [(None, 0, []), (2, 2, []), (2, 3, [3]), (None, 1, [1])])
def test_what_is_not_on_the_disk_is_saved_before_a_run_leaves(latest, step, saved, monkeypatch):
    """Also a step that was to be saved in the background, and was lost there."""
    found = []
    monkeypatch.setattr(run.Saves, "save", lambda self, step, *rest, wait: found.append(step))
    saves = run.Saves(None, Kept(latest), 0.0)
    saves.catch_up(step, None, {})
    assert found == saved
    with pytest.raises(preemption.Preempted, match="before the first step" if latest is None else "step 2 is saved"):
        saves.leave(75)


@pytest.mark.parametrize(
    ("received", "code", "word"), [(signal.SIGTERM, 75, "pre-empted"), (signal.SIGINT, 130, "interrupted")]
)
def test_who_is_told_to_end_saves_the_last_whole_step(whole, tmp_path, capsys, monkeypatch, received, code, word):
    """Between two checkpoints: without the signal, nothing would be saved there."""
    run_dir = tmp_path / "run"
    command = [*TINY, *STEPS, "--run-dir", str(run_dir), "--checkpoint-every", "100"]
    assert run_until(received, command, 2, monkeypatch) == code
    said = capsys.readouterr().err
    assert f"{word}: step 2 is saved" in said or f"{word}: step 3 is saved" in said
    assert f"python launch/run.py arithmetic_grpo {' '.join(command[1:])}" in said

    assert run.main(command) == 0
    assert "resumed at step" in capsys.readouterr().out
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


def test_a_sigterm_in_the_midst_of_a_rollout_gives_that_step_up(whole, tmp_path, capsys, monkeypatch):
    """Rows drawn from the data for it are drawn again."""
    run_dir = tmp_path / "run"
    command = [*TINY, *STEPS, "--run-dir", str(run_dir), "--checkpoint-every", "100"]
    borders, border = [], preemption.border

    def end_in_rollout_three():
        borders.append(1)
        if len(borders) == 6:  # each step has one at its beginning, and one behind its only segment
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption._asking[-1].terminate.wait(10)
        border()

    with monkeypatch.context() as patch:
        patch.setattr(preemption, "border", end_in_rollout_three)
        assert run.main(command) == 75
    assert len(borders) == 6
    assert "pre-empted: step 2 is saved" in capsys.readouterr().err
    assert run.main(command) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert digest(run_dir) == digest(whole)
    assert rows_of(run_dir) == rows_of(whole)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(whole, copy, capsys):
    flip(arrays_of(copy, 4))
    command = [*TINY, *STEPS, "--run-dir", str(copy)]
    assert run.main(command) == 0
    said = capsys.readouterr()
    assert "Checkpoint 4 is damaged" in said.err
    assert str(copy / "checkpoints" / "damaged" / "4") in said.err
    assert "resumed at step 3 (digest ok)" in said.out
    assert digest(copy) == digest(whole)
    assert rows_of(copy) == rows_of(whole)
    assert verify.main([str(copy)]) == 0
    assert "checkpoint 4 is damaged and was set aside" in capsys.readouterr().out


def test_where_no_checkpoint_is_whole_the_run_says_so_each_time(copy, capsys):
    """And does not begin anew over the rows that are there."""
    rows = (copy / "metrics.jsonl").read_bytes()
    for step in (3, 4):
        flip(arrays_of(copy, step))
    for _ in range(2):
        assert run.main([*TINY, *STEPS, "--run-dir", str(copy)]) == 4
        assert "No checkpoint of this run is whole" in capsys.readouterr().err
    assert (copy / "metrics.jsonl").read_bytes() == rows


def test_a_second_job_is_refused(whole, capsys, monkeypatch):
    def refuse(file, how):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(run_lock.fcntl, "lockf", refuse)
    assert run.main([*TINY, *STEPS, "--run-dir", str(whole)]) == 2
    assert "another job is working in this run folder" in capsys.readouterr().err


def test_a_full_disk_is_one_message(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(run, "run", full)
    assert run.main([*TINY, *STEPS, "--run-dir", str(tmp_path / "run")]) == 3
    assert "error: the disk is full\n  where: metrics.jsonl" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_an_undisturbed_run_is_whole(whole, capsys):
    assert verify.main([str(whole)]) == 0
    said = capsys.readouterr().out
    assert said.count("all files as they were written") == 2
    assert "metrics.jsonl: 5 whole rows, up to step 4" in said
    assert f"{whole}: whole" in said


def test_files_of_checkpoints_are_named(copy, capsys):
    flip(arrays_of(copy, 4))
    (copy / "checkpoints" / "3" / "record" / "metadata").unlink()
    (copy / "checkpoints" / "3" / "new").touch()
    assert verify.main([str(copy)]) == 4
    said = capsys.readouterr().out
    assert f"checkpoint 4: changed {arrays_of(copy, 4)}" in said
    assert f"checkpoint 3: missing {copy / 'checkpoints' / '3' / 'record' / 'metadata'}" in said
    assert f"checkpoint 3: added {copy / 'checkpoints' / '3' / 'new'}" in said
    assert f"{copy}: 3 faults" in said


ROWS = {
    "a step twice": (lambda lines: [*lines[:3], *lines[2:]], "step 2 stands there twice"),
    "a step missing": (lambda lines: [*lines[:2], *lines[4:]], "steps 2 to 3 missing"),
    "out of order": (lambda lines: [*lines[:2], lines[3], lines[2], lines[4]], "step 2 stands behind step 3"),
    "not JSON": (lambda lines: [lines[0], b"{\n", *lines[1:]], "line 2, is not a row"),
    "no step": (lambda lines: [*lines, b'{"time": 1}\n'], "line 6, is not a row"),
}


@pytest.mark.parametrize(("change", "said"), ROWS.values(), ids=ROWS)
def test_rows_of_metrics_are_whole_and_once(copy, change, said):
    path = copy / "metrics.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert any(said in finding.text for finding in verify.verify(str(copy)) if finding.is_fault)


def test_samples_are_whole_and_once(copy):
    path = copy / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    of_step_two = [line for line in lines if json.loads(line)["step"] == 2]
    at = lines.index(of_step_two[0])
    for changed, said in (
        ([*lines[:at], *of_step_two, *lines[at:]], "all rows of step 2 stand there twice"),
        ([*lines, *of_step_two], "step 2 stands behind step 4"),
    ):
        path.write_bytes(b"".join(changed))
        assert [finding.text for finding in verify.verify(str(copy)) if finding.is_fault] == [f"samples.jsonl: {said}"]


def test_what_an_ended_job_leaves_is_no_fault(copy):
    """Samples of a step whose metrics were not written any more, and half a line."""
    metrics_file, samples_file = copy / "metrics.jsonl", copy / "samples.jsonl"
    lines = metrics_file.read_bytes().splitlines(keepends=True)
    metrics_file.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    findings = verify.verify(str(copy))
    assert not any(finding.is_fault for finding in findings)
    texts = "; ".join(finding.text for finding in findings)
    assert "metrics.jsonl, line 5, is cut off" in texts
    assert "samples.jsonl: step 4 has no row in metrics.jsonl: the job ended between" in texts
    samples_file.unlink()
    assert any(finding.text == "samples.jsonl is missing" for finding in verify.verify(str(copy)))
