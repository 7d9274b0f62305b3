"""Linear attention by the gated delta rule: chunks against the rule itself, token by token."""

import functools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import CONFIGS, LENGTH, plain, tiny, tokens_of
from tests.fixtures.runs import rows_of
from tpu_rl import models, tokenizers
from tpu_rl.algos import QSharpConfig
from tpu_rl.commands import config, run
from tpu_rl.commands.checks import preflight
from tpu_rl.errors import InputError
from tpu_rl.models import kv_cache
from tpu_rl.models.attention import delta_rule
from tpu_rl.models.attention.delta_rule import Sequences
from tpu_rl.models.layers import TokenIndex
from tpu_rl.sampler.guided_policy import guide
from tpu_rl.tasks import arithmetic
from tpu_rl.train import packing

ROWS, TOKENS, HEADS, KEY_DIM, VALUE_DIM = 2, 150, 2, 8, 6
BEGINS = ((0,), (0, 5, 64, 130))
"""Tokens that begin a sequence, for each row: within chunks and at the border of two."""


def rule_inputs():
    """Return queries, keys, values, decays, rates and states. Some keys repeat, and some decays are
    so strong that nothing is left after one token."""
    noise = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(noise.standard_normal(shape, np.float32))

    shape = (ROWS, TOKENS, HEADS)
    query, key = (delta_rule.normalized(normal(*shape, KEY_DIM)) for _ in range(2))
    key = key.at[:, 20:40].set(key[:, 20:21])
    decay = -jnp.exp(2 * normal(*shape) - 2)
    rate = jax.nn.sigmoid(normal(*shape)).at[:, 20:40].set(1.0)
    state = normal(ROWS, HEADS, KEY_DIM, VALUE_DIM)
    return query, key, normal(*shape, VALUE_DIM), decay.at[:, 70:90].set(-60.0), rate, state


def numbers_of(first):
    """Return `Sequences.number` of rows whose sequences begin at `BEGINS`, the first one being
    `first`."""
    begins = np.zeros((ROWS, TOKENS), np.int32)
    for row, places in enumerate(BEGINS):
        begins[row, list(places)] = 1
    return jnp.asarray(begins.cumsum(1) - 1 + first)


def token_by_token(query, key, value, decay, rate, state, number):
    """Return what tokens read, and the state after each of them, by a Python loop in NumPy."""
    parts = [np.asarray(part, np.float64) for part in (query, key, value, decay, rate)]
    start = np.asarray(state, np.float64)
    reads = np.zeros((ROWS, TOKENS, HEADS, VALUE_DIM))
    states = np.zeros((ROWS, TOKENS, *start.shape[1:]))
    for row in range(ROWS):
        for head in range(HEADS):
            memory, before = start[row, head], 0
            for place in range(TOKENS):
                q, k, v, g, b = (part[row, place, head] for part in parts)
                if number[row, place] != before:
                    memory, before = np.zeros_like(memory), number[row, place]
                memory = np.exp(g) * memory
                memory = memory + b * np.outer(k, v - memory.T @ k)
                reads[row, place, head] = memory.T @ q
                states[row, place, head] = memory
    return reads, states


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 16])
def test_chunks_equal_the_rule_token_by_token(chunk):
    *parts, state = rule_inputs()
    commit = jnp.array([100, 0])
    sequences = Sequences(numbers_of(0), jnp.zeros((ROWS, TOKENS), bool), None, commit)
    in_chunks = jax.jit(functools.partial(delta_rule.in_chunks, chunk=chunk))
    read, committed = in_chunks(*parts, state=state, sequences=sequences)
    expected, states = token_by_token(*parts, state=state, number=np.asarray(sequences.number))
    np.testing.assert_allclose(read, expected, atol=1e-5)
    np.testing.assert_allclose(committed[0], states[0, 99], atol=1e-5)
    np.testing.assert_array_equal(committed[1], state[1])

    # Without a cache no sequence continues a state.
    packed = Sequences(numbers_of(1), sequences.is_branch)
    read, committed = in_chunks(*parts, state=None, sequences=packed)
    assert committed is None
    expected, _ = token_by_token(*parts, state=0 * state, number=np.asarray(packed.number))
    np.testing.assert_allclose(read, expected, atol=1e-5)


def test_one_token_equals_the_rule():
    *parts, state = rule_inputs()
    expected, states = token_by_token(*parts, state=state, number=np.zeros((ROWS, TOKENS)))
    read, after = delta_rule.recurrence(*(part[:, 0] for part in parts), state=state)
    np.testing.assert_allclose(read, expected[:, 0], atol=1e-6)
    np.testing.assert_allclose(after, states[:, 0], atol=1e-6)


