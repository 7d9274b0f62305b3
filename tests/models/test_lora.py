"""Adapters against merged weights, the chain rule, and transformers with adapters added by hand."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import CONFIGS, LENGTH, plain, tiny, tokens_of
from tpu_rl import models, sampler
from tpu_rl.errors import InputError
from tpu_rl.models import LoraConfig
from tpu_rl.models.config import LORA_A, LORA_B, has_outputs_first
from tpu_rl.models.decoder import decoder
from tpu_rl.models.hf import peft, safetensors_files
from tpu_rl.proofs.tiny import QUICKLY
from tpu_rl.train import sharding
from tpu_rl.types import Model, Params

TARGETS = {
    "llama3": ("all-linear", "lm_head"),
    "qwen2": ("all-linear",),
    "gemma3": ("q_proj", "down", "o_proj"),
    "mixtral": ("all-linear", "gate", "up", "down"),
    "deepseek_v3": ("all-linear",),
    "gemma4": ("all-linear",),
    "gemma4_moe": ("q_proj", "up", "k_proj"),
    "gemma4_small": ("all-linear",),
    "qwen3_5": ("all-linear",),
    "qwen3_next": ("all-linear",),
}
"""An untied unembedding; biases and tied embeddings; a pattern of kinds with a tail, of which a few
matrices; a mixture with its experts; latent attention, shared experts and a first dense layer;
linear attention, also with tensors whose rows alternate by head."""
MARKS = {
    name: [pytest.mark.nightly]
    for name in ("deepseek_v3", "gemma4", "gemma4_moe", "gemma4_small", "qwen3_5", "qwen3_next")
}


def parametrized(names):
    params = [pytest.param(name, marks=MARKS.get(name, [])) for name in names]
    return pytest.mark.parametrize("family", params)


each_family = parametrized(TARGETS)
each_dense_family = parametrized(name for name in TARGETS if name != "mixtral")


def mesh():
    return sharding.make_mesh(devices=jax.devices()[:1])


class Adapted(NamedTuple):
    model: Model
    base: Params
    adapters: Params
    """Random adapters, so that they change the model."""
    logits: Callable
    """(params, tokens): jitted, on [3, LENGTH]."""

    @property
    def params(self) -> Params:
        return models.join(self.base, self.adapters)


@functools.cache
def adapted(family):
    plain_model = tiny(family)
    model = models.with_lora(plain_model.model, LoraConfig(3, alpha=6.0, targets=TARGETS[family]))
    noise = np.random.default_rng(1)
    shapes = models.split(jax.eval_shape(model.init, jax.random.key(0)))[1]
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * noise.standard_normal(leaf.shape, np.float32)), shapes
    )

    def logits(params, tokens):
        return model.logits(params, model.hidden(params, tokens, *plain(3)))

    return Adapted(model, plain_model.params, adapters, jax.jit(logits, compiler_options=QUICKLY))


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


# --- what is computed ---


@pytest.mark.slow
@parametrized(name for name in TARGETS if name not in ("mixtral", "gemma4_moe"))
def test_each_row_can_have_its_own_adapter(family):
    one, tokens = adapted(family), tokens_of((3, LENGTH))
    model = decoder(dataclasses.replace(one.model.config, adapter_rows=3))
    factors = (1.0, -0.5, 2.0)

    axes = models.split(one.model.axes)[1]
    by_row = jax.tree.map(
        lambda leaf, names: jnp.stack([factor * leaf for factor in factors], "layers" in names),
        one.adapters,
        axes,
    )
    logits = jax.jit(
        lambda params: model.logits(params, model.hidden(params, tokens, *plain(3))),
        compiler_options=QUICKLY,
    )
    found = logits(models.join(one.base, by_row))
    for row, factor in enumerate(factors):
        adapters = jax.tree.map(lambda leaf, factor=factor: factor * leaf, one.adapters)
        alone = one.logits(models.join(one.base, adapters), tokens)
        np.testing.assert_allclose(found[row], alone[row], rtol=0, atol=1e-4)
    assert float(jnp.abs(alone - found).max()) > 0.1


@pytest.mark.slow
@each_family
def test_initial_adapters_add_zero(family):
    one, tokens = adapted(family), tokens_of((3, LENGTH))
    first = models.random_adapters(one.model, jax.random.key(0), mesh())
    assert all(
        bool(leaf.any()) == path[-1].key.endswith(LORA_A)
        for path, leaf in jax.tree.leaves_with_path(first)
    )
    assert_same(models.merge(one.model, models.join(one.base, first))[1], one.base)
    found = one.logits(models.join(one.base, first), tokens)
    # Two programs, which may round otherwise: in one of them the compiler merges other products.
    np.testing.assert_allclose(
        found, tiny(family).logits(one.base, tokens, *plain(3)), rtol=0, atol=1e-5
    )
    assert float(jnp.abs(one.logits(one.params, tokens) - found).max()) > 0.1


def test_initial_adapters_have_the_standard_deviation_of_peft():
    """A as PEFT's default, uniform up to inputs ** -0.5, whose standard deviation this is; the key
    decides."""
    base = models.from_config(CONFIGS["llama3"] | {"hidden_size": 400})
    model = models.with_lora(base, LoraConfig(40, targets=("gate", "output")))
    first, second = (
        models.random_adapters(model, jax.random.key(i), mesh())["layers"]["layer_0"]
        for i in range(2)
    )
    assert float(jnp.std(first["gate" + LORA_A])) == pytest.approx((3 * 400) ** -0.5, rel=0.03)
    assert float(jnp.std(first["output" + LORA_A])) == pytest.approx((3 * 40) ** -0.5, rel=0.05)
    assert float(jnp.abs(first["gate" + LORA_A] - second["gate" + LORA_A]).max()) > 0.01


@pytest.mark.slow
@each_family
def test_merged_equals_unmerged(family):
    """Up to rounding: merging rounds each weight once, and a last bit of every weight moves the
    logits by 5e-6 to 1.4e-5, depending on the family and on how the processor adds."""
    one, tokens = adapted(family), tokens_of((3, LENGTH))
    model, merged = models.merge(one.model, one.params)
    assert model is tiny(family).model
    assert jax.tree.structure(merged) == jax.tree.structure(one.base)
    logits = tiny(family).logits(merged, tokens, *plain(3))
    up = np.random.default_rng(0)

    def nudged(leaf):
        ends = np.where(up.random(leaf.shape) < 0.5, -np.inf, np.inf).astype(leaf.dtype)
        return jnp.nextafter(leaf, ends) if leaf.dtype == jnp.float32 else leaf

    last_bits = tiny(family).logits(jax.tree.map(nudged, merged), tokens, *plain(3)) - logits
    rounding = float(jnp.abs(last_bits).max())
    assert 1e-6 < rounding < 3e-5
    expected = one.logits(one.params, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=3 * rounding)


@pytest.mark.slow
def test_greedy_samples_of_merged_and_unmerged_models_are_equal():
    one = adapted("llama3")
    model, merged = models.merge(one.model, one.params)
    how = sampler.SamplerConfig(
        max_new_tokens=12, temperature=0.0, stop_ids=(), prompt_length=6, max_num_seqs=4
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    key = jax.random.key_data(jax.random.key(0))
    unmerged, other = (
        sampler.sample(models.policy(some), params, prompts, key, how)
        for some, params in ((one.model, one.params), (model, merged))
    )
    assert_same(unmerged.tokens, other.tokens)
    np.testing.assert_allclose(unmerged.log_probs, other.log_probs, rtol=0, atol=1e-5)
    assert len({tuple(row) for row in np.asarray(unmerged.tokens).tolist()}) == 3


@pytest.mark.slow
def test_gradients_follow_the_chain_rule():
    """dA = s dW B^T and dB = s A^T dW, where dW is the gradient of the merged model."""
    one, tokens = adapted("llama3"), tokens_of((3, LENGTH))
    model, merged = models.merge(one.model, one.params)

    def loss(model, params):
        return jnp.mean(jnp.sin(model.logits(params, model.hidden(params, tokens, *plain(3)))))

    def of_merged(params):
        return loss(model, params)

    def of_adapters(adapters):
        return loss(one.model, models.join(one.base, adapters))

    whole, found = (
        jax.jit(jax.grad(of), compiler_options=QUICKLY)(at)
        for of, at in ((of_merged, merged), (of_adapters, one.adapters))
    )
    compared = 0
    for path, gradient in jax.tree.leaves_with_path(found):
        keys, name = [key.key for key in path[:-1]], path[-1].key
        matrix = name.removesuffix(LORA_A).removesuffix(LORA_B)
        dw, a, b = (
            functools.reduce(lambda tree, key: tree[key], keys, tree)[leaf]
            for tree, leaf in (
                (whole, matrix),
                (one.adapters, matrix + LORA_A),
                (one.adapters, matrix + LORA_B),
            )
        )
        layers = a.shape[: a.ndim - len(one.model.config.shape(matrix + LORA_A))]
        a, b = a.reshape(*layers, -1, 3), b.reshape(*layers, 3, -1)
        if matrix == "unembedding" or has_outputs_first(matrix):
            dw = dw.reshape(*layers, b.shape[-1], a.shape[-2]).swapaxes(-1, -2)
        else:
            dw = dw.reshape(*layers, a.shape[-2], b.shape[-1])
        expected = dw @ b.swapaxes(-1, -2) if name.endswith(LORA_A) else a.swapaxes(-1, -2) @ dw
        expected = 2.0 * expected.reshape(gradient.shape)
        np.testing.assert_allclose(
            gradient, expected, rtol=0, atol=2e-4 * float(jnp.abs(expected).max())
        )
        compared += 1
    assert compared == len(jax.tree.leaves(one.adapters))


def products(jaxpr):
    """Return the sizes of the results of all matrix products, also inside of loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.size
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.slow
def test_no_product_has_the_size_of_a_frozen_matrix():
    """Neither W + A B nor a gradient of W is ever computed."""
    config = CONFIGS["llama3"] | {"hidden_size": 70, "intermediate_size": 94}
    base = models.from_config(config)
    model = models.with_lora(base, LoraConfig(3, targets=("up_proj", "gate_proj", "down_proj")))
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)

    def sizes(model, params, trained):
        def loss(trained, params, tokens):
            ones = jnp.ones_like(tokens)
            return model.hidden(models.join(params, trained), tokens, ones, ones, ones).sum()

        return set(products(jax.make_jaxpr(jax.grad(loss))(trained, params, tokens).jaxpr))

    weights, adapters = models.split(params)
    assert 70 * 94 not in sizes(model, weights, adapters)
    assert 70 * 94 in sizes(base, weights, weights)


