"""Token log-probs against a plain computation, their memory, and the estimators of the KL."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import cost_model
from tpu_rl.losses import log_probs
from tpu_rl.losses.log_probs import k1, k2, k3, token_log_probs
from tpu_rl.models import layers
from tpu_rl.proofs import tiny
from tpu_rl.sums import tree_sum
from tpu_rl.types import PackedRows, Role

MODEL = tiny.attention_model()
POLICY = tiny.role(MODEL, "policy")
PARAMS = tiny.init_params(MODEL)


@functools.cache
def one_micro_batch() -> tuple[tiny.Rollout, PackedRows, np.ndarray, np.ndarray]:
    """(rollout, rows [R, S], slot [N, T], action_mask [N, T]); [R, S] is the whole batch."""
    data, layout = tiny.experience(tiny.rollout(), micro_batch_rows=4)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[0, 0], layout.rows(data.tokens))
    return data, rows, np.asarray(layout.slot), np.asarray(data.action_mask)


@functools.cache
def row_per_completion_logits() -> np.ndarray:
    """[N, T, V] of the policy."""
    tokens = np.asarray(one_micro_batch()[0].tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    zeros = np.zeros_like(tokens)
    hidden = jax.jit(MODEL.hidden)(PARAMS["policy"], tokens, positions, zeros + 1, zeros)
    return np.asarray(MODEL.logits(PARAMS["policy"], hidden), np.float64)


def numpy_log_probs(logits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([N, T] log-probs, [N, T] entropies): one position, one logit vector at a time."""
    expected, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for n, t in np.ndindex(tokens.shape):
        if t > 0:
            every = logits[n, t - 1] - np.log(np.sum(np.exp(logits[n, t - 1])))
            expected[n, t] = every[tokens[n, t]]
            entropy[n, t] = -np.sum(np.exp(every) * every)
    return expected, entropy


@pytest.mark.parametrize(("chunk_tokens", "temperature"), [(1, 1.0), (28, 0.5), (10_000, 2.0)])
def test_equals_plain_log_softmax_at_every_chunk_size_and_temperature(chunk_tokens, temperature):
    data, rows, slot, mask = one_micro_batch()
    logits = row_per_completion_logits() / temperature
    expected, entropies = numpy_log_probs(logits, np.asarray(data.tokens))
    compute = jax.jit(
        functools.partial(
            token_log_probs, POLICY, temperature=temperature, chunk_tokens=chunk_tokens
        )
    )
    actual = compute(PARAMS, rows)
    rounding = 4 * np.finfo(np.float32).eps * np.abs(logits).max()
    for got, plain in zip(actual, (expected, entropies), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(
            np.asarray(got).reshape(-1)[slot[mask]], plain[mask], rtol=2e-6, atol=rounding
        )
    # Without a list of actions, prompts and tool output too: every token that follows another.
    has_slot = slot >= 0
    for got, plain in zip(
        compute(PARAMS, rows.replace(actions=None)), (expected, entropies), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(got).reshape(-1)[slot[has_slot]], plain[has_slot], rtol=2e-6, atol=rounding
        )
    assert mask.sum() < has_slot.sum()


def test_what_is_no_action_or_follows_nothing_is_zero():
    _, rows, slot, mask = one_micro_batch()
    nothing_before = np.asarray((rows.positions == 0) | (rows.segment_ids == 0))
    assert nothing_before.sum() > 5
    no_action = np.ones(rows.tokens.size, bool)
    no_action[slot[mask]] = False
    compute = jax.jit(functools.partial(token_log_probs, POLICY))
    for values in compute(PARAMS, rows):
        np.testing.assert_array_equal(
            np.asarray(values).reshape(-1) == 0, no_action | nothing_before.reshape(-1)
        )
    for values in compute(PARAMS, rows.replace(actions=None)):
        np.testing.assert_array_equal(np.asarray(values) == 0, nothing_before)


def test_the_first_token_of_every_branch_follows_the_prompts_last():
    """Moving a prompt's last token moves the log-prob of each branch's first token; moving a branch
    moves no other."""
    rows = one_micro_batch()[1]
    whole = rows.replace(actions=None)  # tool output, too
    tokens, branches, segments = (
        np.asarray(x)[0] for x in (rows.tokens, rows.branch_ids, rows.segment_ids)
    )
    prompt_end = np.flatnonzero((segments == 1) & (branches == 0))[-1]
    firsts = [
        np.flatnonzero((segments == 1) & (branches == b))[0]
        for b in range(1, branches[segments == 1].max() + 1)
    ]
    assert len(firsts) > 1
    first_branch = np.flatnonzero((segments == 1) & (branches == 1))
    compute = jax.jit(
        lambda tokens: token_log_probs(POLICY, PARAMS, whole.replace(tokens=tokens)).log_probs[0]
    )

    def changed_by(slot: int) -> set[int]:
        moved = rows.tokens.at[0, slot].set((tokens[slot] + 1) % tiny.VOCABULARY)
        return set(np.flatnonzero(compute(moved) != compute(rows.tokens)))

    assert set(firsts) <= changed_by(prompt_end)
    assert changed_by(first_branch[0]) == set(first_branch)


@pytest.mark.slow
def test_gradient_equals_that_of_plain_log_softmax_at_every_chunk_size():
    data, rows, slot, mask = one_micro_batch()
    coefficients = np.where(mask, np.random.default_rng(0).normal(size=mask.shape), 0.0).astype(
        np.float32
    )
    packed = np.zeros(rows.tokens.size, np.float32)
    packed[slot[mask]] = coefficients[mask]
    packed = packed.reshape(rows.tokens.shape)

    def plain(params: tiny.Params) -> jax.Array:
        return jnp.sum(
            coefficients * tiny.plain_log_probs(MODEL, params["policy"], data.tokens, 0.7)
        )

    expected = jax.jit(jax.grad(plain))(PARAMS)["policy"]
    for role, chunk_tokens in (
        (POLICY, 12),
        (POLICY, 10_000),
        (POLICY._replace(whole_logits=True), None),
    ):

        def chunked(
            params: tiny.Params, role: Role = role, chunk_tokens: int | None = chunk_tokens
        ) -> jax.Array:
            return jnp.sum(
                packed
                * token_log_probs(role, params, rows, 0.7, chunk_tokens=chunk_tokens).log_probs
            )

        actual = jax.jit(jax.grad(chunked))(PARAMS)["policy"]
        for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * np.abs(want).max())


