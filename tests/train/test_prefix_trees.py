"""Packed rows that hold trees: layouts, and the same numbers as a row per path."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.decoders import tiny as tiny_decoder
from tests.fixtures.trees import Tree, random_tree
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.losses import masked
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.models.attention import flash_kernels
from tpu_rl.proofs import tiny
from tpu_rl.train import packing
from tpu_rl.types import Layout

CUT: dict[str, Any] = {"row_length": 128, "micro_batch_rows": 1}


def laid_out(tree: Tree, **cut: Any) -> Layout:
    sharing: dict[str, Any] = {"parent": tree.parent, "shared": tree.shared}
    return packing.assign_slots(tree.action_mask, tree.group_id, **CUT | sharing | cut)


def test_tree_by_hand():
    mask = np.array(
        [
            [0, 0, 1, 1, 0, 1],
            [0, 0, 0, 0, 0, 1],  # repeats four tokens of row 0
            [0, 0, 0, 0, 1, 0],  # names row 1, but branches off from row 0
            [0, 0, 0, 0, 0, 1],  # branches off from row 1
            [0, 1, 0, 0, 0, 0],  # another prompt
        ],
        bool,
    )
    layout = packing.assign_slots(
        mask,
        np.zeros(5, int),
        parent=np.array([0, 0, 1, 1, 4]),
        shared=np.array([0, 4, 4, 5, 0]),
        row_length=13,
        micro_batch_rows=1,
    )
    # The start of row 0 and its end; row 1 in two runs; row 3; row 2; row 4.
    expected = {
        "source": [0, 1, 2, 3, 4, 5, 10, 11, 23, 16, 24, 25, -1],
        "positions": [0, 1, 2, 3, 4, 5, 4, 5, 5, 4, 0, 1, 0],
        "segment_ids": [1] * 12 + [0],
        "sequence_ids": [0, 0, 1, 1, 1, 1, 0, 2, 4, 3, 0, 5, 0],
        "previous": [0, 0, 1, 2, 3, 4, 3, 6, 6, 3, 10, 10, 12],
        "visible_until": [10, 10, 10, 10, 6, 6, 9, 8, 9, 10, 12, 12, 13],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(vars(layout)[name], [[[values]]], err_msg=name)
    slots = [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 6, 7],
        [0, 1, 2, 3, 9, -1],
        [0, 1, 2, 3, 6, 8],
        [10, 11, -1, -1, -1, -1],
    ]
    np.testing.assert_array_equal(layout.slot, slots)


@pytest.mark.parametrize("row_length", [128, 26])
@pytest.mark.parametrize("seed", range(6))
def test_each_token_sees_its_path_and_nothing_else(seed, row_length):
    """Short rows split groups and repeat tokens."""
    tree = random_tree(seed, vocabulary=10**6)
    layout = laid_out(tree, row_length=row_length)
    source = layout.source.reshape(-1, row_length)
    slot = np.arange(row_length)
    until = layout.visible_until.reshape(-1, 1, row_length)
    sees = (slot[None, :] <= slot[:, None]) & (slot[:, None] < until)
    sequence_ids = layout.sequence_ids.reshape(-1)
    for row, end in enumerate(tree.ends):
        slots = layout.slot[row, :end]
        assert (layout.slot[row, end:] == -1).all()
        if not end:
            continue
        (packed_row,) = {*(slots // row_length)}
        within = slots % row_length
        for count in range(1, end + 1):
            np.testing.assert_array_equal(
                np.flatnonzero(sees[packed_row, within[count - 1]]), within[:count]
            )
        np.testing.assert_array_equal(
            tree.tokens.reshape(-1)[source[packed_row, within]], tree.tokens[row, :end]
        )
        np.testing.assert_array_equal(
            layout.positions.reshape(-1, row_length)[packed_row, within], np.arange(end)
        )
        previous = layout.previous.reshape(-1, row_length)[packed_row, within]
        np.testing.assert_array_equal(previous, [within[0], *within[:-1]])
        # Its actions have a number of their own, those that it repeats have another.
        own = sequence_ids[slots[tree.action_mask[row, :end]]]
        assert len({*own}) == 1
        assert own[0] not in sequence_ids[slots[: tree.shared[row]]]
    # Repeated actions are actions once.
    is_action = np.asarray(layout.pack(jnp.asarray(tree.action_mask))).reshape(source.shape)
    actions = source[is_action]
    np.testing.assert_array_equal(np.sort(actions), np.flatnonzero(tree.action_mask))
    if row_length == 128:
        # Every token stands once: as many slots as distinct prefixes.
        prefixes = {
            (group, *tree.tokens[row, :count])
            for row, (group, end) in enumerate(zip(tree.group_id, tree.ends, strict=True))
            for count in range(1, end + 1)
        }
        assert (source >= 0).sum() == len(prefixes)
    else:
        assert (np.bincount(source[source >= 0]) <= 1).all()
        assert layout.segment_ids.max(-1).sum() > 2


def test_sums_over_a_sequence_are_those_of_the_rows_own_actions():
    tree = random_tree(2)
    layout = laid_out(tree)
    values = np.random.default_rng(0).normal(size=tree.tokens.shape)
    values = jnp.asarray(np.where(tree.action_mask, values, 0.0), jnp.float32)
    slots = layout.sequence_ids.reshape(-1, 128)
    sums = masked.sequence_total(layout.pack(values).reshape(slots.shape), jnp.asarray(slots))
    sums = np.asarray(layout.unpack(sums))
    expected = np.broadcast_to(values.sum(1, keepdims=True), values.shape)
    actions = tree.action_mask
    np.testing.assert_allclose(sums[actions], expected[actions], rtol=1e-5)
    assert layout.sequence_ids.max(-1).sum() == actions.any(1).sum()


def test_shared_prompts_are_trees_of_one_level():
    _, mask, group_id = tiny.texts(
        np.random.default_rng(0), [(3, (4, 2, 5)), (2, (3,)), (5, (1, 7))]
    )
    members = mask.any(1)
    assert members.all()
    parent = np.searchsorted(group_id, group_id)
    shared = np.where(parent == np.arange(len(mask)), 0, mask.argmax(1))
    cut: dict[str, Any] = {"row_length": 24, "micro_batch_rows": 2}
    plain = packing.assign_slots(mask, group_id, **cut)
    tree = packing.assign_slots(mask, group_id, parent=parent, shared=shared, **cut)
    jax.tree.map(np.testing.assert_array_equal, plain, tree)


def test_tiles_of_trees_hold_what_is_seen(monkeypatch):
    monkeypatch.setattr(packing, "TILE", 4)
    monkeypatch.setattr(packing, "WORTH_TILES", 1.0)
    listed_tiles, seen_tiles = 0, 0
    for seed in range(6):
        layout = laid_out(random_tree(seed))
        assert layout.key_tiles is not None
        tiles = layout.key_tiles.reshape(-1, *layout.key_tiles.shape[3:])
        count = tiles.shape[1]
        slot = np.arange(128)
        until = layout.visible_until.reshape(-1, 1, 128)
        sees = (slot <= slot[:, None]) & (slot[:, None] < until)
        sees &= (layout.segment_ids.reshape(-1, 1, 128)) > 0
        seen = sees.reshape(-1, count, 128 // count, count, 128 // count).any((2, 4))
        listed = (tiles[..., None] == np.arange(count)).any(-2)
        assert (listed | ~seen).all()
        listed_tiles += listed.sum()
        seen_tiles += seen.sum()
    assert listed_tiles == seen_tiles


@pytest.mark.parametrize(
    ("parent", "shared", "group_id"),
    [
        ([0, 0], [0, 2], [0, 0]),  # repeats an action that is its own
        ([1, 1], [1, 0], [0, 0]),  # a later row
        ([0, 0], [0, 1], [0, 1]),  # another group
        ([0, 1], [0, 1], [0, 0]),  # itself
    ],
)
def test_wrong_trees_are_named(parent, shared, group_id):
    mask = np.array([[0, 1, 1], [0, 1, 1]], bool)
    sharing: dict[str, Any] = {"parent": np.array(parent), "shared": np.array(shared)}
    with pytest.raises(ValueError, match="cannot share"):
        packing.assign_slots(mask, np.array(group_id), **sharing, **CUT)


def test_a_split_keeps_together_what_shares_most():
    """Two nodes of 20 tokens after a root of 10, whose leaves of 2 tokens take turns."""
    tree = Tree(
        np.zeros((6, 32), np.int32),
        np.tile(np.arange(32) >= 30, (6, 1)),
        np.zeros(6, int),
        parent=np.array([0, 0, 0, 1, 2, 3]),
        shared=np.array([0, 10, 30, 30, 30, 30]),
    )
    layout = laid_out(tree, row_length=36)
    assert (layout.source >= 0).sum(-1).reshape(-1).tolist() == [36, 36]
    np.testing.assert_array_equal(layout.slot[:, -1] // 36, [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(
        layout.sequence_ids[..., -6:].reshape(2, 6), [[1, 1, 2, 2, 3, 3]] * 2
    )


def test_rows_and_groups_that_do_not_fit_are_named():
    tree = random_tree(0)
    with pytest.raises(InputError, match="exceed a row"):
        laid_out(tree, row_length=int(tree.ends.max()) - 1)
    with pytest.raises(InputError, match="exceed a row"):
        laid_out(tree, row_length=int(tree.ends.max()), placement="whole")


def compare(family: str, tree: Tree, kernel: bool = False, **cut: Any) -> list[float]:
    """Return relative differences of log-probs and gradients: trees against a row per path."""
    model, params, *_ = tiny_decoder(family)
    packed_model = models.with_attention_kernel(model, "interpreted") if kernel else model
    layout = laid_out(tree, **cut)
    tokens = jnp.asarray(tree.tokens)
    rows = layout.rows(tokens)
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1, leaf.shape[-1]), rows)
    if layout.key_tiles is not None:
        key_tiles = layout.key_tiles.reshape(-1, *layout.key_tiles.shape[3:])
        rows = rows.replace(key_tiles=jnp.asarray(key_tiles))
    random = np.random.default_rng(1).normal(size=tokens.shape).astype(np.float32)
    coefficients = jnp.where(tree.action_mask, random, 0.0)
    packed_coefficients = layout.pack(coefficients).reshape(rows.tokens.shape)
    role = models.role(packed_model, lambda params: params)

    def packed(params: Any) -> tuple[jax.Array, jax.Array]:
        log_probs = token_log_probs(role, params, rows).log_probs
        return jnp.sum(packed_coefficients * log_probs), log_probs

    def padded(params: Any) -> tuple[jax.Array, jax.Array]:
        log_probs = jax.nn.log_softmax(models.apply(model, params, tokens)[:, :-1])
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        log_probs = jnp.pad(chosen, ((0, 0), (1, 0)))
        return jnp.sum(coefficients * log_probs), log_probs

    with jax.default_matmul_precision("highest"):
        results = [
            jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=tiny.QUICKLY)(params)
            for total in (packed, padded)
        ]
    ((_, log_probs), gradients), ((_, expected), expected_gradients) = results
    actions = tree.action_mask
    log_probs = np.asarray(log_probs).reshape(-1)[layout.slot[actions]]
    return [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in zip(
            jax.tree.leaves((log_probs, gradients)),
            jax.tree.leaves((np.asarray(expected)[actions], expected_gradients)),
            strict=True,
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed", "row_length"),
    [
        pytest.param("mistral", 1, 26, id="window-split"),
        pytest.param("mistral", 0, 128, id="window", marks=pytest.mark.slow),
        pytest.param("llama3", 1, 26, id="split", marks=pytest.mark.slow),
        pytest.param("llama3", 0, 128, id="whole", marks=pytest.mark.slow),
    ],
)
def test_log_probs_and_gradients_equal_a_row_per_path(family, seed, row_length):
    differences = compare(family, random_tree(seed), row_length=row_length)
    # float32, where the sums of a tree have another order. Some CPUs round up to 2.2e-6 apart.
    assert max(differences) < 4e-6, differences


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama3", "mistral"])
def test_log_probs_and_gradients_through_the_tpu_kernel_equal_a_row_per_path(family, monkeypatch):
    monkeypatch.setattr(flash_kernels, "BLOCK_SIZES", (128,))
    differences = compare(family, random_tree(2), kernel=True)
    assert max(differences) < 2e-6, differences


def test_random_trees_are_deep():
    for seed in range(3):
        groups = packing._groups(*random_tree(seed)[1:])
        assert max(len(run.path) for group in groups for run in group.runs()) >= 3
