"""Secrets stay out of errors, logs and files."""

import base64
import json
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tpu_rl import metrics, redaction
from tpu_rl.commands import run
from tpu_rl.diagnosis import secret_settings
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


A = "aB3dE5fG7hJ9kL2mN4pQ6rS8"
"""Random enough for a token."""
ENVIRONMENT = {
    "PGPASSWORD": f"pg{A}",
    "MYSQL_PWD": f"my{A}",
    "HF_TOKEN_READ": f"hr{A}",
    "GH_TOKEN2": f"gh{A}",
    "AWS_SECRET_ACCESS_KEY": f"/aws{A}+x/y=",
    "DATABASE_URL": f"postgres://db.example/{A}",
    "TEAM_WEBHOOK_URL": f"https://hooks.example/{A}",
    "SENTRY_DSN": f"https://{A}@sentry.example/1",
    "QUOTED_TOKEN": f'q"uo\\te\n{A}',
    "ACCENT_SECRET": f"é{A}",
}
SHAPES = [
    f"hf_{A}",
    f"ghp_{A}",
    f"ghr_{A}",
    f"github_pat_{A}",
    f"glpat-{A}",
    f"sk-proj-{A}",
    f"sk_live_{A}",
    f"AKIA{'B' * 16}",
    f"ASIA{'B' * 16}",
    f"ya29.{A}",
    f"xoxb-{A}",
    f"npm_{A}{A}",
    f"pypi-{A}{A}",
    f"SG.{A}.{A}",
    f"eyJhbGciOiJIUzI1NiJ9.{A}.{A}",
    f"12345678:AA{A}{A}",
]
NAMED = [
    "Server=db;Uid=me;Pwd={};",
    "AccountName=me;AccountKey={};EndpointSuffix=core",
    "Authorization: Bearer {}",
    "https://hooks.slack.com/services/T0/B0/{}",
    "https://discord.com/api/webhooks/1/{}",
    "redis://:{}@cache:6379/0",
    "https://x.example/?access_token={}&page=2",
]


def encoded(value: str) -> list[str]:
    data = value.encode()
    return [base64.b64encode(prefix + data).decode() for prefix in (b"", b"u:", b"me:")]


def leaks(text: str) -> list[str]:
    """Return the secrets of above that a text still has."""
    values = [*ENVIRONMENT.values(), *SHAPES, A]
    values += [form[4:-4] for value in ENVIRONMENT.values() for form in encoded(value)]
    return [value for value in values if value in text]


def all_shapes() -> list[str]:
    texts = [f"see {value} there" for value in (*ENVIRONMENT.values(), *SHAPES)]
    texts += [f"see {form} there" for value in ENVIRONMENT.values() for form in encoded(value)]
    return [*texts, *(text.format(A) for text in NAMED)]


def test_33_shapes_are_hidden(monkeypatch, tmp_path):
    """In errors, in a run's configuration, and in the rows of failed rewards."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert len(ENVIRONMENT) + len(SHAPES) + len(NAMED) == 33
    for text in all_shapes():
        assert leaks(text)
        assert not leaks(redaction.redact(text)), text
        assert not leaks(str(InputError(text, why=text)))
        assert not leaks(json.dumps(metrics.without_secrets({"a": [text]})))
    rows = metrics.JsonLines(tmp_path / "samples.jsonl")
    rows.append(*({"step": 1, "error": text} for text in all_shapes()))
    rows.append(*({"step": 1, "completion": value} for value in ENVIRONMENT.values()))
    rows.close()
    written = (tmp_path / "samples.jsonl").read_text()
    assert not leaks(written)
    assert not leaks(str([json.loads(line) for line in written.splitlines()]))


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
    """A reward function fails with one in each row's error, as one that asks a service may."""
    for name, value in {**ENVIRONMENT, "SERVICE_TOKEN": SECRET}.items():
        monkeypatch.setenv(name, value)
    texts = [SECRET, *all_shapes()]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    calls = tmp_path / "calls"
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import json\n\n\n"
        f"TEXTS = json.loads(open({str(tmp_path / 'texts.json')!r}).read())\n\n\n"
        "def ask(prompts, completions):\n"
        f"    with open({str(calls)!r}, 'ab') as calls:\n"
        "        calls.write(b'.')\n"
        "        calls.flush()\n"
        "        text = TEXTS[calls.tell() % len(TEXTS)]\n"
        "    raise RuntimeError('401 for ' + text)\n"
    )
    flags = f"""arithmetic_grpo --batch.prompts 16 --batch.group-size 8 --batch.row-length 128
        --evaluation.rows 0 --samples.max-per-step 128
        --steps 1 --checkpoint.interval 1 --reward {reward}:ask --reward-limits.fault-share 1.0"""
    assert run.main([*flags.split(), "--run-dir", str(tmp_path / "run")]) == 0
    assert calls.stat().st_size >= len(texts)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"samples.jsonl", "config.yaml", "report.html"} <= {path.name for path in files}
    written = [path.read_bytes().decode(errors="replace") for path in files]
    printed = capfd.readouterr()
    for text in (*written, printed.out, printed.err):
        assert SECRET not in text
        assert not leaks(text)
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 128
    assert all("401 for" in sample["error"] for sample in samples)
    named = {name for name in ENVIRONMENT if name in str(samples)}
    assert named == set(ENVIRONMENT)


