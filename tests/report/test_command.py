"""The command launch/report.py, and the page of a run that is on: it never marks a run as done."""

import contextlib
import json
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request

import pytest

from tests.fixtures.runs import TINY, digest, run_until
from tpu_rl import report
from tpu_rl.commands import config, finish, run
from tpu_rl.commands.tools import report as command
from tpu_rl.report import page

REFRESH = '<meta http-equiv="refresh"'


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run that has taken two steps."""
    rows = [
        {"step": step, "time": 1.7e9 + step, "sft/loss": 1 / step, "optim/grad_norm": 1.0}
        for step in (1, 2)
    ]
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text("kind: ExperimentConfig\nsteps: 4\n")
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def server(folder):
    """Return the address of a server of the run's page."""
    with command.open_server([str(folder)], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def get(address: str, **headers: str) -> str:
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Frame-Options"] == "DENY"
        return response.read().decode()


def status_of(address: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(address, **headers)
    error.value.close()
    return error.value.code


def test_the_page_of_an_unfinished_run_is_written(folder, capsys):
    assert command.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/report.html\n"
    text = (folder / "report.html").read_text()
    assert "2 of 4" in text
    assert REFRESH not in text


def test_half_a_surrogate_pair_is_shown(folder):
    sample = {"step": 1, "prompt": "p", "completion": "half \ud800 of a pair", "reward": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "config.yaml").write_text('kind: ExperimentConfig\nsteps: 4\nname: "a\\uDCFFb"\n')
    assert command.main([str(folder)]) == 0
    assert "half \\ud800 of a pair" in (folder / "report.html").read_text()
    assert command.page([str(folder)])[1].encode()


@pytest.mark.parametrize("flags", [[], ["--serve", "--port", "0"]])
def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys, flags):
    assert command.main([str(tmp_path), *flags]) == 2
    assert "not a run folder" in capsys.readouterr().err


def test_a_run_without_rows_is_refused(folder, capsys):
    (folder / "metrics.jsonl").unlink()
    assert command.main([str(folder)]) == 2
    assert "nothing to report" in capsys.readouterr().err


def test_a_damaged_run_is_code_4(folder, capsys):
    (folder / "metrics.jsonl").write_text("no json\n")
    assert command.main([str(folder)]) == 4
    assert "metrics.jsonl cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["70000", "-1", "used"])
def test_a_port_that_cannot_be_used_is_refused(folder, server, capsys, port):
    port = server.rpartition(":")[2] if port == "used" else port
    assert command.main([str(folder), "--serve", "--port", port]) == 2
    assert f"port {port} cannot be used" in capsys.readouterr().err


def test_a_served_page_is_built_anew_for_each_request(folder, server):
    text = get(server)
    assert "2 of 4" in text
    assert REFRESH in text
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.7e9, "sft/loss": 0.25}\n')
    assert "3 of 4" in get(server)
    assert not (folder / "report.html").exists()


def test_a_run_that_has_no_rows_yet_is_asked_again(folder, server):
    rows = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(urllib.error.HTTPError) as error:
        get(server)
    assert error.value.code == 503
    assert REFRESH in error.value.read().decode()
    error.value.close()
    (folder / "metrics.jsonl").write_bytes(rows)
    assert "2 of 4" in get(server)


def test_only_the_page_is_served_and_only_to_this_machine(server):
    assert status_of(f"{server}/metrics.jsonl") == 404
    assert status_of(f"{server}/../config.yaml") == 404
    assert status_of(server, Host="evil.example") == 403
    assert "2 of 4" in get(server, Host="localhost:8000")
    twice = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.rpartition(":")[2])), 10) as client:
        client.sendall(twice)
        assert b" 403 " in client.recv(1 << 16)


@pytest.mark.slow
def test_half_requests_hold_few_threads_and_not_for_long(server, monkeypatch):
    monkeypatch.setattr(command, "REQUEST_SECONDS", 0.5)
    before = threading.active_count()
    port = int(server.rpartition(":")[2])
    halves = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(200)]
    for half in halves:
        with contextlib.suppress(OSError):
            half.sendall(b"GET / HTTP/1.1\r\nHo")
    # Each has a thread, and a timer is one.
    assert threading.active_count() <= before + 2 * command.MOST_CONNECTIONS
    for half in halves:
        with half, contextlib.suppress(OSError):
            while half.recv(1 << 16):
                pass
    assert "2 of 4" in get(server)


def test_ctrl_c_ends_the_server(folder, capsys, monkeypatch):
    def interrupt(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.ThreadingHTTPServer, "serve_forever", interrupt)
    assert command.main([str(folder), "--serve", "--port", "0"]) == 0
    assert f"serving {folder} on http://127.0.0.1:" in capsys.readouterr().out