def test_adapters_are_float32_beside_weights_in_bfloat16():
    model = models.with_lora(models.from_config(CONFIGS["llama3"], "bfloat16"), LoraConfig(2))
    weights, adapters = models.split(jax.eval_shape(model.init, jax.random.key(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype("float32")}
    hidden = jax.eval_shape(
        model.hidden, models.join(weights, adapters), *4 * [jax.ShapeDtypeStruct((2, 5), "int32")]
    )
    assert hidden.dtype == jnp.bfloat16


# --- what is adapted ---


DENSE = {"query", "key", "value", "output", "gate", "up", "down"}


def names_of(model):
    """Return the names of the matrices that have adapters, from the leaves."""
    adapters = models.split(jax.eval_shape(model.init, jax.random.key(0)))[1]
    return {
        path[-1].key.removesuffix(LORA_A).removesuffix(LORA_B)
        for path, _ in jax.tree.leaves_with_path(adapters)
    }


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("all-linear",), DENSE),
        (("q_proj", "value"), {"query", "value"}),
        (("lm_head", "up", "up_proj"), {"unembedding", "up"}),
        (("all-linear", "unembedding"), DENSE | {"unembedding"}),
    ],
)
def test_targets_may_have_our_names_or_those_of_peft(targets, expected):
    model = models.with_lora(tiny("llama3").model, LoraConfig(2, targets=targets))
    assert names_of(model) == expected
    reordered = models.with_lora(tiny("llama3").model, LoraConfig(2, targets=targets[::-1]))
    assert reordered is model  # one program for both


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 4, "targets": ("qproj",)}, "qproj.*\n.*\n.*did you mean q_proj"),
        ({"rank": 11}, r"rank 11(.|\n)*k_proj has 10(.|\n)*1 to 10"),
        ({"rank": 0, "alpha": 3.0}, "without a rank"),
        ({"rank": -1}, "rank is -1"),
        ({"rank": 2, "alpha": 0.0}, "alpha is 0"),
        ({"rank": 2, "targets": ()}, "nothing to adapt"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(InputError, match=words):
        models.with_lora(tiny("llama3").model, LoraConfig(**settings))


@pytest.mark.slow
def test_targets_of_latent_attention_and_shared_experts(tmp_path):
    model = tiny("deepseek_v3").model
    shared, dense = {"shared_gate", "shared_up", "shared_down"}, {"gate", "up", "down"}
    latent = {"query_down", "query_up", "latent", "latent_up", "output"}
    whole = models.with_lora(model, LoraConfig(2))
    assert names_of(whole) == shared | dense | latent
    some = models.with_lora(model, LoraConfig(2, targets=("kv_b_proj", "shared_up")))
    assert names_of(some) == {"latent_up", "shared_up"}
    with pytest.raises(InputError, match="unknown matrix 'k_proj'"):
        models.with_lora(model, LoraConfig(2, targets=("k_proj",)))
    # The experts have modules of the same names as the MLP.
    adapters = models.random_adapters(whole, jax.random.key(0), mesh())
    params = models.join(tiny("deepseek_v3").params, adapters)
    models.save_adapters(tmp_path, whole, params, "base")
    modules = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert modules[-2:] == ["shared_experts.up_proj", "shared_experts.down_proj"]
    assert modules[:2] == ["q_a_proj", "q_b_proj"]
    assert_same(models.load_adapters(tmp_path, model)[1], adapters)


@pytest.mark.slow
def test_experts_that_are_one_tensor_have_no_adapters():
    with pytest.raises(InputError, match="experts of this family(.|\n)*PEFT have no place"):
        models.with_lora(tiny("gpt_oss").model, LoraConfig(2, targets=("gate_proj",)))
    adapted_names = names_of(models.with_lora(tiny("gpt_oss").model, LoraConfig(2)))
    assert adapted_names == {"query", "key", "value", "output"}


def test_lm_head_is_adapted_only_if_it_is_not_tied():
    with pytest.raises(InputError, match="lm_head is the embedding"):
        models.with_lora(tiny("qwen2").model, LoraConfig(2, targets=("lm_head",)))
    headed = models.variant(tiny("llama3").model, num_outputs=2)
    assert names_of(models.with_lora(headed, LoraConfig(2, targets=("q_proj", "lm_head")))) == {
        "query"
    }
    with pytest.raises(InputError, match="nothing to adapt in a model with a head"):
        models.with_lora(headed, LoraConfig(2, targets=("lm_head",)))


def test_scale_is_alpha_over_the_rank_or_its_square_root():
    assert LoraConfig(16, alpha=8.0).scale == 0.5
    assert LoraConfig(16, alpha=8.0, rslora=True).scale == 2.0


def test_split_and_join_do_not_copy():
    one = adapted("gemma3")
    weights, adapters = models.split(one.params)
    assert jax.tree.structure(weights) == jax.tree.structure(one.base)
    for mine, theirs in ((weights, one.base), (adapters, one.adapters)):
        assert all(
            a is b for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
        )
    assert models.join({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}, "a": 4}) == {
        "a": 4,
        "b": {"c": 2, "d": 3},
    }


