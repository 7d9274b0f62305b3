"""Usage of experts during training, and the balance loss, against plain sums."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.fixtures.decoders import LENGTH, plain, tiny, tokens_of
from tests.fixtures.runs import digest, rows_of
from tpu_rl import models, tokenizers
from tpu_rl.commands import config, run
from tpu_rl.commands.checks import preflight
from tpu_rl.errors import InputError
from tpu_rl.models import layers
from tpu_rl.models.decoder import Decoder, packed_context
from tpu_rl.models.layers import TokenIndex
from tpu_rl.models.moe import router
from tpu_rl.tasks import arithmetic
from tpu_rl.train import update_step
from tpu_rl.types import Algorithm, Metrics, PackedRows, Sum

FAMILY, COEFFICIENT = "olmoe", 0.3
MODEL = tiny(FAMILY).model
PARAMS = {"policy": tiny(FAMILY).params}
ROLE = models.role(MODEL, lambda params: params["policy"])


def batch(rows=4):
    """Return rows [rows, LENGTH], each with padding after its first tokens."""
    positions, segments, branches = plain(rows)
    segments = jnp.where(jnp.arange(LENGTH)[None] < 6 + 2 * jnp.arange(rows)[:, None], segments, 0)
    return PackedRows(tokens_of((rows, LENGTH)), positions, segments, branches, segments, positions)


def loss(params, rows) -> tuple[jax.Array, Metrics]:
    hidden = ROLE.hidden(params, rows)
    weight = (rows.segment_ids > 0)[..., None]
    return jnp.sum(jnp.where(weight, jnp.sin(hidden), 0.0)), {
        "a/b": Sum(jnp.zeros(()), jnp.ones(()))
    }


ALGORITHM = Algorithm(lambda experience, params, state: (experience, state), loss)


def usage_of(params, rows) -> router.Usage:
    """Return the usage that the module itself returns."""
    index = jnp.broadcast_to(jnp.arange(LENGTH)[None, :], rows.tokens.shape)
    until = layers.visible_until(rows.segment_ids, rows.branch_ids)
    slots = TokenIndex(index, rows.positions, rows.segment_ids, until)
    seen = packed_context(MODEL.config, slots)
    out: Any = Decoder(MODEL.config).apply({"params": params["policy"]}, rows.tokens, None, seen)
    return out[2]


def updated(coefficient, micro_batches):
    """Return params after one step of gradient descent with rate 1, and metrics."""
    probe = models.probe({"policy": MODEL}, coefficient)
    assert probe is not None
    optimizer = optax.sgd(1.0)
    params = jax.tree.map(jnp.copy, PARAMS)
    state = update_step.init_train_state(params, ALGORITHM, optimizer, lambda path: True)
    step = update_step.make_update_step(
        ALGORITHM, optimizer, lambda step: 1.0, lambda path: True, probe=probe
    )
    cut = jax.tree.map(lambda leaf: leaf.reshape(micro_batches, -1, LENGTH), batch())
    state, metrics = step(state, cut)
    return state.params, {
        name: float(value) for name, value in update_step.reduce_metrics(metrics).items()
    }


def assert_close(first, second):
    def one(mine, other):
        np.testing.assert_allclose(mine, other, atol=2e-5 * max(1.0, float(jnp.abs(other).max())))

    jax.tree.map(one, first, second)


@pytest.mark.nightly
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_balance_has_the_gradient_of_a_loss_term(micro_batches):
    def whole(params):
        found = usage_of(params, batch())
        return loss(params, batch())[0] + COEFFICIENT * router.balance(found), found

    (value, found), gradient = jax.jit(jax.value_and_grad(whole, has_aux=True))(PARAMS)
    params, metrics = updated(COEFFICIENT, micro_batches)
    assert_close(params, jax.tree.map(lambda leaf, g: leaf - g, PARAMS, gradient))
    assert metrics["optim/loss"] == pytest.approx(float(value), rel=1e-5)
    assert metrics["router/balance"] == pytest.approx(float(router.balance(found)), rel=1e-5)


@pytest.mark.nightly
def test_measuring_usage_does_not_change_the_update():
    params, metrics = updated(0.0, 2)
    gradient = jax.jit(jax.grad(lambda params: loss(params, batch())[0]))(PARAMS)
    assert_close(params, jax.tree.map(lambda leaf, g: leaf - g, PARAMS, gradient))
    found, config = jax.jit(usage_of)(PARAMS, batch()), MODEL.config.moe
    tokens = float((batch().segment_ids > 0).sum())
    assert found.tokens.tolist() == [tokens] * len(MODEL.config.layer_types)
    np.testing.assert_allclose(found.expert_tokens.sum(-1), tokens * config.experts_per_token)
    np.testing.assert_allclose(found.probability.sum(-1), tokens, rtol=1e-5)
    assert metrics["router/most_used"] == pytest.approx(float(found.expert_tokens.max()) / tokens)
    assert metrics["router/least_used"] == pytest.approx(float(found.expert_tokens.min()) / tokens)
    assert 0 < metrics["router/entropy"] < np.log(config.num_experts)
    assert metrics["router/entropy"] == pytest.approx(float(found.entropy.mean()) / tokens)


def test_padding_is_not_counted():
    rows = batch()
    other = dataclasses.replace(rows, tokens=jnp.where(rows.segment_ids > 0, rows.tokens, 5))
    assert_close(jax.jit(usage_of)(PARAMS, other), jax.jit(usage_of)(PARAMS, rows))


def test_models_without_experts_have_no_probe():
    assert models.probe({"policy": tiny("llama3").model}, 0.0) is None


# --- runs ---


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A small random mixture with the arithmetic task's alphabet."""
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    mixture = {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
    model = models.from_config({"vocab_size": tokenizer.vocab_size} | sizes | mixture)
    path = tmp_path_factory.mktemp("model")
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    return str(path)


def small_run(model_dir, run_dir, *flags):
    """Take a few steps of GRPO."""
    small = [
        *("--batch.prompts", "8", "--batch.group-size", "2", "--batch.row-length", "128"),
        *("--evaluation.rows", "0", "--model.path", model_dir, "--run-dir", str(run_dir)),
    ]
    # A tiny random model may earn no reward in so few steps. Lengths of completions always differ.
    reward = run_dir.parent / "length.py"
    reward.write_text(
        "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    small += ["--reward", f"{reward}:score"]
    assert run.main(["arithmetic_grpo", *small, *flags]) == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ["--model.router-balance", "0.01", "--rollout.replay-routing"],
        ["--model.lora.rank", "2"],
    ],
)
def test_runs_log_usage_of_experts(flags, model_dir, tmp_path):
    small_run(model_dir, tmp_path / "run", "--steps", "2", *flags)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if "optim/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert 0 <= row["router/least_used"] < 0.5 < row["router/most_used"] <= 1
        assert row["router/balance"] + 1e-5 >= 2
        assert 0 < row["router/entropy"] < np.log(4)
        assert row["policy/log_prob_gap_max"] < 5e-5


@pytest.mark.nightly
def test_a_run_that_replays_stored_routing_resumes_to_the_same_bits(model_dir, tmp_path):
    """The batch that waits in the checkpoint has its routing."""
    flags = ("--rollout.replay-routing", "--batch.staleness", "1", "--checkpoint.interval", "1")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    small_run(model_dir, whole, *flags, "--steps", "3")
    small_run(model_dir, stopped, *flags, "--steps", "1")
    small_run(model_dir, stopped, *flags, "--steps", "3")
    assert rows_of(stopped) == rows_of(whole)
    assert digest(stopped) == digest(whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.router-balance", "0.01"], "no model that learns is a mixture"),
        (["--rollout.replay-routing"], "no routing to replay"),
    ],
)
def test_flags_for_mixtures_are_refused_without_experts(flags, message):
    wanted = config.parse(["arithmetic_grpo", *flags])
    with pytest.raises(InputError, match=message):
        preflight.check(wanted)