def test_a_report_that_fails_is_a_warning(tmp_path, capsys, monkeypatch):
    finish.update_report(tmp_path)  # There are no rows.
    assert "warning: report.html was not written: InputError" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()

    def fail(*_, **__):
        raise ZeroDivisionError("<b>hf_abcdefghijklmnopqrstuvwx")

    monkeypatch.setattr(report, "write_report", fail)
    finish.write_final_report(tmp_path)
    assert "report.html was not written: ZeroDivisionError: <b><secret>" in capsys.readouterr().err
    assert "ZeroDivisionError: &lt;b&gt;&lt;secret&gt;" in (tmp_path / "report.html").read_text()


def test_live_pages_come_one_at_a_time_and_the_last_is_whole(folder, monkeypatch):
    """An update during a page, or during the rest after it, gives one more page, at the latest at
    the end of the run."""
    began, go_on = threading.Event(), threading.Event()
    written = []

    def write(run_dir, live):
        assert live
        began.set()
        assert go_on.wait(10)
        written.append((threading.current_thread().name, len(list(run_dir.iterdir()))))

    monkeypatch.setattr(report, "write_report", write)
    monkeypatch.setattr(finish.LivePage, "REST", 1e9)
    with finish.LivePage(folder) as live:
        live.update()
        assert began.wait(10)
        for number in range(5):  # Nobody waits for the page that is being written.
            (folder / str(number)).touch()
            live.update()
        assert not written
        go_on.set()
    assert written == [("report", 7)] * 2
    with finish.LivePage(folder):
        pass
    assert len(written) == 2


@pytest.mark.nightly
def test_a_run_that_was_stopped_has_a_page_and_is_not_finished(
    whole, tmp_path, capsys, monkeypatch
):
    """Its page reloads itself. When the run ends, also with a report that fails, the run is
    finished, and the page does not reload itself any more."""
    run_dir = tmp_path / "run"
    flags = [*TINY, "--steps", "4", "--run-dir", str(run_dir)]
    parsed = config.parse(flags)
    assert run_until(signal.SIGTERM, flags, 3, monkeypatch) == 75
    text = (run_dir / "report.html").read_text()
    assert REFRESH in text
    assert "step 2 ended on" in text
    assert not run.is_finished(parsed, run_dir)

    def fail(*_, **__):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(page, "build_page", fail)
        assert run.main(flags) == 0
    printed = capsys.readouterr()
    assert "done:" in printed.out
    assert "warning: report.html was not written: ZeroDivisionError" in printed.err
    assert digest(run_dir) == digest(whole)
    samples = [(folder / "samples.jsonl").read_bytes() for folder in (run_dir, whole)]
    assert samples[0] == samples[1]
    assert run.is_finished(parsed, run_dir)
    assert "There is no report" in (run_dir / "report.html").read_text()
    assert command.main([str(run_dir)]) == 0
    text = (run_dir / "report.html").read_text()
    assert "Reward" in text
    assert REFRESH not in text


def test_a_live_page_beside_an_old_summary_is_not_a_finished_run(whole, tmp_path):
    """A finished run that goes on with more steps is killed: the summary is of fewer steps."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    longer = config.parse([*TINY, "--steps", "8", "--run-dir", str(run_dir)])
    config.save(longer, run_dir / "config.yaml")
    finish.update_report(run_dir)
    assert REFRESH in (run_dir / "report.html").read_text()
    assert not run.is_finished(longer, run_dir)


@pytest.mark.slow
def test_a_kill_between_summary_and_report_leaves_no_page(whole, tmp_path, monkeypatch):
    """What `finish` does last, in order: the live page goes before the summary comes."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    (run_dir / "summary.json").unlink()
    flags = [*TINY, "--steps", "4", "--run-dir", str(run_dir)]

    def kill(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(finish, "write_final_report", kill)
    assert run.main(flags) == 130
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
    assert not (run_dir / "report.html").exists()
    assert not run.is_finished(config.parse(flags), run_dir)


def test_several_runs_share_a_page(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(folder, tmp_path / "other")
    rows = [{"step": 1, "time": 1.7e9, "sft/loss": 0.25, "eval/accuracy": 0.5}]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command.main([str(folder), str(other)]) == 0
    text = (tmp_path / "comparison.html").read_text()
    assert "<td>run</td><td>2, not finished</td><td></td><td>0.5</td>" in text
    assert "<td>other</td><td>1, not finished</td><td>0.5</td><td>0.25</td>" in text
    # One chart with a line for each run, and one of a metric that one run has.
    assert text.count(">Loss<") == text.count(">Gradient norm<") == text.count(">Accuracy<") == 1
    assert REFRESH not in text
    with command.open_server([str(folder), str(other)], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert REFRESH in get(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join(10)
    same = shutil.copytree(folder, tmp_path / "elsewhere" / "run")
    assert command.main([str(folder), str(same), "--to", str(tmp_path / "x.html")]) == 0
    assert "elsewhere/run" in (tmp_path / "x.html").read_text()
    for wrong in ([], [str(folder)] * 65, [str(folder), "--to", "x"], [str(folder), "nowhere"]):
        assert command.main(wrong) == 2
    assert "error: 65 runs on one page" in capsys.readouterr().err