@pytest.mark.slow
def test_memory_of_loss_and_gradient_does_not_grow_with_vocabulary_times_sequence():
    vocabulary, width, rows, chunk_tokens = 4096, 4, 2, 128
    role = Role(
        lambda params, rows: params["embedding"][rows.tokens],
        lambda params, hidden: hidden @ params["out"],
    )

    def temporary_bytes(slots: int) -> int:
        ids = jax.ShapeDtypeStruct((rows, slots), jnp.int32)
        params = {
            "embedding": jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
            "out": jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
        }

        def loss(params: tiny.Params, rows: PackedRows) -> jax.Array:
            values = token_log_probs(
                role, params, rows, 0.7, entropy_gradient=True, chunk_tokens=chunk_tokens
            )
            return jnp.sum(values.log_probs + values.entropy)

        compiled = jax.jit(jax.value_and_grad(loss)).lower(params, PackedRows(*[ids] * 7)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(256), temporary_bytes(2048)
    logits = rows * vocabulary * 4
    assert short > chunk_tokens * vocabulary * 4, (
        "not even one chunk of logits: this measures something else"
    )
    assert long - short < 0.05 * (2048 - 256) * logits, (short, long)
    assert long < 0.15 * 2048 * logits, (long, 2048 * logits)


# --- log_probs_of_logits and the KL estimators: exact on a categorical ---


LOGITS = jnp.array([0.3, -1.2, 0.8, 0.0])
OTHER = jnp.array([-0.4, 0.5, 0.1, -0.9])
OLD = jnp.array([0.9, 0.2, -0.7, 0.4])


def test_of_logits_by_hand():
    chosen, entropy = log_probs.log_probs_of_logits(
        jnp.log(jnp.array([[0.5, 0.25, 0.25]])), jnp.array([1])
    )
    np.testing.assert_allclose(chosen, np.log([0.25]), rtol=1e-6)
    np.testing.assert_allclose(entropy, [1.5 * np.log(2)], rtol=1e-6)


def test_of_logits_of_large_logits_stays_finite():
    chosen, entropy = log_probs.log_probs_of_logits(jnp.array([[1e4, 0.0]]), jnp.array([1]))
    np.testing.assert_array_equal(chosen, [-1e4])
    np.testing.assert_array_equal(entropy, [0.0])


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_of_logits_has_the_bits_of_the_sampler(exact):
    """The sampler gathers from logits below their maximum; ids that are no tokens are masked."""
    logits = 5 * jax.random.normal(jax.random.key(0), (8, 203))
    logits = logits.at[:, 200:].set(layers.MASKED)
    tokens = jax.random.randint(jax.random.key(1), (8,), 0, 200)
    below_max = logits - logits.max(-1, keepdims=True)
    total = (tree_sum if exact else lambda x: x.sum(-1))(jnp.exp(below_max))
    chosen, entropy = log_probs.log_probs_of_logits(logits, tokens, exact)
    np.testing.assert_array_equal(chosen, below_max[jnp.arange(8), tokens] - jnp.log(total))
    plain = np.asarray(logits[:, :200], np.float64)
    plain -= np.log(np.exp(plain).sum(-1, keepdims=True))
    np.testing.assert_allclose(entropy, -(np.exp(plain) * plain).sum(-1), rtol=1e-5)


@needs_libtpu
def test_a_tpu_holds_one_array_of_the_logits():
    device = tpu_devices("v5e:2x2")[0]
    place = SingleDeviceSharding(device)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    def logits(params, hidden):
        return jnp.einsum("...d,vd->...v", hidden, params, preferred_element_type=jnp.float32)

    role = Role(lambda params, rows: params, logits, whole_logits=True)

    def compiled(tokens, chunk_tokens):
        def loss(hidden, matrix, tokens):
            rows = PackedRows(*(tokens,) * 6)
            values = log_probs.log_probs_of_hidden(
                role, matrix, hidden, rows, chunk_tokens=chunk_tokens
            )
            return values.log_probs.sum(), values.entropy

        arguments = shape(1, tokens, 128), shape(131072, 128), shape(1, tokens, dtype=jnp.int32)
        program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*arguments).compile()
        operations = cost_model.operations(cost_model.read(program.as_text() or ""))
        return program.memory_analysis(), cost_model.total_flops(operations)

    stats, flops = compiled(512, None)
    assert stats is not None
    assert stats.temp_size_in_bytes < 1.2 * 4 * 512 * 131072
    # Logits and the gradient of states. In two chunks, logits are computed twice.
    product = 2 * 512 * 128 * 131072
    assert 2 * product <= flops < 2.1 * product
    assert 3 * product <= compiled(512, 256)[1] < 3.1 * product


