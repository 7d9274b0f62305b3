"""launch/doctor.py: on this machine, and on machines that lack something."""

import importlib.metadata
import os
import tempfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fixtures.fake_store import FakeStore
from tpu_rl import sandbox
from tpu_rl.commands.tools import doctor
from tpu_rl.errors import MachineError


def test_this_machine_on_one_screen(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s3cret" * 6)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert doctor.main(["--run-dir", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "this machine can run"
    assert len(lines) <= 24
    assert not any("s3cret" in line for line in lines)
    names = [line[5:21].strip() for line in lines[:-1] if line[:4] in ("ok  ", "note")]
    assert {
        "python",
        "packages",
        "host memory",
        "disk",
        "run folder",
        "model cache",
        "sandbox",
        "devices",
        "compiling",
    } <= {*names}
    assert not list(tmp_path.iterdir())


def failed(monkeypatch, capsys, *findings: doctor.Finding) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "examine", lambda run_dir: iter(findings))
    return doctor.main([]), capsys.readouterr().out


def test_what_fails_comes_with_its_remedy(monkeypatch, capsys):
    code, out = failed(
        monkeypatch,
        capsys,
        doctor.check_python((3, 10, 1)),
        doctor.Finding("clock", "1970", "set it", False),
    )
    assert code == 2
    assert "FAIL python" in out
    assert "-> install Python 3.11 or newer" in out
    assert "note clock" in out
    assert out.endswith("cannot run yet: python\n")
    assert failed(monkeypatch, capsys, doctor.Finding("clock", "1970", "set it", False))[0] == 0


def test_a_kernel_that_confines_no_programs_is_a_note(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "refusal", lambda: "unshare: Operation not permitted")
    code, out = failed(monkeypatch, capsys, doctor.check_sandbox())
    assert code == 0
    assert "note sandbox" in out
    assert "unshare: Operation not permitted" in out


def test_packages_are_compared_with_what_is_asked(monkeypatch):
    asked = ["jax>=99", "no-such-package", "PyYAML", 'wandb; extra == "wandb"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    finding = doctor.check_packages()
    assert finding.result.startswith("1 of 3 as required")
    assert "jax>=99 (0." in finding.fix
    assert "no-such-package (absent)" in finding.fix
    assert not doctor.is_satisfied(Requirement("jax>=99"))


def test_a_place_that_cannot_be_written(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    finding = doctor.check_writing("run folder", Path("/"))
    assert finding.result == "/: Permission denied"
    assert finding.fix


@pytest.mark.parametrize(("limit", "expected"), [("max", 5 * 2**30), (str(3 * 2**30), 2 * 2**30)])
def test_memory_is_that_of_the_container(tmp_path, limit, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {5 * 2**20} kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit + "\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{2**30}\n")
    assert doctor.available_memory(tmp_path) == expected
    assert doctor.available_memory(tmp_path / "proc") is None


def test_little_space_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MIN_BYTES", {"memory": 2**60, "disk": 2**60})
    findings = {
        finding.name: finding
        for finding in [*doctor.check_memory(), *doctor.check_disk(tmp_path / "a" / "b")]
    }
    assert "end other programs" in findings["host memory"].fix
    assert "--run-dir" in findings["disk"].fix
    assert findings["disk"].result.endswith(str(tmp_path))


def test_a_store_is_tried(monkeypatch):
    fake = FakeStore()
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    assert doctor.check_bucket("gs://bucket/runs").fix == ""
    assert fake.names() == []
    fake.refuse = lambda request: 403
    assert "storage.objectUser" in doctor.check_bucket("gs://bucket/runs").fix
    fake.close()


def test_devices_that_cannot_be_used(monkeypatch):
    def busy():
        raise MachineError("jax cannot use this machine's devices", why="busy", fix="end pid 42")

    monkeypatch.setattr(doctor.host, "claim_devices", busy)
    [finding] = doctor.check_devices()
    assert finding.result.endswith("busy")
    assert finding.fix == "end pid 42"