def test_dry_run_holds_none(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert run.main(["--dry-run"]) == 0
    assert SECRET not in capsys.readouterr().out
    assert not Path(SECRET).exists()


FORMS = [
    "api_key: {}",
    '{{"api_key": "{}"}}',
    "{{'client_secret': '{}'}}",
    '{{\\"password\\": \\"{}\\"}}',
    "aws_secret_access_key = {}",
    "aws_session_token={}",
    "machine api.example login me password {}",
    "db.example:5432:main:me:{}",
    "//registry.example/:_authToken={}",
    '{{"auths": {{"index.example": {{"auth": "{}"}}}}}}',
    "export SERVICE_TOKEN={}",
    'OTHER_API_KEY="{}"',
    "X-Api-Key: {}",
    "X-Auth-Token: {}",
    "PRIVATE-TOKEN: {}",
    "x-goog-api-key: {}",
    "api-key: {}",
    "Authorization: Basic {}",
    "Authorization: Token {}",
    "authorization={}",
    "Proxy-Authorization: Basic {}",
    "{{'Authorization': 'Bearer {}'}}",
    "Cookie: a=b; session={}",
    "Set-Cookie: id={}; Path=/",
    "https://bucket.example/x?X-Amz-Signature={}&a=b",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n{}\n-----END PGP PRIVATE KEY BLOCK-----",
]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_headers_and_files_are_hidden(form):
    value = "Zq7Lm2Xw9Rt4Yp1K"
    text = f"before\n{form.format(value)}\nafter 8 words"
    shown = redaction.redact(text)
    assert value not in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter 8 words")


HEX = "0123456789abcdef" * 4
TABLE = [
    # Names.
    "DEPLOY_PAT={a}",
    "export NPM_AUTH={a}",
    "SERVICE_TOKENS={a},x",
    "REGISTRY_PASS={a}",
    # Arguments of commands.
    "wget --password {a} x",
    "tool --hub-token={a}",
    "tool --api-key '{a}'",
    "curl -u me:{a} https://x.example",
    "curl -s --user 'me:{a}' https://x.example",
    "curl -x p:1 --proxy-user me:{a} https://x.example",
    # Tokens of services.
    "dapi{hex:.32}",
    "dapi{hex:.32}-2",
    "dop_v1_{hex:.64}",
    "doo_v1_{hex:.64}",
    "whsec_{a}",
    "r8_{a}{a}",
    "shpat_{hex:.32}",
    "shpss_{hex:.32}",
    "lin_api_{a}{a}",
    "AGE-SECRET-KEY-1QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7LQPZRY9X8GF2TVDW0S3JN54KHCE6MU",
    "hvs.{a}",
    "dp.pt.{a}",
    "glrt-{a}",
    "sntrys_{a}",
    "figd_{a}",
    "ntn_{a}",
    "secret_{a}",
    "xai-{a}",
    "pplx-{a}",
    "tgp_v1_{a}",
    "fw_{a}",
    "rpa_{a}",
    "gsk_{a}",
    "lsv2_pt_{a}_{a}",
    "pscale_pw_{a}",
    "PMAK-{a}-{a}",
    "CFPAT-{a}",
    "tskey-auth-{a}-{a}",
    "ATATT3x{a}",
    "sq0atp-{a}",
    "SK{hex:.32}",
    "key-{hex:.32}",
    "{hex:.32}-us12",
    "xkeysib-{hex}",
    "LTAI{a}",
    "xoxe.xoxp-1-{a}",
    "api_org_{a}",
    "atlasv1.{a}",
    "rubygems_{hex:.48}",
    "MTA5{a:.20}.Gabcde.{a}{a}",
]


@pytest.mark.parametrize("form", TABLE)
def test_each_form_of_a_secret_is_hidden(form):
    text = f"before\n{form.format(a=A, hex=HEX)}\nafter 8 words."
    shown = redaction.redact(text)
    assert A not in shown
    assert HEX[:16] not in shown
    assert "QPZRY9X8" not in shown
    assert shown.startswith("before\n")
    assert shown.endswith("\nafter 8 words.")


def test_names_of_variables_hold_secrets_or_settings(monkeypatch):
    for name in ("DEPLOY_PAT", "NPM_AUTH", "CI_TOKENS"):
        monkeypatch.setenv(name, SECRET)
        assert redaction.redact_environment(f"a {SECRET} b") == f"a <secret: {name}> b"
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAX_TOKENS", "32768000")
    monkeypatch.setenv("USE_AUTH", "required")
    assert redaction.redact("32768000 are required") == "32768000 are required"


def test_secrets_of_several_lines_are_hidden_line_by_line(monkeypatch):
    lines = ["-----BEGIN OPENSSH KEY-----", *(f"{part}{A}{A}" for part in "abc"), "----- END"]
    monkeypatch.setenv("DEPLOY_KEY", "\n".join(lines))
    printed = "".join(f"  | ValueError: {line}\n" for line in lines)
    assert A not in redaction.redact(printed)
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", A, A, "-----END PRIVATE KEY-----"])
    for error in (ValueError(key), KeyError(key)):
        assert A not in redaction.redact("".join(traceback.format_exception(error)))


@pytest.mark.parametrize(
    "text",
    [
        "eos_token: <|endoftext|>",
        "pad_token=<|im_end|>",
        "max_new_tokens: 12345678",
        "file.py:12:34: password protected archive",
        "tokens: 1234567890",
        "the key=somewhere/else is a setting",
        "api_key: null",
        "12:30:45 a:b:c:d:e",
        "--sampling.stop-strings authorization",
        "design: signature of a function",
        "signature: compute_score(data_source, solution)",
        "Solve basic arithmetic problems",
        "Solve Basic Arithmetic problems",
        "EOS_TOKEN = tokenizer.eos_token",
        "NUM_TOKENS = len(token_ids[0]) + 12345678",
        "MAX_TOKENS=1234567890123456",
        "STOP_TOKENS = tokenizer.eos_ids",
        "give --hub-token or set HF_TOKEN",
        "--api-key together with --host",
        "--num-tokens 12345678",
        "curl -L https://example.org/file-12345678",
        "sk-learn-like-names-of-packages",
        "hf_hub_download_of_a_file_v2",
        "secret_santa_2024_and_other_stories",
        "the dapis of dapibus 0123456789",
        "hvs. and dp.pt. are abbreviations 1234567890",
        "key-value-store-0123456789",
        "SKILL0 AC0123 EAAAT",
        "def r8_to_r16(values): return values",
        "x = fw_model_of_the_year_2024_v1",
        "sha256:" + "0123456789abcdef" * 4,
        "commit 0123456789abcdef0123456789abcdef01234567",
        "https://example.org/a?page=12345678&sort=ascending",
        "The password is hidden in the garden, 12345678 steps away.",
        "the PATH=/usr/local/bin:/usr/bin",
        '{"auth": true, "keys": [1, 2]}',
        "AUTHOR=someone-12345678",
        "P(A|B) = P(B|A) P(A) / P(B); 3.14159265358979",
    ],
)
def test_other_texts_stay(text):
    assert redaction.redact(text) == text


def test_a_value_without_its_line_end_is_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{SECRET}\n")
    assert redaction.redact(f"a {SECRET} b") == "a <secret: HF_TOKEN> b"
    monkeypatch.setenv("HF_TOKEN", f" {SECRET}\r\n")
    for text in (SECRET, json.dumps({SECRET: 1}), base64.b64encode(SECRET.encode()).decode()):
        assert "<secret: HF_TOKEN>" in redaction.redact(text)
    monkeypatch.setenv("HF_TOKEN", "\n" * 9 + "short")
    assert redaction.redact("too short") == "too short"


def test_keys_of_dicts_are_hidden(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    config = {SECRET: 1, "headers": {"X-Api-Key": "Zq7Lm2Xw9Rt4", "eos_token": "<|im_end|>"}}
    assert metrics.without_secrets(config) == {
        "<secret: HF_TOKEN>": 1,
        "headers": {"X-Api-Key": "<secret>", "eos_token": "<|im_end|>"},
    }
    rows = metrics.JsonLines(tmp_path / "samples.jsonl")
    rows.append({"step": 1, "parts": {SECRET: 0.5}})
    rows.close()
    assert SECRET not in (tmp_path / "samples.jsonl").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--data.header", "Bearer", "Zq7Lm2Xw9Rt4"],
        ["headers:", "{X-Api-Key:", "Zq7Lm2Xw9Rt4}"],
        ["password:", "Zq7Lm2Xw9Rt4"],
        ["--url", "https://x.example/?api_key=Zq7Lm2Xw9Rt4"],
    ],
)
def test_named_secrets_are_no_settings(words):
    with pytest.raises(InputError, match="a secret was given") as error:
        secret_settings.refuse_secrets(words)
    assert "Zq7" not in str(error.value)
    secret_settings.refuse_secrets(["--data.system", "<|im_end|>", "eos_token:", "12345678"])
    secret_settings.refuse_secrets(
        ["asked", "for", "a", "password:", "politely", "decline", "basic", "arithmetic"]
    )
