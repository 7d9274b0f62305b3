"""Texts that join each group: the pretraining mix of PPO-ptx."""

import json

import jax
import numpy as np
import pytest

from tests.fixtures import tiny_data
from tests.fixtures.echo import TOKENIZER, digit, score_prompts
from tpu_rl.algos import GrpoConfig, PpoConfig, grpo
from tpu_rl.commands import run
from tpu_rl.errors import InputError
from tpu_rl.experience import transforms
from tpu_rl.proofs import cases, tiny
from tpu_rl.train import update_step
from tpu_rl.types import RowSource

COEF = 0.3


def test_the_term_is_the_mean_log_prob_of_texts():
    data = tiny_data.with_experts(source=RowSource.TEXT)
    is_text = np.asarray(data.source) == RowSource.TEXT
    config = GrpoConfig(pretraining_path="texts", pretraining_coef=COEF)
    params = tiny.init_params(cases.MODEL)
    algorithm = grpo(config, tiny.roles(cases.MODEL), tiny.SAMPLING)
    batch, _ = algorithm.make_batch(tiny.experience(data), params, ())
    batch = update_step.minibatch(batch, 0)
    parts = [update_step.minibatch(batch, k) for k in range(len(batch.rows.tokens))]
    metrics = jax.device_get([jax.jit(algorithm.loss)(params, part)[1] for part in parts])
    found = sum(float(part["policy/pretraining_loss"].value) for part in metrics)

    mask = np.asarray(data.action_mask) & is_text[:, None]
    temperature = tiny.SAMPLING.temperature
    log_probs = tiny.plain_log_probs(cases.MODEL, params["policy"], data.tokens, temperature)
    assert found == pytest.approx(-COEF * float(log_probs[mask].mean()), rel=1e-5)
    # No baseline and no metric of the policy sees the texts.
    without, _ = grpo(GrpoConfig(), tiny.roles(cases.MODEL), tiny.SAMPLING).make_batch(
        tiny.experience(data), params, ()
    )
    np.testing.assert_array_equal(without.advantages, batch.advantages[None])


def test_a_coefficient_and_a_file_go_together():
    for settings in ({"pretraining_coef": 0.1}, {"pretraining_path": "texts.jsonl"}):
        for config in (GrpoConfig, PpoConfig):
            with pytest.raises(InputError, match="pretraining-coef"):
                config(**settings)


def test_texts_come_in_the_order_of_steps(tmp_path):
    texts = [str(number) for number in range(5)]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    scored = score_prompts(["12", "34", "21"], {"digit": digit}, group_size=2)
    add = transforms.text_of_file(str(file), TOKENIZER)
    seen = []
    for step in range(4):
        added = add(scored, step, None)
        rollout = added.rollout
        is_text = np.asarray(rollout.source) == RowSource.TEXT
        assert is_text.sum() == len(scored.rows)
        assert not np.asarray(rollout.scored)[is_text].any()
        # A text is its own root, and the other rows share the prompt of their group's first.
        own = np.arange(len(is_text))
        np.testing.assert_array_equal(np.asarray(rollout.parent)[is_text], own[is_text])
        assert not np.asarray(rollout.shared)[is_text].any()
        seen += [text for text, flag in zip(added.completions, is_text, strict=True) if flag]
        again = add(scored, step, None).rollout
        np.testing.assert_array_equal(again.tokens, rollout.tokens)
    for epoch in range(len(seen) // len(texts)):
        one = seen[epoch * len(texts) : (epoch + 1) * len(texts)]
        assert sorted(text.rstrip() for text in one) == texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("grpo", ("--batch.staleness", "1", "--batch.num-minibatches", "2")),
        pytest.param("ppo", (), marks=pytest.mark.nightly),
    ],
)
def test_a_run_goes_on_imitating_texts(preset, flags, tmp_path):
    prompts = [{"prompt": f"{n}+1="} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    texts = [{"text": f"{n}+{n}={2 * n}"} for n in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (tmp_path / "reward.py").write_text(
        "def score(prompts, completions, **_):\n"
        "    return [float(len(completion) % 3) for completion in completions]\n"
    )
    arguments = [
        *(preset, "--model.path", "builtin:arithmetic", "--data.path", f"{tmp_path}/rows.jsonl"),
        *("--reward", f"{tmp_path}/reward.py:score", "--steps", "2", "--evaluation.rows", "0"),
        *("--algorithm.pretraining-path", f"{tmp_path}/texts.jsonl"),
        *("--algorithm.pretraining-coef", "0.5"),
        *("--batch.prompts", "4", "--batch.group-size", "3", "--batch.row-length", "128"),
        *("--sampling.max-prompt-tokens", "32", "--sampling.max-new-tokens", "16"),
        *("--run-dir", f"{tmp_path}/run", *flags),
    ]
    assert run.main(arguments) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [step for line in lines if "policy/loss" in (step := json.loads(line))]
    assert len(steps) == 2
    for step in steps:
        assert step["policy/pretraining_loss"] > 0
        # A row with log-probs of 0 would make the gap large.
        assert step["policy/log_prob_gap_max"] < 2e-3
    lines = (tmp_path / "run/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    written = [sample["completion"] for sample in samples if sample.get("source") == "text"]
    assert len(written) == 8
    assert {text.rstrip() for text in written} <= {text["text"] for text in texts}


def test_texts_are_refused_in_conversations_and_where_they_are_missing(tmp_path, capsys):
    texts = ["--algorithm.pretraining-coef", "0.1", "--algorithm.pretraining-path"]
    assert run.main(["mini_shell_grpo", *texts, "texts.jsonl", "--dry-run"]) == 2
    assert "single turn" in capsys.readouterr().err
    assert run.main(["arithmetic_grpo", *texts, f"{tmp_path}/none.jsonl", "--dry-run"]) == 2
    assert "none.jsonl" in capsys.readouterr().err