def test_rank_is_never_sharded():
    model = models.with_lora(tiny("llama3").model, LoraConfig(2, targets=("q_proj", "lm_head")))
    axes = model.axes["layers"]["layer_0"]
    assert axes["query" + LORA_A] == ("layers", "embed", "rank")
    assert axes["query" + LORA_B] == ("layers", "rank", "heads", "head_dim")
    assert model.axes["unembedding" + LORA_B] == ("rank", "vocab")
    cut = sharding.spec(
        axes["query" + LORA_B],
        (2, 2, 4, 10),
        jax.sharding.AbstractMesh((1, 2, 2, 1, 1), sharding.MESH_AXES),
    )
    assert cut == jax.P(None, None, ("tensor",), None)


# --- directories ---


@pytest.fixture
def saved(tmp_path):
    """Return the directory of an adapter of a saved tiny model, which the test may damage."""
    one = adapted("llama3")
    models.save(tmp_path / "base", tiny("llama3").model, one.base)
    models.save_adapters(tmp_path / "adapter", one.model, one.params, str(tmp_path / "base"))
    return tmp_path / "adapter"


def edit_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory, change):
    path = directory / "adapter_model.safetensors"
    tensors = {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }
    change(tensors)
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    safetensors_files.write_file(path, layout, tensors.values())