def test_estimators_by_hand():
    policy, reference = jnp.log(0.5), jnp.log(0.25)
    np.testing.assert_allclose(k1(policy, reference), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(k2(policy, reference), np.log(2) ** 2 / 2, rtol=1e-6)
    np.testing.assert_allclose(k3(policy, reference), -0.5 + np.log(2), rtol=1e-6)


def kl(logits: jax.Array, other: jax.Array) -> jax.Array:
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def expected_loss(estimator, logits: jax.Array, sampled_from: jax.Array) -> jax.Array:
    """The loss that samples estimate: the distribution that they come from is not
    differentiated."""
    return jnp.sum(
        jax.nn.softmax(sampled_from)
        * estimator(jax.nn.log_softmax(logits), jax.nn.log_softmax(OTHER))
    )


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    np.testing.assert_allclose(
        expected_loss(estimator, LOGITS, LOGITS), kl(LOGITS, OTHER), rtol=1e-5
    )


def test_k2_is_biased():
    assert abs(expected_loss(k2, LOGITS, LOGITS) / kl(LOGITS, OTHER) - 1) > 0.02


def test_k3_is_never_negative():
    differences = jnp.linspace(-5, 5, 101)
    assert jnp.all(k3(differences, jnp.zeros(101)) >= 0)
    assert jnp.any(k1(differences, jnp.zeros(101)) < 0)


def test_gradients_of_the_estimators_as_losses():
    """On policy: k1's vanishes, k2's is the KL's, k3's is that of the reversed KL."""
    forward = jax.grad(kl)(LOGITS, OTHER)
    backward = jax.grad(kl, argnums=1)(OTHER, LOGITS)
    assert jnp.max(jnp.abs(forward - backward)) > 0.1

    def gradient(estimator) -> jax.Array:
        return jax.grad(lambda logits: expected_loss(estimator, logits, LOGITS))(LOGITS)

    np.testing.assert_allclose(gradient(k1), np.zeros(4), atol=1e-6)
    np.testing.assert_allclose(gradient(k2), forward, atol=1e-6)
    np.testing.assert_allclose(gradient(k3), backward, atol=1e-6)
