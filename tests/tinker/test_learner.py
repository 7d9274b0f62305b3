"""Losses, gradients and steps of the server against the same computed without its programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import CONFIGS
from tpu_rl import models
from tpu_rl.commands import compose
from tpu_rl.commands.config import MeshConfig
from tpu_rl.sampler import TurnRequest
from tpu_rl.serving.protocol import ApiError
from tpu_rl.tinker import losses, sampling
from tpu_rl.tinker.learner import Learner, LoraSpec
from tpu_rl.tinker.wire import Datum

pytestmark = pytest.mark.slow
SPEC = LoraSpec(3, seed=5)
ADAM = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-9}
ADAM |= {"weight_decay": 0.01, "grad_clip_norm": 0.5}


@pytest.fixture(scope="module")
def learner():
    model = models.from_config({**CONFIGS["llama3"], "num_hidden_layers": 1})
    mesh = compose.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        yield Learner(model, model.init(jax.random.key(1)), mesh, 8, 64)


def adapter_of(learner, seed=0, spec=SPEC):
    rng = np.random.default_rng(seed)
    own = learner.cut(spec, learner.create(spec).params)
    own = jax.tree.map(lambda x: x + 0.03 * rng.normal(size=x.shape).astype(np.float32), own)
    return learner.adapter_of(spec, own), own


def texts_of(trees):
    """Return token ids of texts that stand alone, or of texts that begin alike."""
    rng = np.random.default_rng(2)
    one, other = (rng.integers(0, 131, n).astype(np.int32) for n in (40, 23))
    if not trees:
        return [one[:5], one, other[:17]]
    ends = [rng.integers(0, 131, n).astype(np.int32) for n in (3, 9, 9)]
    # Branches of two prompts, out of order; a branch of a branch; a prefix; the same text twice.
    first, second, third = (np.concatenate([one[:30], end]) for end in ends)
    deeper = np.concatenate([first, ends[1]])
    return [first, other, one[:30], second, deeper, other[:20], first, third]


def data_of(name, width=0, trees=False):
    rng = np.random.default_rng(2)
    data = []
    for text in texts_of(trees):
        length = len(text)
        shape = (length, width) if width else (length,)
        inputs = {"target_tokens": rng.integers(0, 131, shape)}
        if name == "cross_entropy":
            inputs["weights"] = rng.normal(size=shape).astype(np.float32)
        else:
            inputs["logprobs"] = -rng.random(length).astype(np.float32) * 6
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
        data.append(Datum(text, inputs))
    return data


def local_loss(name, learner, own, data):
    """Return the loss by its formula, one sequence at a time."""
    model = learner.model_of(SPEC)
    params = models.join(learner.base_params, own)
    total = 0.0
    for datum in data:
        given = datum.inputs
        logits = models.apply(model, params, jnp.asarray(datum.tokens)[None])[0]
        targets = jnp.asarray(given["target_tokens"]).reshape(len(datum.tokens), -1)
        x = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, -1)
        if name == "cross_entropy":
            total -= (x * given["weights"].reshape(x.shape)).sum()
            continue
        x, a, q = x[:, 0], given["advantages"], given["logprobs"]
        ratio = jnp.exp(x - q)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        mean = jnp.exp((x - q).mean())
        of_token = jax.lax.stop_gradient(mean) * jnp.exp(x - jax.lax.stop_gradient(x))
        formulas = {
            "importance_sampling": -ratio * a,
            "ppo": -jnp.minimum(ratio * a, clipped * a),
            "cispo": -jax.lax.stop_gradient(clipped) * a * x,
            "dro": -(a * x - 0.025 * (x - q) ** 2),
            "gspo": -jnp.minimum(of_token * a, jnp.clip(of_token, 1 - 3e-4, 1 + 4e-4) * a),
        }
        total += formulas[name].sum()
    return total


CASES = [*((name, 0) for name in losses.LOSSES), ("cross_entropy", 3)]
ALONE = [
    pytest.param(*case, False, marks=[] if case == ("cross_entropy", 0) else pytest.mark.nightly)
    for case in CASES
]


@pytest.mark.parametrize(("name", "width", "trees"), [*ALONE, *((*case, True) for case in CASES)])
def test_losses_and_gradients_are_those_of_their_formulas(learner, name, width, trees):
    adapter, own = adapter_of(learner)
    data = data_of(name, width, trees)
    beta = losses.check(name, {}, data, 131)
    for _ in range(2):
        outputs = learner.backward(adapter, name, {}, beta, data)
    compute = jax.jit(jax.value_and_grad(lambda own: local_loss(name, learner, own, data)))
    loss, gradient = compute(own)
    assert outputs.loss == pytest.approx(float(loss), rel=1e-5)
    forward = learner.forward(learner.snapshot(adapter), name, {}, beta, data)
    assert forward.loss == pytest.approx(outputs.loss, rel=1e-6)
    # Two passes add up.
    found = learner.cut(SPEC, adapter.gradients)
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(one, 2 * other, atol=2e-5 * scale)


def test_steps_are_those_of_torch(learner):
    torch = pytest.importorskip("torch")
    adapter, own = adapter_of(learner)
    leaves = [torch.nn.Parameter(torch.tensor(leaf)) for leaf in jax.tree.leaves(own)]
    optimizer = torch.optim.AdamW(leaves, 0.1, (0.9, 0.95), 1e-9, 0.01)
    data = data_of("cross_entropy")
    for _ in range(3):
        learner.backward(adapter, "cross_entropy", {}, 0.0, data)
        gradient = jax.tree.leaves(learner.cut(SPEC, adapter.gradients))
        for leaf, part in zip(leaves, gradient, strict=True):
            leaf.grad = torch.tensor(part)
        torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        optimizer.step()
        learner.step(adapter, ADAM)
    for leaf, part in zip(leaves, jax.tree.leaves(learner.cut(SPEC, adapter.params)), strict=True):
        np.testing.assert_allclose(part, leaf.detach().numpy(), atol=2e-5)
    # What the largest rank has beyond that of the client is still zero.
    padded = learner.padded(learner.cut(SPEC, adapter.params))
    for one, other in zip(jax.tree.leaves(padded), jax.tree.leaves(adapter.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_numbers_that_are_not_finite_change_nothing(learner):
    adapter, _ = adapter_of(learner)
    [datum, *_] = data_of("ppo")
    datum.inputs["logprobs"] = np.full(5, -500.0, np.float32)
    datum.inputs["advantages"] = np.full(5, -1.0, np.float32)
    with pytest.raises(ApiError, match="not a finite number"):
        learner.backward(adapter, "ppo", {}, 0.0, [datum])
    assert adapter.gradients is None
    with pytest.raises(ApiError, match="no gradient"):
        learner.step(adapter, ADAM)


class Characters:
    """The ids of the model, as a tokenizer."""

    vocab_size = 131
    pad_id = 0


def test_rows_of_several_adapters_are_what_each_is_alone(learner):
    specs = [LoraSpec(rank, seed=rank) for rank in (1, 4, 8)]
    held = {n: learner.snapshot(adapter_of(learner, n, spec)[0]) for n, spec in enumerate(specs)}
    make = sampling.sampler_factory(learner, Characters(), lambda name: held[name], 4)
    sampler = make(sampling.Decoding())

    def write(names):
        for name in names:
            key = np.array([name, 9], np.uint32)
            sampler.submit([TurnRequest(name, [3, 4, 5], key, 20, name)])
        turns = []
        while not sampler.is_idle:
            turns += sampler.step()
        for name in names:
            sampler.close(name)
        return {turn.conversation: turn for turn in turns}

    alone = {name: write([name])[name] for name in held}
    together = write(list(held))
    for name, turn in alone.items():
        assert turn.tokens == together[name].tokens
        np.testing.assert_allclose(turn.log_probs, together[name].log_probs, atol=2e-5)
    assert len({tuple(turn.tokens) for turn in alone.values()}) == 3