def test_saved_adapters_load_unchanged(saved):
    one = adapted("llama3")
    model, adapters = models.load_adapters(saved, tiny("llama3").model)
    assert model is one.model
    assert_same(adapters, one.adapters)
    placed = models.load_adapters(saved, tiny("llama3").model, mesh())[1]
    assert_same(placed, adapters)
    assert isinstance(jax.tree.leaves(placed)[0].sharding, jax.sharding.NamedSharding)


@pytest.mark.slow
@each_family
def test_loading_an_adapter_directory_gives_the_merged_model(family, tmp_path):
    one = adapted(family)
    models.save(tmp_path / "base", tiny(family).model, one.base)
    models.save_adapters(
        tmp_path / "adapter", one.model, one.params, "base"
    )  # a path that starts at the adapter's
    (tmp_path / "adapter" / "base").symlink_to(tmp_path / "base")
    models.save(tmp_path / "merged", one.model, one.params)
    (from_adapter, some), (from_merged, same) = (
        models.load(tmp_path / name) for name in ("adapter", "merged")
    )
    assert_same(some, same)
    assert_same(same, models.merge(one.model, one.params)[1])
    assert from_adapter.config.adapters is None
    assert dataclasses.replace(from_adapter.config, source="") == dataclasses.replace(
        from_merged.config, source=""
    )
    assert models.from_config(tmp_path / "adapter") is from_adapter
    models.check(tmp_path / "adapter", from_adapter)


