"""Secrets stay out of errors, logs and files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import run
from tpu_rl import redaction
from tpu_rl.errors import InputError

SECRET = "Pa55phrase-of-the-hub"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("token hf_" + "Ab1" * 8 + " was refused", "token <secret> was refused"),
        ("https://me:pa55@host/x", "https://<secret>@host/x"),
        ("key=AKIA" + "B" * 16, "key=<secret>"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- after",
            "<secret> after",
        ),
        ("Bearer sk-" + "a1" * 12, "Bearer <secret>"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("the path owner/sk-model and hf_cache", "the path owner/sk-model and hf_cache"),
    ],
)
def test_secrets_are_known_by_their_shapes(text, hidden):
    assert redaction.redact(text) == hidden


def test_secrets_of_the_environment_are_known_by_their_names(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
        assert redaction.redact_environment(f"a {SECRET} b") == f"a <secret: {name}> b"
        monkeypatch.delenv(name)
    for name, value in (
        ("TOKENIZERS_PARALLELISM", "falsefalse"),
        ("A_TOKEN", "false"),
        ("MY_KEY", "/home/me/key.json"),
    ):
        monkeypatch.setenv(name, value)
        assert redaction.redact(f"a {value}") == f"a {value}"


def test_errors_hide_them(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    error = InputError(f"no {SECRET}", why=f"401 for https://u:{SECRET}@hub")
    assert SECRET not in str(error) + error.what + error.why
    assert error.what == "no <secret: HF_TOKEN>"


def test_tracebacks_hide_them():
    program = "from tpu_rl import redaction; redaction.redact_tracebacks(); "
    program += "raise RuntimeError('https://me:pa55@host')"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 1
    assert "pa55" not in result.stderr
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("RuntimeError: https://<secret>@host\n")


@pytest.mark.slow
def test_no_file_of_a_run_holds_them(tmp_path, monkeypatch, capfd):
    """A reward function fails with a token in its error, as one that asks a service may."""
    monkeypatch.setenv("SERVICE_TOKEN", SECRET)
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n\n\n"
        "def ask(prompts, completions):\n"
        "    raise RuntimeError('401 for token ' + os.environ.get('SERVICE_TOKEN', 'none'))\n"
    )
    flags = f"""arithmetic_grpo --batch.prompts 2 --batch.group-size 2 --batch.row-length 128
        --evaluation.rows 0
        --steps 1 --checkpoint-every 1 --reward {reward}:ask --reward-limits.fault-share 1.0"""
    assert run.main([*flags.split(), "--run-dir", str(tmp_path / "run")]) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"samples.jsonl", "config.yaml", "report.html"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    samples = [
        json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert all("401 for token" in sample["error"] for sample in samples)


def test_dry_run_holds_none(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert run.main(["--dry-run"]) == 0
    assert SECRET not in capsys.readouterr().out
    assert not Path(SECRET).exists()
