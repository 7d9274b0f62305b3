"""Mixtures of experts against a dense computation of all experts, on one and several devices."""

import functools
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.decoders import CONFIGS, LENGTH, plain, tiny, tokens_of
from tests.fixtures.mixtures import CHOSEN, COUNT, INNER, SWIGLU, case, on_four_devices
from tests.fixtures.several import require_same_step
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import cost_model, models, tokenizers
from tpu_rl.commands import roles
from tpu_rl.errors import InputError
from tpu_rl.models import LoraConfig
from tpu_rl.models.config import EXPERT_MATRICES, WEIGHT_AXES, MoeConfig
from tpu_rl.models.moe import experts
from tpu_rl.proofs.tiny import plain_log_probs
from tpu_rl.sampler import SamplerConfig, sample
from tpu_rl.train import sharding


def dense(x, logits, matrices, config):
    """Compute `experts.mixture` with every expert processing every token."""
    probabilities = jax.nn.softmax(logits)
    threshold = jnp.sort(probabilities, axis=-1)[..., -config.experts_per_token, None]
    weights = jnp.where(probabilities >= threshold, probabilities, 0.0)
    if config.normalize_weights:
        weights /= weights.sum(-1, keepdims=True)
    gate, up, down = (
        one.weight if one.a is None else one.weight + one.a @ one.b for one in matrices
    )
    biases = [jnp.zeros(1) if one.bias is None else one.bias for one in matrices]
    with jax.numpy_rank_promotion("allow"):
        gate, up = (
            jnp.einsum("btd,edf->btef", x, matrix) + bias
            for matrix, bias in zip((gate, up), biases[:2], strict=True)
        )
        each = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, down) + biases[2]
    return jnp.einsum("bte,bted->btd", weights, each)


def routed(x, logits, matrices, config):
    return experts.mixture(x, experts.route(config, logits), matrices, SWIGLU)


def value_and_gradients(function, config, *arguments):
    """Return outputs, and gradients of a sum in which each output has another weight."""

    def total(*arguments):
        out = function(*arguments, config)
        return jnp.sum(
            out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        ), out

    (_, out), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arguments)
    return out, gradients


def assert_close(first, second):
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, float(jnp.abs(other).max())))