def test_adapters_of_a_multimodal_gemma3_name_its_language_model(tmp_path):
    one = adapted("gemma3")
    text = json.loads(one.model.config.source)
    inside = models.from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    model = models.with_lora(inside, LoraConfig(3, alpha=6.0, targets=TARGETS["gemma3"]))
    models.save(tmp_path / "base", inside, one.base)
    models.save_adapters(tmp_path / "adapter", model, one.params, str(tmp_path / "base"))
    stored = safetensors_files.read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.split("layers")[0] for name in stored} == {
        "base_model.model.model.language_model."
    }
    again, adapters = models.load_adapters(tmp_path / "adapter", inside)
    assert again is model
    assert_same(adapters, one.adapters)
    assert_same(models.load(tmp_path / "adapter")[1], models.merge(one.model, one.params)[1])


def test_adapter_of_a_reward_model_contains_its_head(tmp_path):
    one = adapted("llama3")
    headed = models.with_lora(
        models.variant(tiny("llama3").model, num_outputs=2), LoraConfig(3, targets=("v_proj",))
    )
    adapters = models.random_adapters(headed, jax.random.key(0), mesh())
    params = models.join(one.base, adapters | {"score": jnp.ones((2, 40))})
    models.save(tmp_path / "base", tiny("llama3").model, one.base)
    models.save_adapters(tmp_path / "adapter", headed, params, str(tmp_path / "base"))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    model, loaded = models.load(tmp_path / "adapter")
    assert model.config.num_outputs == 2
    assert "unembedding" not in loaded
    assert_same(loaded["score"], params["score"])


