"""Models with a head and models of fewer layers, against the whole model and transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import CAPACITY, CONFIGS, LENGTH, plain, tiny, tokens_of
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.models.hf import families
from tpu_rl.types import PackedRows

FAMILIES = ("llama3", "qwen2", "gemma2")
"""A plain one, one with tied embeddings, one with capped logits and a pattern of two kinds of
layers and a tail."""

some_families = pytest.mark.parametrize("family", FAMILIES)


def headed(family, outputs=3):
    """Return (model, params) with a head whose outputs are large enough to compare."""
    base = tiny(family)
    params = models.head_params(base.model, base.params, outputs, jax.random.key(5))
    return models.variant(base.model, num_outputs=outputs), params | {"score": 20 * params["score"]}


@pytest.mark.slow
@some_families
def test_a_head_reads_the_hidden_states_of_the_whole_model(family):
    model, params = headed(family)
    base = tiny(family)
    tokens = tokens_of((3, LENGTH))
    hidden = base.model.hidden(base.params, tokens, *plain(3))
    np.testing.assert_array_equal(model.hidden(params, tokens, *plain(3)), hidden)
    outputs = model.logits(params, hidden)
    assert outputs.shape == (3, LENGTH, 3)
    assert outputs.dtype == jnp.float32
    # Neither a cap on logits nor a limit of the vocabulary applies to it.
    np.testing.assert_allclose(
        outputs, np.asarray(hidden) @ np.asarray(params["score"]).T, rtol=1e-5, atol=1e-5
    )


@some_families
def test_head_replaces_the_unembedding(family):
    base = tiny(family)
    params = models.head_params(base.model, base.params, 2, jax.random.key(0))
    assert "unembedding" not in params
    assert all(params[name] is leaf for name, leaf in base.params.items() if name != "unembedding")
    fresh = jax.eval_shape(models.variant(base.model, num_outputs=2).init, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), fresh
    )


def test_initial_outputs_have_a_standard_deviation_of_a_tenth():
    """Hidden states come from a norm of gain 1, so values start near zero."""
    base = tiny("llama3")
    score = models.random_head(base.model, 4000, jax.random.key(1))["score"]
    hidden = jnp.asarray(
        np.random.default_rng(0).standard_normal(base.model.config.hidden_size), jnp.float32
    )
    hidden *= base.model.config.hidden_size**0.5 / jnp.linalg.norm(hidden)
    assert float(jnp.std(score @ hidden)) == pytest.approx(0.1, rel=0.05)


def test_heads_of_different_keys_differ():
    base = tiny("llama3").model
    first, second = (models.random_head(base, 2, jax.random.key(i))["score"] for i in range(2))
    assert float(jnp.abs(first - second).max()) > 0.01
    assert float(jnp.abs(first[0] - first[1]).max()) > 0.01


@pytest.mark.slow
@some_families
def test_outputs_with_a_cache_equal_outputs_without(family):
    model, params = headed(family)
    tokens = tokens_of((3, LENGTH))
    whole = model.logits(params, model.hidden(params, tokens, *plain(3)))
    positions, _, branches = plain(3)
    cache = model.init_cache(params, 3, CAPACITY)
    first, cache = model.extend(
        params, cache, tokens[:, :11], positions[:, :11], branches[:, :11], jnp.full(3, 11)
    )
    rest, _ = model.extend(
        params, cache, tokens[:, 11:], positions[:, 11:], branches[:, 11:], jnp.full(3, LENGTH - 11)
    )
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), whole, rtol=1e-4, atol=1e-4)


def test_a_head_on_another_roles_hidden_states():
    model, base = tiny("llama3").model, tiny("llama3").params
    head = models.random_head(model, 2, jax.random.key(3))
    tree = {"policy": base, "value": head}
    trunk = models.role(model, lambda params: params["policy"])
    role = models.head_role(trunk, lambda params: params["value"])
    tokens = tokens_of((3, LENGTH))
    positions, segments, branches = plain(3)
    rows = PackedRows(tokens, positions, segments, branches, segments, positions)
    hidden = role.hidden(tree, rows)
    np.testing.assert_array_equal(hidden, trunk.hidden(tree, rows))
    expected = np.asarray(hidden) @ np.asarray(head["score"]).T
    np.testing.assert_allclose(role.logits(tree, hidden), expected, rtol=1e-5, atol=1e-6)


# --- fewer layers ---


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "layers"), [("llama3", 1), ("gemma2", 2), ("gemma3", 2), ("gemma3", 4)]
)
def test_first_layers_equal_the_model_whose_other_layers_add_zero(family, layers):
    whole = tiny(family)
    short = models.first_layers(whole.model, layers)
    params = models.first_layers_params(whole.model, whole.params, layers)
    count = layers // whole.model.config.period

    def silenced(path, leaf):
        """The last products of a branch, zero in the layers that `short` lacks.

        Post-norms then scale zeros."""
        if path[-1].key not in ("output", "down", "output_bias", "down_bias"):
            return leaf
        return leaf.at[count:].set(0) if path[0].key == "layers" else jnp.zeros_like(leaf)

    silent = jax.tree_util.tree_map_with_path(silenced, whole.params)
    tokens = tokens_of((3, LENGTH))
    expected = whole.model.hidden(silent, tokens, *plain(3))
    np.testing.assert_allclose(
        short.hidden(params, tokens, *plain(3)), expected, rtol=1e-5, atol=1e-5
    )
    assert (
        float(jnp.abs(expected - whole.model.hidden(whole.params, tokens, *plain(3))).max()) > 0.01
    )


def test_first_layers_of_a_headed_model_can_be_saved_and_loaded(tmp_path):
    base = tiny("gemma2")
    model = models.variant(models.first_layers(base.model, 2), num_outputs=1)
    short = models.first_layers_params(base.model, base.params, 2)
    params = models.head_params(models.first_layers(base.model, 2), short, 1, jax.random.key(0))
    models.save(tmp_path / "model", model, params)
    again, loaded = models.load(tmp_path / "model")
    assert again.config.layer_types == model.config.layer_types == ("sliding", "full")
    assert again.config.num_outputs == 1
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("layers", [0, 1, 3, 5, 6])
def test_only_complete_patterns_of_layers_can_be_taken(layers):
    """Of five layers whose types repeat every two, two or four can be taken."""
    model = tiny("gemma3").model
    with pytest.raises(InputError, match=f"first {layers} layers of 5"):
        models.first_layers(model, layers)


def test_layers_with_reused_keys_cannot_be_taken():
    with pytest.raises(InputError, match="first 2 layers of 9"):
        models.first_layers(tiny("gemma4_small").model, 2)


# --- files ---


@pytest.mark.slow
@some_families
def test_model_with_a_head_is_saved_as_a_sequence_classifier(family, tmp_path):
    model, params = headed(family)
    models.save(tmp_path / "model", model, params)
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["architectures"][0].endswith("ForSequenceClassification")
    assert written["num_labels"] == 3
    again, loaded = models.load(tmp_path / "model")
    assert again.config.num_outputs == 3
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize("family", CONFIGS)
def test_class_of_a_saved_head_exists_in_transformers(family):
    names = pytest.importorskip("transformers.models.auto.modeling_auto")
    kind = str(CONFIGS[family]["model_type"])
    known = names.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    without = ("olmoe", "granite", "qwen3_5_moe_text", "gemma4_text")
    assert known == (None if kind in without else families.FAMILIES[kind].head_architecture)


def test_labels_of_another_number_of_outputs_are_dropped(tmp_path):
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    base = models.from_config(CONFIGS["llama3"] | labels)
    for outputs in (2, 3):
        model = models.variant(base, num_outputs=outputs)
        models.save(tmp_path, model, model.init(jax.random.key(0)))
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["num_labels"] == outputs
        assert {name: written[name] for name in labels if name in written} == (
            labels if outputs == 2 else {}
        )


@pytest.mark.slow
@some_families
def test_transformers_computes_the_same_scores(family, tmp_path):
    """transformers loads our file and computes in float32; its score is the last token's."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, params = headed(family)
    models.save(tmp_path / "ours", model, params)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert theirs.config.num_labels == 3
    _compare(model, params, theirs)