@pytest.mark.slow
def test_gradients_of_chunks_equal_those_token_by_token():
    *parts, state = rule_inputs()
    number = numbers_of(1)
    sequences = Sequences(number, jnp.zeros((ROWS, TOKENS), bool))

    def in_chunks(*parts):
        return jnp.sum(jnp.sin(delta_rule.in_chunks(*parts, state=None, sequences=sequences)[0]))

    def sequentially(*parts):
        def step(memory, token):
            *token, begins = token
            memory = jnp.where(begins[:, None, None, None], 0.0, memory)
            read, memory = delta_rule.recurrence(*token, state=memory)
            return memory, read

        begins = jnp.diff(number, axis=1, prepend=0) > 0
        tokens = tuple(part.swapaxes(0, 1) for part in (*parts, begins))
        return jnp.sum(jnp.sin(jax.lax.scan(step, jnp.zeros_like(state), tokens)[1]))

    arguments = (0, 1, 2, 3, 4)
    found = jax.jit(jax.grad(in_chunks, arguments))(*parts)
    expected = jax.jit(jax.grad(sequentially, arguments))(*parts)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_the_convolution_sees_no_other_sequence():
    x = jnp.arange(1.0, 8.0).reshape(1, 7, 1, 1)
    taps = jnp.array([[[100.0, 10.0, 1.0]]])
    number = jnp.array([[0, 0, 0, 1, 1, 1, 1]])
    sequences = Sequences(number, number > 9)
    past = jnp.array([8.0, 9.0]).reshape(1, 2, 1, 1)
    expected = jnp.array([891.0, 912.0, 123.0, 4.0, 45.0, 456.0, 567.0])
    found = delta_rule.convolve(x, taps, past, sequences)
    np.testing.assert_allclose(found.ravel(), jax.nn.silu(expected), rtol=1e-6)
    for commit, latest in ((0, [8, 9]), (1, [9, 1]), (7, [6, 7])):
        kept = delta_rule.latest_inputs(x, past, jnp.array([commit]))
        assert kept.ravel().tolist() == latest


@pytest.mark.slow
def test_decoding_token_by_token_equals_whole_sequences():
    """From an empty cache, whose states of an earlier text are still there; a row of a free slot
    keeps its own."""
    model, params, logits, _ = tiny("qwen3_5")
    tokens = tokens_of((3, LENGTH))
    expected = jax.nn.log_softmax(logits(params, tokens, *plain(3)))
    extend = jax.jit(models.policy(model).extend)
    cache = models.policy(model).init_cache(params, 3, LENGTH)
    states = jax.tree.map(lambda leaf: leaf + 1, cache["linear"])
    cache = {**cache, "linear": states}
    for place in range(LENGTH):
        at = jnp.full((3, 1), place)
        is_live = jnp.array([True, True, False])
        branch = jnp.where(is_live, 0, -1)[:, None]
        step = (tokens[:, place][:, None], at, branch, is_live.astype(jnp.int32))
        found, cache = extend(params, cache, *step)
        found = jax.nn.log_softmax(found[:2, 0])
        np.testing.assert_allclose(found, expected[:2, place], atol=2e-5)
    assert cache["lengths"].tolist() == [LENGTH, LENGTH, 0]
    assert model.max_rollback == 0
    assert cache["linear"][kv_cache.STATE].shape == (2, 3, 4, 6, 10)


@pytest.mark.slow
def test_branches_of_a_prompt_give_no_number():
    """Their states would begin with that of the prompt, which is not kept."""
    model, params, logits, extend = tiny("qwen3_5")
    tokens = tokens_of((3, LENGTH))
    positions, segments, branches = plain(3)
    # A first branch alone continues its prompt.
    branches = branches.at[:2, 5:].set(1).at[0, 9:].set(2)
    out = np.asarray(logits(params, tokens, positions, segments, branches))
    assert np.isnan(out[0, 9:]).all()
    assert np.isfinite(out[1:]).all()

    cache = models.policy(model).init_cache(params, 3, LENGTH + 2)
    trunk = jnp.zeros((3, 11), jnp.int32)
    _, cache = extend(params, cache, tokens[:, :11], positions[:, :11], trunk, jnp.full(3, 11))
    candidates = jnp.broadcast_to(jnp.array([[1, 2]]), (3, 2))
    none = jnp.zeros(3, jnp.int32)
    looked, _ = extend(params, cache, tokens[:, :2], trunk[:, :2] + 11, candidates, none)
    assert np.isnan(np.asarray(looked[:, 1])).all()


# --- runs ---


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Return a small random hybrid with the arithmetic task's alphabet."""
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512}
    model = models.from_config(CONFIGS["qwen3_5"] | sizes)
    path = tmp_path_factory.mktemp("model")
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    return str(path)