@pytest.mark.slow
def test_adapters_of_experts_have_the_names_of_their_family(tmp_path):
    one = adapted("mixtral")
    models.save_adapters(tmp_path, one.model, one.params, "base")
    stored = safetensors_files.read_header(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.5.w2.lora_"
    assert (stored[name + "A.weight"].shape, stored[name + "B.weight"].shape) == ((3, 20), (40, 3))
    b = one.adapters["layers"]["layer_0"]["expert_down" + LORA_B][1, 5]
    np.testing.assert_array_equal(np.array(stored[name + "B.weight"].read()), b.T)
    modules = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert modules == ["q_proj", "k_proj", "v_proj", "o_proj", "w1", "w3", "w2"]


@pytest.mark.slow
def test_transformers_agrees_on_a_mixture_with_merged_adapters(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    one, tokens = adapted("mixtral"), tokens_of((3, LENGTH))
    models.save(tmp_path / "merged", one.model, one.params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(one.logits(one.params, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@each_dense_family
def test_transformers_agrees_after_adding_adapters_by_hand(family, tmp_path):
    """With PEFT's names and layout, module.weight += alpha / r * B @ A, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    one, tokens = adapted(family), tokens_of((3, LENGTH))
    models.save(tmp_path / "base", tiny(family).model, one.base)
    models.save_adapters(tmp_path / "adapter", one.model, one.params, str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    ).eval()
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    stored = safetensors_files.read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    added = set()
    with torch.no_grad():
        for name in stored:
            stem, end, _ = name.removeprefix("base_model.model.").rpartition(".lora_A.weight")
            if end:
                a, b = (
                    torch.tensor(
                        np.array(stored[f"base_model.model.{stem}.lora_{x}.weight"].read())
                    )
                    for x in "AB"
                )
                theirs.get_submodule(stem).weight += settings["lora_alpha"] / settings["r"] * b @ a
                added.add(stem)
        expected = theirs(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    suffixes = tuple(f".{module}" for module in settings["target_modules"])
    modules = [f".{name}" for name, _ in theirs.named_modules()]
    assert added == {name[1:] for name in modules if name.endswith(suffixes)}
    np.testing.assert_allclose(one.logits(one.params, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@parametrized(["llama3", "qwen2", "gemma3", "gemma4", "gemma4_small", "qwen3_5"])
def test_peft_loads_an_adapter_as_it_is(family, tmp_path):
    """The package itself, on transformers' model: logits of the adapted model.

    Of a mixture, peft 0.21 also adapts the experts of transformers 5, which the file does not name.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    one, tokens = adapted(family), tokens_of((3, LENGTH))
    models.save(tmp_path / "base", tiny(family).model, one.base)
    models.save_adapters(tmp_path / "adapter", one.model, one.params, str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(one.logits(one.params, tokens), expected, rtol=0, atol=1e-4)


def numbers_in(path):
    return {
        name: np.array(stored.read())
        for name, stored in safetensors_files.read_header(path).items()
    }


def added_by_peft(directory):
    """Return name -> what PEFT adds to a tensor of the base: alpha / r * B A, by its patterns."""
    settings = json.loads((directory / "adapter_config.json").read_text())
    tensors = numbers_in(directory / "adapter_model.safetensors")
    added = {}
    for name, a in tensors.items():
        stem, end, _ = name.removeprefix("base_model.model.").rpartition(".lora_A.weight")
        if end:
            module = stem.rpartition(".")[2]
            rank = settings["rank_pattern"].get(module, settings["r"])
            alpha = settings["alpha_pattern"].get(module, settings["lora_alpha"])
            scale = alpha / rank**0.5 if settings["use_rslora"] else alpha / rank
            assert len(a) == rank
            added[stem + ".weight"] = scale * tensors[name.replace("lora_A", "lora_B")] @ a
    return added


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "rslora"),
    [(("all-linear",), False), (("qkv_proj", "gate_up_proj"), True), (("q_proj", "down"), False)],
)
def test_adapters_of_matrices_that_are_one_tensor_are_one_adapter_in_peft(
    targets, rslora, tmp_path
):
    """Phi-3: query, key and value are one tensor, and so are gate and up."""
    base, params = tiny("phi3").model, tiny("phi3").params
    model = models.with_lora(base, LoraConfig(3, alpha=6.0, rslora=rslora, targets=targets))
    noise = np.random.default_rng(1)
    shapes = models.split(jax.eval_shape(model.init, jax.random.key(0)))[1]
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(noise.standard_normal(leaf.shape, np.float32)), shapes
    )
    joined = models.join(params, adapters)
    models.save(tmp_path / "base", base, params)
    models.save(tmp_path / "merged", model, joined)
    models.save_adapters(tmp_path / "adapter", model, joined, str(tmp_path / "base"))
    before, after = (
        numbers_in(tmp_path / name / "model.safetensors") for name in ("base", "merged")
    )
    added = added_by_peft(tmp_path / "adapter")
    assert any("qkv_proj" in name for name in added)
    for name, tensor in before.items():
        np.testing.assert_allclose(after[name], tensor + added.get(name, 0.0), atol=1e-4)
    if targets != ("q_proj", "down"):
        again, loaded = models.load_adapters(tmp_path / "adapter", base)
        assert again is model
        assert_same(loaded, adapters)
    else:  # What the file has for the others is zero.
        merged = models.load(tmp_path / "adapter")[1]
        assert_same(merged, models.load(tmp_path / "merged")[1])

    # With an entry between the blocks it would be the adapter of something else.
    tensor = next(name for name in added if "qkv_proj" in name).removesuffix(".weight")

    def mix(tensors):
        tensors[f"base_model.model.{tensor}.lora_B.weight"][-1, 0] = 1.0

    edit_tensors(tmp_path / "adapter", mix)
    with pytest.raises(InputError, match="mixes their parts"):
        models.load(tmp_path / "adapter")


def test_one_adapter_of_peft_on_a_fused_tensor_is_one_for_each_of_its_matrices(tmp_path):
    base, params = tiny("phi3").model, tiny("phi3").params
    model = models.with_lora(base, LoraConfig(3, alpha=6.0, targets=("qkv_proj",)))
    adapters = models.random_adapters(model, jax.random.key(0), mesh())
    models.save(tmp_path / "base", base, params)
    directory = tmp_path / "adapter"
    models.save_adapters(directory, model, models.join(params, adapters), str(tmp_path / "base"))
    noise = np.random.default_rng(1)

    def as_trained_by_peft(tensors):
        for name in tensors:
            shape = (3, 40) if "lora_A" in name else (80, 3)
            tensors[name] = noise.standard_normal(shape, np.float32)

    edit_tensors(directory, as_trained_by_peft)
    edit_config(directory, rank_pattern={}, alpha_pattern={})
    models.save(tmp_path / "merged", *models.load(directory))
    before, after = (
        numbers_in(tmp_path / name / "model.safetensors") for name in ("base", "merged")
    )
    added = added_by_peft(directory)
    assert len(added) == 2
    for name, tensor in before.items():
        np.testing.assert_allclose(after[name], tensor + added.get(name, 0.0), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"layers_to_transform": [1]}, "layers_to_transform"),
        ({"r": "8"}, "r = 8"),
        ({"r": 10**9}, "r = 1000000000"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"r": 4}, "of another shape"),
        ({"base_model_name_or_path": None}, "does not say which model"),
        ({"base_model_name_or_path": "/nowhere"}, "base is not there"),
        ({"base_model_name_or_path": "../adapter"}, "an adapter of an adapter"),
    ],
)
def test_unsupported_adapters_are_refused(saved, fields, words):
    edit_config(saved, **fields)
    with pytest.raises(InputError, match=words):
        models.load(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop(
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
            ),
            "1 missing",
        ),
        (
            lambda tensors: tensors.update(
                {
                    "base_model.model.model.embed_tokens.lora_embedding_A": np.ones(
                        (3, 131), np.float32
                    )
                }
            ),
            "not part of the model: model.embed_tokens",
        ),
        (lambda tensors: tensors["base_model.model.lm_head.lora_B.weight"].fill(np.nan), "NaN"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, change, words):
    edit_tensors(saved, change)
    with pytest.raises(InputError, match=words):
        models.load(saved)