@pytest.mark.slow
def test_classifier_of_transformers_loads(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        **json.loads(tiny("llama3").model.config.source), num_labels=3
    )
    theirs = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(tmp_path / "theirs")
    model, params = models.load(tmp_path / "theirs")
    assert model.config.num_outputs == 3
    _compare(model, params, theirs)


def _compare(model, params, theirs):
    import torch

    tokens = tokens_of((3, LENGTH))
    ours = np.asarray(model.logits(params, model.hidden(params, tokens, *plain(3))))[:, -1]
    with torch.no_grad():
        rows = [
            theirs(torch.tensor(np.asarray(row)[None], dtype=torch.long)).logits[0].numpy()
            for row in tokens
        ]
    assert np.abs(ours).max() > 0.5
    np.testing.assert_allclose(ours, np.stack(rows), rtol=0, atol=1e-4 * np.abs(ours).max())


def test_first_layers_include_those_without_experts():
    model, params = tiny("deepseek_v3").model, tiny("deepseek_v3").params
    cut = models.first_layers(model, 2)
    assert (cut.config.dense_layers, cut.config.repetitions) == (1, 1)
    found = models.first_layers_params(model, params, 2)
    shapes = jax.eval_shape(cut.init, jax.random.key(0))
    jax.tree.map(
        lambda leaf, shape: np.testing.assert_equal(leaf.shape, shape.shape), found, shapes
    )
    assert models.from_config(json.loads(cut.config.source)).config == cut.config
    with pytest.raises(InputError, match="patterns of 1 after the first 1"):
        models.first_layers(model, 1)
