"""A teacher by HTTP: its log-probs in their places, and what it is refused for."""

import contextlib
import math
import subprocess
import sys
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.fake_sampler import TOKENIZER
from tests.fixtures.runs import rows_of
from tpu_rl import models
from tpu_rl.commands import run
from tpu_rl.commands.roles import model_path
from tpu_rl.errors import InputError
from tpu_rl.serving import served_teacher
from tpu_rl.tokenizers import load as load_tokenizer
from tpu_rl.types import Completions

ROOT = Path(__file__).resolve().parents[2]
TOP = 2


def log_probs(before, token):
    """Return id -> log-prob after some tokens: the token itself is the second likeliest."""
    other = 4 + (before[-1] + len(before)) % 5
    return {other + 10: math.log(0.6), token: math.log(0.3), 30: math.log(0.05)}


class Fake:
    """Answers as vLLM does."""

    def __init__(self, **wrong):
        self.wrong = wrong
        self.asked = 0

    def __call__(self, teacher, body):
        self.asked += 1
        prompts = body["prompt"]
        texts = [TOKENIZER.encode(prompts)] if isinstance(prompts, str) else prompts
        choices = [
            {"index": index, "prompt_token_ids": text, "prompt_logprobs": self.shown(text)}
            for index, text in enumerate(texts)
        ]
        choices[0] |= self.wrong.get("choice", {})
        return {"choices": choices[::-1]} | self.wrong.get("answer", {})

    def shown(self, text):
        later = self.wrong.get("later", 0) * len(text)
        entries = [log_probs(text[:place], text[place]) for place in range(1, len(text))]
        return [None] + [
            {str(token): {"logprob": value - later, "rank": 1} for token, value in entry.items()}
            for entry in entries
        ]


def completions():
    texts = [TOKENIZER.encode(text) for text in ("abc", "badgers", "cd")]
    tokens = np.zeros((4, 9), np.int32)
    mask = np.zeros((4, 9), bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, 1 : len(text)] = True
    return Completions(tokens, mask, np.arange(4), np.ones(4, bool))


def taught(monkeypatch, **wrong):
    fake = Fake(**wrong)
    monkeypatch.setattr(served_teacher.Teacher, "_ask", lambda self, body: fake(self, body))
    teach = served_teacher.Teacher("http://127.0.0.1:1/v1", TOP, TOKENIZER)
    return teach, fake


def test_each_token_has_the_likeliest_tokens_in_its_place(monkeypatch):
    teach, fake = taught(monkeypatch)
    before = completions()
    after = teach(before)
    assert fake.asked == 3 + 2 + 1
    teach(before)
    assert fake.asked == 7
    for row, place in np.argwhere(before.action_mask):
        text = before.tokens[row].tolist()
        expected = log_probs(text[:place], text[place])
        ids = after.teacher_ids[row, place].tolist()
        assert ids == list(expected)[:TOP]
        shown = after.teacher_log_probs[row, place]
        np.testing.assert_allclose(shown, [expected[i] for i in ids], rtol=1e-6)
    assert not after.teacher_ids[3].any()


@pytest.mark.parametrize(
    ("why", "wrong"),
    [
        ("another tokenizer", {"choice": {"prompt_token_ids": [7, 7]}}),
        ("change by", {"later": 0.05}),
        ("not one for each token", {"choice": {"prompt_logprobs": [None]}}),
        ("no choices", {"answer": {"choices": None}}),
        ("of 3 texts", {"answer": {"choices": []}}),
        (
            "lacks log-probs of 2",
            {"choice": {"prompt_logprobs": [None, *[{"5": {"logprob": 0}}] * 2]}},
        ),
        ("not those of a distribution", {"later": -0.5}),
    ],
)
def test_a_teacher_that_answers_otherwise_is_refused(monkeypatch, why, wrong):
    if why == "of 3 texts":
        monkeypatch.setattr(served_teacher.Teacher, "test", lambda self, texts: None)
    teach, _ = taught(monkeypatch, **wrong)
    with pytest.raises(InputError, match=why):
        teach(completions())


def test_a_server_that_is_not_there_is_one_message(monkeypatch):
    monkeypatch.setattr(served_teacher, "PAUSES", (0.0,))
    teach = served_teacher.Teacher("http://127.0.0.1:1/v1", TOP, TOKENIZER)
    with pytest.raises(InputError, match="cannot be had"):
        teach(completions())


@contextlib.contextmanager
def serving(model, port):
    command = [sys.executable, "launch/serve.py", model, "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.nightly
def test_a_run_with_a_served_teacher_is_that_with_a_local_one(tmp_path):
    """The teacher is the shipped model with noise on its weights."""
    shipped = model_path("builtin:arithmetic")
    model, params = models.load(shipped)
    random = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x + 0.02 * random.normal(size=x.shape).astype(x.dtype), params)
    models.save(str(tmp_path / "noisy"), model, noisy, load_tokenizer(shipped))
    flags = [
        "arithmetic_gkd",
        "--batch.prompts=8",
        "--batch.row-length=128",
        "--evaluation.rows=0",
        "--algorithm.top-k=8",
        "--optimizer.warmup-steps=0",
        "--steps=3",
    ]
    with serving(str(tmp_path / "noisy"), 8943) as address:
        teachers = {"local": str(tmp_path / "noisy"), "served": address}
        for name, teacher in teachers.items():
            run_dir = f"--run-dir={tmp_path / name}"
            assert run.main([*flags, f"--algorithm.teacher={teacher}", run_dir]) == 0
    losses = [
        [row["distill/loss"] for row in rows_of(tmp_path / name) if row["step"]]
        for name in teachers
    ]
    assert len(losses[0]) == 3
    assert min(losses[0]) > 0.01
    np.testing.assert_allclose(*losses, atol=1e-5)