def test_weights_that_an_adapter_trained_as_a_whole_have_a_remedy(saved):
    edit_tensors(
        saved,
        lambda tensors: tensors.update(
            {"base_model.model.model.norm.weight": np.ones(3, np.float32)}
        ),
    )
    with pytest.raises(InputError, match="not part of the model: model.norm") as error:
        models.load(saved)
    assert "merge_and_unload" in error.value.fix


def test_a_configuration_beside_an_adapter_is_of_its_base(saved):
    """Some libraries write it. Weights beside it would be a second model."""
    config = (saved.parent / "base" / "config.json").read_bytes()
    (saved / "config.json").write_bytes(config)
    assert peft.is_adapter(saved)
    models.load(saved)
    (saved / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="holds a model and an adapter"):
        models.load(saved)


def test_pickled_adapters_are_not_read(saved):
    (saved / "adapter_model.safetensors").rename(saved / "adapter_model.bin")
    with pytest.raises(InputError, match="pickled weights"):
        models.load(saved)


def test_adapter_with_a_link_out_of_its_directory_is_refused(saved, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (saved / "special_tokens_map.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InputError, match="leads out of the model directory"):
        models.load(saved)


def test_saving_an_adapter_replaces_an_adapter_and_nothing_else(saved, tmp_path):
    one = adapted("llama3")
    doubled = jax.tree.map(lambda leaf: 2 * leaf, one.adapters)
    models.save_adapters(saved, one.model, doubled, str(tmp_path / "base"))
    assert_same(models.load_adapters(saved, tiny("llama3").model)[1], doubled)
    with pytest.raises(InputError, match="not a model directory"):
        models.save_adapters(tmp_path / "base", one.model, one.params, "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