@pytest.mark.slow
@pytest.mark.parametrize("renormalized", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_mixture_is_the_weighted_sum_of_each_tokens_experts(renormalized, rank):
    config = MoeConfig(COUNT, CHOSEN, INNER, renormalized)
    arguments = case(rank=rank, bias=rank > 0)
    assert_close(
        value_and_gradients(routed, config, *arguments),
        value_and_gradients(dense, config, *arguments),
    )


@pytest.mark.slow
@pytest.mark.parametrize("renormalized", [True, False])
def test_replay_uses_the_given_experts_with_weights_of_the_router(renormalized):
    config = MoeConfig(COUNT, CHOSEN, INNER, renormalized)
    _, logits, _ = case()

    def weights(logits, replayed):
        return experts.route(config, logits, replayed=replayed).weights

    def with_gradient(replayed):
        gain = 1 + jnp.arange(CHOSEN, dtype=jnp.float32)[None, None]
        gradient = jax.grad(lambda logits: (gain * weights(logits, replayed)).sum())(logits)
        return weights(logits, replayed), gradient

    chosen = experts.route(config, logits).experts
    for one, other in zip(with_gradient(None), with_gradient(chosen + 1), strict=True):
        np.testing.assert_array_equal(one, other)
    # The first token of each row is not replayed.
    others = (chosen + 3) % COUNT
    replayed = jnp.where(jnp.arange(logits.shape[1])[None, :, None] > 0, others + 1, 0)
    wanted = jnp.where(replayed > 0, others, chosen)
    np.testing.assert_array_equal(experts.route(config, logits, replayed=replayed).experts, wanted)
    of_wanted = jnp.take_along_axis(logits, wanted, axis=-1)
    if renormalized:
        softmax = jax.nn.softmax(of_wanted)
    else:
        softmax = jnp.exp(of_wanted - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    np.testing.assert_allclose(weights(logits, replayed), softmax, rtol=1e-5)
    _, gradient = with_gradient(replayed)
    assert float(jnp.abs(gradient).max()) > 0.1


@pytest.mark.parametrize("first", [0, 4])
def test_both_ways_to_count_assignments_agree(first, monkeypatch):
    chosen = experts.route(MoeConfig(COUNT, CHOSEN, INNER), case()[1]).experts.reshape(-1, CHOSEN)
    shard = experts._ExpertShard(first, 2)
    by_comparisons = experts._sort_by_expert(chosen, shard, COUNT // 2).ends
    monkeypatch.setattr(experts, "MOST_COMPARISONS", 0)
    by_search = experts._sort_by_expert(chosen, shard, COUNT // 2).ends
    np.testing.assert_array_equal(by_comparisons, by_search)
    counts = np.bincount(np.asarray(chosen).ravel(), minlength=COUNT)[first : first + COUNT // 2]
    np.testing.assert_array_equal(by_search, np.cumsum(counts))


def test_no_token_is_dropped_if_all_prefer_the_same_experts():
    config = MoeConfig(COUNT, CHOSEN, INNER)
    skewed = case(skew=50.0)
    chosen = experts.route(config, skewed[1]).experts
    assert int(chosen.max()) < CHOSEN
    assert_close(
        value_and_gradients(routed, config, *skewed), value_and_gradients(dense, config, *skewed)
    )


def test_tokens_do_not_affect_each_other():
    config = MoeConfig(COUNT, CHOSEN, INNER)
    x, logits, matrices = case()
    mixed = jax.jit(routed, static_argnums=3)
    apart = mixed(x, logits, matrices, config)
    together = mixed(x.at[1:].set(9.0), logits.at[1:].set(0.0), matrices, config)
    np.testing.assert_allclose(together[:1], apart[:1], atol=1e-5)
    assert float(jnp.abs(together[1:] - apart[1:]).max()) > 1


@pytest.mark.slow
def test_tokens_are_sorted_once_per_layer():
    """The backward pass, which recomputes layers, does not sort again."""
    model = tiny("olmoe").model
    rows = (tokens_of((3, LENGTH)), *plain(3))

    def loss(params):
        return jnp.sum(model.hidden(params, *rows) ** 2)

    text = jax.jit(jax.grad(loss)).lower(tiny("olmoe").params).compile().as_text() or ""
    assert text.count(" sort(") == 2  # assignments by expert, and the inverse of that


@pytest.mark.slow
def test_gradient_kernel_equals_the_reference(monkeypatch):
    """As the TPU computes it, interpreted: 300 rows, of which the last belong to no group, and a
    group without rows."""
    gmm = pytest.importorskip("jax.experimental.pallas.ops.tpu.megablox.gmm")
    plain = gmm.tgmm
    monkeypatch.setattr(gmm, "tgmm", lambda *arguments: plain(*arguments, interpret=True))
    noise = np.random.default_rng(0)
    x, gradient = (jnp.asarray(noise.standard_normal((300, n), np.float32)) for n in (16, 24))
    sizes = jnp.array([130, 0, 41, 88], jnp.int32)
    found = experts._matrices_gradient_kernel(x, gradient, sizes)
    ends = np.cumsum(sizes)
    for group, (start, end) in enumerate(zip(ends - np.asarray(sizes), ends, strict=True)):
        np.testing.assert_allclose(found[group], x[start:end].T @ gradient[start:end], atol=2e-4)


ON_A_MESH = """
import sys
import jax
from tests.models.test_experts import CHOSEN, COUNT, INNER, MoeConfig
from tests.models.test_experts import assert_close, case, routed, value_and_gradients
from tpu_rl.models.moe import experts
from tpu_rl.train import sharding
jax.config.update("jax_default_matmul_precision", "highest")

config = MoeConfig(COUNT, CHOSEN, INNER)
for arguments in eval(sys.argv[1]):
    wanted = value_and_gradients(routed, config, *arguments)
    for sizes in eval(sys.argv[2]):
        mesh = sharding.make_mesh(**sizes)
        mesh = sharding.sampling_mesh(mesh, 2) if mesh.shape["data"] == 4 else mesh
        for is_sent in eval(sys.argv[3]):
            experts.is_sent = lambda *sizes: is_sent and sizes[2] > 1
            with jax.set_mesh(mesh):
                assert_close(value_and_gradients(routed, config, *arguments), wanted)
print("four devices agree with one")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "is_sent"),
    [
        ({"tensor": 2, "expert": 2}, False),
        pytest.param({"expert": 4}, True, marks=pytest.mark.nightly),
    ],
)
def test_four_devices_equal_one(sizes, is_sent):
    """All tokens are routed to experts of one device, or of two, which takes several passes."""
    cases = "[case(skew=50.0, rank=2, bias=True)]"
    on_four_devices(ON_A_MESH, cases, f"[{sizes}]", f"[{is_sent}]")


@pytest.mark.nightly
@pytest.mark.parametrize("is_sent", [False, True])
def test_every_mesh_equals_one_device(is_sent):
    """Cases include numbers of rows that no mesh axis divides. Of the four devices of "data", two
    share rows and split experts."""
    cases = (
        "[case(), case(skew=50.0), case(rows=3, length=100), "
        "case(rows=3, length=100, skew=50.0), case(rank=2, bias=True)]"
    )
    meshes = (
        "[{'expert': 4}, {'fsdp': 2, 'expert': 2}, {'tensor': 2, 'expert': 2}, "
        "{'context': 2, 'expert': 2}, {'data': 4}]"
    )
    on_four_devices(ON_A_MESH, cases, meshes, f"[{is_sent}]")


@pytest.mark.parametrize(
    ("chosen", "devices", "tokens", "is_sent"),
    [
        (2, 2, 2048, False),
        (2, 8, 2048, True),
        (8, 8, 2048, False),
        (8, 32, 2048, True),
        (8, 64, 2048, True),
        (8, 32, 8, False),  # Buffers would be mostly empty.
    ],
)
def test_tokens_are_sent_where_many_devices_share_experts(chosen, devices, tokens, is_sent):
    assert experts.is_sent(tokens, chosen, devices, devices) == is_sent


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """The shipped model with four experts in place of each MLP, that MLP and some noise each: it
    answers as before."""
    shipped, params = models.load(roles.model_path("builtin:arithmetic"))
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = models.from_config(json.loads(shipped.config.source) | mixture)
    noise = np.random.default_rng(0)
    layer = dict(params["layers"]["layer_0"])
    for name in ("gate", "up", "down"):
        weight = np.asarray(layer.pop(name))[:, None]
        shape = (len(weight), 4, *weight.shape[2:])
        layer["expert_" + name] = jnp.asarray(
            weight + 0.01 * noise.standard_normal(shape, np.float32)
        )
    layer["router"] = jnp.asarray(0.1 * noise.standard_normal((len(weight), 4, 128), np.float32))
    path = tmp_path_factory.mktemp("grown") / "model"
    tokenizer = tokenizers.load(roles.model_path("builtin:arithmetic"))
    models.save(path, model, params | {"layers": {"layer_0": layer}}, tokenizer)
    return path


@pytest.mark.nightly
def test_update_of_a_mixture_is_the_same_on_several_devices(grown, tmp_path):
    """Compare tokens, rewards, gradients and, after gradient descent, params."""

    def step(devices, *flags):
        out = str(tmp_path / f"{devices}.npz")
        command = [
            sys.executable,
            "-m",
            "tests.fixtures.one_step",
            out,
            "--model.path",
            str(grown),
            *flags,
        ]
        env = several.virtual_devices(devices)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(np.load(out))

    one = step(1)
    require_same_step(one, step(2, "--mesh.expert", "2"))
    require_same_step(one, step(4, "--mesh.fsdp", "2", "--mesh.expert", "2"))


@pytest.mark.slow
def test_sampler_log_probs_equal_those_of_whole_sequences(grown):
    model, params = models.load(grown)
    prompts, config = (
        [[3, 4, 5], [6], [7, 8], [9]],
        SamplerConfig(max_new_tokens=6, samples_per_prompt=2),
    )
    rollout = sample(models.policy(model), params, prompts, jax.random.key(1), config)
    tokens, chosen = np.asarray(rollout.tokens), np.asarray(rollout.action_mask)
    scored = np.asarray(
        jax.jit(functools.partial(plain_log_probs, model))(params, jnp.asarray(tokens))
    )
    np.testing.assert_allclose(np.asarray(rollout.log_probs)[chosen], scored[chosen], atol=2e-5)


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0]}, "only some layers have experts"),
        ({"decoder_sparse_step": 2}, "only some layers have experts"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6"),
        ({"num_experts": "many"}, "num_experts = many"),
    ],
)
def test_unsupported_mixtures_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        models.from_config(CONFIGS["qwen3_moe"] | change)


def test_both_names_of_the_number_of_experts_are_read():
    older = CONFIGS["qwen3_moe"]
    newer = {**older, "num_local_experts": older["num_experts"]}
    del newer["num_experts"]
    assert models.from_config(newer).config.moe == models.from_config(older).config.moe


def test_lora_adapts_attention_by_default_and_experts_by_name():
    model = models.from_config(CONFIGS["mixtral"])

    def targets(*names):
        adapters = models.with_lora(model, LoraConfig(2, targets=names)).config.adapters
        return adapters and adapters.targets

    assert targets("all-linear") == ("query", "key", "value", "output")
    assert targets("all-linear", "gate_proj", "down") == (
        *targets("all-linear"),
        "expert_gate",
        "expert_down",
    )
    with pytest.raises(InputError, match=r"up_proj has 20 inputs or outputs"):
        models.with_lora(model, LoraConfig(21, targets=("up_proj",)))


# --- the TPU's compiler ---


@needs_libtpu
@pytest.mark.parametrize("parts", [1, 2])
def test_tpu_program_computes_no_gradient_of_frozen_experts(parts):
    rows, length, width, inner, rank = 4, 512, 256, 384, 16
    mesh = sharding.make_mesh(expert=parts, devices=tpu_devices("v5e:2x2")[:parts])
    config = MoeConfig(COUNT, CHOSEN, inner)

    def loss(x, adapters, weights, logits):
        matrices = [
            experts.Matrix(weight, *both) for weight, both in zip(weights, adapters, strict=True)
        ]
        return jnp.sum(
            routed(x, logits, experts.Matrices(*matrices), config).astype(jnp.float32) ** 2
        )

    def shape(*sizes, axes, dtype=jnp.bfloat16) -> Any:
        place = jax.NamedSharding(mesh, sharding.spec(axes, sizes, mesh))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    sides, stacked = [(width, inner), (width, inner), (inner, width)], ("experts", None, None)
    weights = [shape(COUNT, *both, axes=stacked) for both in sides]
    adapters = [
        (shape(COUNT, i, rank, axes=stacked), shape(COUNT, rank, o, axes=stacked)) for i, o in sides
    ]
    x = shape(rows, length, width, axes=("rows", None, None))
    logits = shape(rows, length, COUNT, axes=("rows", None, None), dtype=jnp.float32)
    with jax.default_matmul_precision("default"), jax.set_mesh(mesh):
        text = (
            jax.jit(jax.grad(loss, (0, 1))).lower(x, adapters, weights, logits).compile().as_text()
        )
    operations = cost_model.operations(cost_model.read(text or ""))
    assert not any(operation.uncounted for operation in operations)
    flops = cost_model.total_flops(operations)
    product = 2.0 * rows * length * CHOSEN * width * inner / parts
    thin = 2.0 * rows * length * CHOSEN * (width + inner) * rank / parts
    wanted = 6 * product + 9 * thin if parts == 1 else (8 * product + 11 * thin) * experts.ROOM
    assert flops == pytest.approx(wanted, rel=0.02)


@needs_libtpu
@pytest.mark.parametrize("parts", [1, 2])
def test_tpu_program_multiplies_each_token_with_its_experts_only(parts):
    """Products of a gradient as counted: three matrices, forwards and twice backwards, and once
    more to compute the first two anew where experts are spread, where buffers have some room
    besides."""
    rows, length, width, inner = 4, 512, 256, 384
    mesh = sharding.make_mesh(expert=parts, devices=tpu_devices("v5e:2x2")[:parts])
    config = MoeConfig(COUNT, CHOSEN, inner)

    def loss(x, logits, matrices):
        return jnp.sum(routed(x, logits, matrices, config).astype(jnp.float32) ** 2)

    def shape(*sizes, axes, dtype=jnp.bfloat16) -> Any:
        place = jax.NamedSharding(mesh, sharding.spec(axes, sizes, mesh))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    axes = [WEIGHT_AXES[name] for name in EXPERT_MATRICES]
    shapes = [(COUNT, width, inner), (COUNT, width, inner), (COUNT, inner, width)]
    whole = (shape(*sizes, axes=names) for sizes, names in zip(shapes, axes, strict=True))
    matrices = experts.Matrices(*map(experts.Matrix, whole))
    x = shape(rows, length, width, axes=("rows", None, None))
    logits = shape(rows, length, COUNT, axes=("rows", None, None), dtype=jnp.float32)
    with jax.default_matmul_precision("default"), jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, logits, matrices).compile().as_text()
    operations = cost_model.operations(cost_model.read(text or ""))
    assert not any(operation.uncounted for operation in operations)
    flops = cost_model.total_flops(operations)
    product = 2.0 * rows * length * CHOSEN * width * inner / parts
    wanted = 9 * product if parts == 1 else (3 + 2 + 6) * product * experts.ROOM
    assert flops == pytest.approx(wanted, rel=0.02)