@pytest.mark.nightly
def test_a_run_of_grpo_samples_and_learns(model_dir, tmp_path):
    """The sampler decodes from states token by token, and the update computes them in chunks."""
    reward = tmp_path / "length.py"
    lengths = "[float(len(completion)) for completion in completions]"
    reward.write_text(f"def score(completions, **columns):\n    return {lengths}\n")
    flags = [
        *("--batch.prompts", "4", "--batch.group-size", "2", "--batch.row-length", "128"),
        *("--evaluation.rows", "0", "--model.path", model_dir, "--run-dir", str(tmp_path / "run")),
        *("--steps", "2", "--batch.no-share-prefixes", "--reward", f"{reward}:score"),
    ]
    assert run.main(["arithmetic_grpo", *flags]) == 0
    rows = [row for row in rows_of(tmp_path / "run") if "optim/loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["policy/log_prob_gap_max"] < 1e-4
        assert row["optim/grad_norm"] > 0


@pytest.mark.nightly
def test_a_run_of_dpo_learns_from_pairs_that_share_no_prompt(model_dir, tmp_path, capsys):
    """A packed row has room for both prompts and both completions of all pairs but one."""
    rows = [
        {"prompt": f"{a}+{b}=" * 4, "chosen": str(a + b), "rejected": str(a + b + 1) * 20}
        for a in range(8)
        for b in range(2 if a else 4)
    ]
    rows[0]["prompt"] *= 2
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        *("--data.path", str(path), "--model.path", model_dir, "--run-dir", str(tmp_path / "run")),
        *("--steps", "2", "--batch.prompts", "4", "--batch.row-length", "80"),
        *("--sampling.max-prompt-tokens", "36", "--sampling.max-new-tokens", "42"),
        *("--evaluation.rows", "4", "--model.dtype", "float32", "--batch.no-share-prefixes"),
    ]
    assert run.main(["dpo", *flags]) == 0
    assert "1 of 18 pairs dropped: they are too long" in capsys.readouterr().err
    learned = [row for row in rows_of(tmp_path / "run") if "optim/loss" in row]
    assert len(learned) == 2
    assert all(row["optim/grad_norm"] > 0 for row in learned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (["arithmetic_grpo"], "--batch.share-prefixes"),
        (["arithmetic_grpo", "--sampling.speculation.tokens", "4"], "speculation.tokens"),
        (["arithmetic_grpo", "--model.exact-sampling"], "--model.exact-sampling"),
        (["arithmetic_grpo", "--mesh.context", "2", "--batch.row-length", "512"], "--mesh.context"),
    ],
)
def test_what_needs_an_earlier_state_is_refused(flags, where, model_dir):
    """Before a device is claimed."""
    shares = [] if where == "--batch.share-prefixes" else ["--batch.no-share-prefixes"]
    wanted = config.parse([*flags, "--model.path", model_dir, *shares])
    with pytest.raises(InputError, match="a model with linear attention and") as refused:
        preflight.check(wanted)
    assert where in str(refused.value)


def test_q_sharp_is_refused():
    wanted = config.parse(["arithmetic_grpo", "--batch.no-share-prefixes"])
    wanted = replace(wanted, algorithm=QSharpConfig())
    with pytest.raises(InputError, match="linear attention and the --algorithm Q#"):
        wanted.require_fit("a model with linear attention")


def test_a_policy_guided_by_a_recurrent_q_is_refused():
    policy = models.policy(tiny("qwen3_5").model)
    with pytest.raises(InputError, match="V-type q cannot have linear attention"):
        guide(policy, policy, lambda *_: None, 4, "own")


def test_rows_of_a_group_stand_alone_without_shared_prefixes():
    mask = np.zeros((3, 5), bool)
    mask[:, 3:] = True
    cut: dict[str, Any] = {"row_length": 16, "micro_batch_rows": 1}
    shared = packing.assign_slots(mask, np.zeros(3, int), **cut)
    alone = packing.assign_slots(mask, np.zeros(3, int), share_prefixes=False, **cut)
    assert int((shared.source >= 0).sum()) == 3 + 3 * 2
    np.testing.assert_array_equal(alone.source.ravel(), [*range(15), -1])
    np.testing.assert_array_equal(alone.visible_until.ravel(), [5] * 5 + [10] * 5 + [15] * 5 + [16])
    index = jnp.arange(16)[None]
    tokens = TokenIndex(index, index, index, alone.visible_until.reshape(1, 16))
    sequences = delta_rule.packed_sequences(tokens)
    np.testing.assert_array_equal(sequences.number[0], [1] * 5 + [2] * 5 + [3] * 5 + [4])
    assert not sequences.is_branch.any()
    until = shared.visible_until.reshape(1, 16)
    is_branch = delta_rule.packed_sequences(TokenIndex(index, index, index, until)).is_branch
    np.testing.assert_array_equal(is_branch[0], [0] * 5 + [1] * 4 + [0] * 7)
