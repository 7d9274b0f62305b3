"""Layouts: every token in exactly one place, prompts shared, and the same numbers as a row per
completion."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.errors import InputError
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.layout import layout_of
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.models import layers
from tpu_rl.proofs import tiny
from tpu_rl.train import packing
from tpu_rl.types import Experience, Layout, PackedRows


def laid_out(groups: tiny.Groups, **cut: Any) -> tuple[Layout, np.ndarray, np.ndarray]:
    """(layout, action_mask, group_id) of random texts of those lengths."""
    _, mask, group_id = tiny.texts(np.random.default_rng(0), groups)
    return packing.assign_slots(mask, group_id, **(dict[str, Any](tiny.ROWS) | cut)), mask, group_id


def test_two_groups_in_one_row_by_hand():
    mask = np.array([[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    layout = packing.assign_slots(mask, np.array([7, 7, 3, 3]), row_length=11, micro_batch_rows=1)
    expected = {
        # Prompt of group 7, its completions of two and one tokens; prompt of group 3, a completion
        # with tool output.
        "source": [0, 1, 2, 3, 6, 8, 9, 10, 11, -1, -1],
        "positions": [0, 1, 2, 3, 2, 0, 1, 2, 3, 0, 0],
        "segment_ids": [1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0],
        "branch_ids": [0, 0, 1, 1, 2, 0, 1, 1, 1, 0, 0],
        "sequence_ids": [0, 0, 1, 1, 2, 0, 3, 3, 3, 0, 0],
        "previous": [0, 0, 1, 2, 1, 5, 5, 6, 7, 9, 10],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(vars(layout)[name], [[[values]]], err_msg=name)
    np.testing.assert_array_equal(
        layout.slot, [[0, 1, 2, 3], [0, 1, 4, -1], [5, 6, 7, 8], [-1, -1, -1, -1]]
    )
    np.testing.assert_array_equal(layout.minibatch, [0, 0, 0, 1])


def random_case(seed: int) -> tuple[tiny.Groups, dict[str, int]]:
    random = np.random.default_rng(seed)
    groups = [
        (int(random.integers(0, 6)), random.integers(0, 9, random.integers(1, 5)).tolist())
        for _ in range(random.integers(4, 12))
    ]
    groups += [(2, (1, 2)), (3, (4,)), (1, (5, 5))]  # Never too few for the minibatches.
    cut = {"row_length": 14, "micro_batch_rows": 2, "minibatches": 1, "row_limit": 0}
    return groups, cut | {
        "row_length": int(random.integers(14, 40)),
        "micro_batch_rows": int(random.integers(1, 4)),
        "minibatches": int(random.integers(1, 4)),
    }


@pytest.mark.parametrize("seed", range(20))
def test_random_layouts_hold_every_token_exactly_once(seed):
    groups, cut = random_case(seed)
    layout, mask, group_id = laid_out(groups, **cut)
    starts = np.array([prompt for prompt, completions in groups for _ in completions])
    lengths = np.array([length for _, completions in groups for length in completions])
    learned = np.asarray(mask.any(1))
    column = np.arange(mask.shape[1])[None]
    completion = (
        learned[:, None] & (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    )
    prompt = learned[:, None] & (column < starts[:, None])
    source, slot = layout.source.reshape(-1), layout.slot

    # Completions: one slot a token, and back. Nothing else has a slot but prompts.
    np.testing.assert_array_equal(slot >= 0, completion | prompt)
    assert len(set(slot[completion])) == completion.sum()
    np.testing.assert_array_equal(source[slot[completion]], np.flatnonzero(completion))
    # Prompts: in the row of their completion, in the same segment, each token at its own position
    # and of its group.
    branches, segments = layout.branch_ids.reshape(-1), layout.segment_ids.reshape(-1)
    for row in np.flatnonzero(learned):
        prompt_slots, own = (
            slot[row, : starts[row]],
            slot[row, starts[row] : starts[row] + lengths[row]],
        )
        assert not branches[prompt_slots].any()
        assert len({*branches[own]}) == 1
        assert branches[own[0]] > 0
        np.testing.assert_array_equal(
            layout.positions.reshape(-1)[own], starts[row] + np.arange(lengths[row])
        )
        whole = np.concatenate([prompt_slots, own])
        assert len({*segments[whole]} | {0}) == 2
        assert len({*(whole // cut["row_length"])}) == 1
        np.testing.assert_array_equal(group_id[source[whole] // mask.shape[1]], group_id[row])
        # `previous` walks from the last token back through the prompt to the first.
        previous = layout.previous.reshape(-1, cut["row_length"])[whole[0] // cut["row_length"]]
        np.testing.assert_array_equal(
            previous[whole[1:] % cut["row_length"]], whole[:-1] % cut["row_length"]
        )
    # No slot is filled twice over: as many as prompts per segment and completions need.
    repeats = layout.segment_ids.max(-1).sum()
    assert repeats >= len({*group_id[learned]})
    assert (source >= 0).sum() == completion.sum() + ((branches == 0) & (segments > 0)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_pack_and_unpack_are_inverse(seed):
    groups, cut = random_case(seed)
    layout, _, group_id = laid_out(groups, **cut)
    values = np.random.default_rng(seed).normal(size=layout.slot.shape).astype(np.float32)
    # A prompt's values are those of the piece's first row, so give the rows of a group the same
    # there.
    starts = np.array([prompt for prompt, completions in groups for _ in completions])
    first = np.searchsorted(group_id, group_id)
    values = np.where(np.arange(values.shape[1])[None] < starts[:, None], values[first], values)
    packed = layout.pack(jnp.asarray(values), fill=-7.0)
    np.testing.assert_array_equal(packed[layout.source < 0], -7)
    np.testing.assert_array_equal(
        layout.unpack(packed, fill=-9.0), np.where(layout.slot >= 0, values, -9.0)
    )


def test_a_prompt_stands_once_for_its_group():
    layout, mask, _ = laid_out([(5, (2, 3, 4))], row_length=16, micro_batch_rows=1)
    assert (layout.source >= 0).sum() == 5 + 2 + 3 + 4
    assert layout.source.shape == (1, 1, 1, 16)


def groups_of_rows(layout, group_id):
    """Return the groups of each packed row of the first step that has some, in their order."""
    width = layout.slot.shape[1]
    sources = layout.source[0].reshape(-1, layout.source.shape[-1])
    return [
        list(dict.fromkeys(int(group_id[text]) for text in row[row >= 0] // width))
        for row in sources
        if (row >= 0).any()
    ]


def test_best_fit_fills_rows_by_falling_size():
    # Sizes 5, 7, 3, 6 in rows of 10: [7], [6], [5], and 3 beside 7. First-fit has the same.
    layout, _, group_id = laid_out(
        [(1, (4,)), (1, (6,)), (1, (2,)), (1, (5,))], row_length=10, micro_batch_rows=3
    )
    assert groups_of_rows(layout, group_id) == [[1, 2], [3], [0]]
    # A group of 11 in two rows of 6; then 7, and 3 beside it. First-fit puts 3 beside the first 6.
    layout, _, group_id = laid_out(
        [(1, (5, 5)), (1, (6,)), (1, (2,))], row_length=10, micro_batch_rows=3
    )
    assert groups_of_rows(layout, group_id) == [[0], [0], [1, 2]]


@pytest.mark.parametrize(("placement", "rows"), [("split", 2), ("kept", 3)])
def test_a_group_is_split_where_the_step_takes_fewer_micro_batches(placement, rows):
    """Groups of 7, 7 and 6 slots in rows of 10: the last one fits beside the others in two parts,
    each with the prompt."""
    groups = [(1, (6,)), (1, (6,)), (1, (2, 2))]
    cut = {"row_length": 10, "placement": placement}
    layout, _, group_id = laid_out(groups, micro_batch_rows=1, **cut)
    assert len(groups_of_rows(layout, group_id)) == rows
    # One micro-batch has room for all three rows, and no group is split.
    layout, _, group_id = laid_out(groups, micro_batch_rows=3, **cut)
    assert sum(2 in row for row in groups_of_rows(layout, group_id)) == 1


def test_a_group_longer_than_a_row_is_split_with_its_prompt_repeated():
    layout, _, _ = laid_out([(3, (4, 4, 4, 4))], row_length=12, micro_batch_rows=2)
    np.testing.assert_array_equal((layout.source[0, 0] >= 0).sum(-1), [11, 11])
    np.testing.assert_array_equal(layout.segment_ids.max(-1), [[[1, 1]]])
    np.testing.assert_array_equal(layout.branch_ids.max(-1), [[[2, 2]]])
    np.testing.assert_array_equal(layout.sequence_ids.max(-1), [[[2, 2]]])


def test_minibatches_take_the_groups_in_order():
    layout, _, group_id = laid_out(
        [(2, (3, 3)), (1, (2, 0)), (4, (5, 1)), (2, (2, 2))], minibatches=2
    )
    np.testing.assert_array_equal(layout.minibatch, [0, 0, 0, 2, 1, 1, 1, 1])
    for part in range(2):
        taken = layout.source[part][layout.source[part] >= 0] // layout.slot.shape[1]
        assert {*group_id[taken]} == {2 * part, 2 * part + 1}


def test_the_number_of_micro_batches_takes_few_values():
    def micro_batches(rows: int, row_limit: int = 0) -> int:
        layout, _, _ = laid_out(
            [(1, (9,))] * rows, row_length=10, micro_batch_rows=1, row_limit=row_limit
        )
        return layout.source.shape[1]

    assert [micro_batches(rows) for rows in range(1, 14)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        8,
        12,
        12,
        12,
        12,
        16,
    ]
    assert [micro_batches(rows, row_limit=6) for rows in (1, 5, 6)] == [6, 6, 6]


def test_what_does_not_fit_is_the_users_to_mend():
    with pytest.raises(
        InputError, match="a prompt of 3 tokens and a completion of 8 exceed a row"
    ) as error:
        laid_out([(3, (2, 8))], row_length=10)
    assert "--batch.row-length" in error.value.fix
    # Split, these two rows would hold it; a preference pair must not be.
    with pytest.raises(
        InputError, match="a prompt of 3 tokens and its 2 completions of 9 exceed a row"
    ) as error:
        laid_out([(1, (2, 2)), (3, (4, 5)), (3, (4, 4))], row_length=11, placement="whole")
    assert "--batch.row-length" in error.value.fix
    layout, _, _ = laid_out(
        [(1, (2, 2)), (3, (4, 5)), (3, (4, 4))], row_length=12, placement="whole"
    )
    assert (layout.source >= 0).sum() == 5 + 12 + 11


@pytest.mark.parametrize(
    ("groups", "filled"),
    [([(1, (2,)), (1, (3,)), (1, (0,))], [0, 3, 4]), ([(1, (0,)), (1, (0,))], [0, 0, 0])],
    ids=["fewer groups than minibatches", "nothing to learn from"],
)
def test_empty_minibatches_are_padding_that_teaches_nothing(groups, filled):
    data, layout = tiny.experience(tiny.rollout(groups=groups, columns=4), minibatches=3)
    np.testing.assert_array_equal((layout.source >= 0).sum((1, 2, 3)), filled)
    np.testing.assert_array_equal(layout.minibatch, [1, 2, 3] if any(filled) else [3, 3])
    params = tiny.init_params(MODEL)
    algorithm = grpo(GrpoConfig(), tiny.roles(MODEL), tiny.SAMPLING)

    def of_first_micro_batch(params: tiny.Params) -> tuple[jax.Array, jax.Array]:
        batch, _ = algorithm.make_batch(Experience(data, layout), params, ())
        batch = jax.tree.map(lambda x: x[0, 0], batch)
        return algorithm.loss(params, batch)[0], jnp.abs(batch.weights["policy"]).max()

    program = jax.jit(
        jax.value_and_grad(of_first_micro_batch, has_aux=True), compiler_options=tiny.QUICKLY
    )
    (loss, largest_weight), gradient = program(params)
    assert (loss, largest_weight) == (0, 0)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


def test_rows_of_a_group_must_share_their_prompt():
    mask = np.array([[0, 1, 1], [0, 0, 1]], bool)
    with pytest.raises(ValueError, match="prompts of 1 and 2 tokens"):
        packing.assign_slots(mask, np.zeros(2, int), row_length=8, micro_batch_rows=1)


# --- packed rows mean what a row per completion means ---

MODEL = tiny.attention_model()


def relative(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual), np.asarray(expected)
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.slow
def test_packed_hidden_states_log_probs_and_gradients_equal_a_row_per_completion():
    data, layout = tiny.experience(tiny.rollout(), micro_batch_rows=4)
    policy = tiny.role(MODEL, "policy")
    params = tiny.init_params(MODEL)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[0, 0], layout.rows(data.tokens))
    shape = data.tokens.shape
    coefficients = jnp.where(data.action_mask, np.random.default_rng(1).normal(size=shape), 0.0)

    def packed(params: tiny.Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        log_probs = token_log_probs(policy, params, rows, tiny.SAMPLING.temperature).log_probs
        return jnp.sum(layout.pack(coefficients)[0, 0] * log_probs), (
            policy.hidden(params, rows),
            log_probs,
        )

    def padded(params: tiny.Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        positions, ones = jnp.broadcast_to(jnp.arange(shape[1]), shape), jnp.ones(shape, jnp.int32)
        log_probs = tiny.plain_log_probs(
            MODEL, params["policy"], data.tokens, tiny.SAMPLING.temperature
        )
        hidden = MODEL.hidden(params["policy"], data.tokens, positions, ones, 0 * ones)
        return jnp.sum(coefficients * log_probs), (hidden, log_probs)

    (_, (hidden, log_probs)), gradient = jax.jit(jax.value_and_grad(packed, has_aux=True))(params)
    (_, (plain_hidden, plain_log_probs)), plain_gradient = jax.jit(
        jax.value_and_grad(padded, has_aux=True)
    )(params)
    placed = layout.slot >= 0
    slots = layout.slot[placed]
    hidden = np.asarray(hidden).reshape(-1, hidden.shape[-1])
    assert relative(hidden[slots], np.asarray(plain_hidden)[placed]) < 2e-6
    actions = np.asarray(data.action_mask)
    log_probs = np.asarray(log_probs).reshape(-1)[layout.slot[actions]]
    assert relative(log_probs, np.asarray(plain_log_probs)[actions]) < 2e-6
    for actual, expected in zip(
        *map(jax.tree.leaves, (gradient["policy"], plain_gradient["policy"])), strict=True
    ):
        assert relative(actual, expected) < 2e-6


def test_over_micro_batches_equals_each_by_itself():
    data, layout = tiny.experience(tiny.rollout(), minibatches=2, micro_batch_rows=1)
    rows = layout.rows(data.tokens)
    assert rows.tokens.shape[:2] == (2, 2)
    batch = {"rows": rows, "rewards": layout.pack(data.rewards)}
    mapped = packing.over_micro_batches(
        lambda micro: micro["rows"].tokens * micro["rewards"], batch
    )
    np.testing.assert_array_equal(mapped, rows.tokens * batch["rewards"])


# --- what need not be computed ---


def tiled_case(seed: int, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A random layout with tiles of three or four slots, lists as long as need be."""
    monkeypatch.setattr(packing, "TILE", 4)
    monkeypatch.setattr(packing, "WORTH_TILES", 1.0)
    groups, cut = random_case(seed)
    return laid_out(groups, **cut | {"row_length": (24, 32, 39)[seed % 3], "minibatches": 1})[0]


def slots_of(layout: Layout) -> layers.TokenIndex:
    """Of all rows, [R, S]."""
    fields = (layout.positions, layout.segment_ids, layout.visible_until)
    positions, segments, until = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in fields)
    return layers.TokenIndex(
        jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape),
        positions,
        segments,
        until,
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_tiles_list_holds_all_that_its_tokens_see(seed, monkeypatch):
    layout = tiled_case(seed, monkeypatch)
    slots = slots_of(layout)
    assert layout.key_tiles is not None
    tiles = layout.key_tiles.reshape(-1, *layout.key_tiles.shape[3:])
    count = tiles.shape[1]
    size = slots.index.shape[1] // count
    is_real = (slots.segment_ids > 0)[:, :, None]
    seen = np.asarray(layers.attention_mask(slots, slots, None) & is_real)
    seen = seen.reshape(-1, count, size, count, size).any((2, 4))
    listed = np.stack([[np.isin(np.arange(count), of_tile) for of_tile in row] for row in tiles])
    assert (listed | ~seen).all()
    # No more than those but for what stands between a tile's first branch and its last, and
    # rounding.
    assert listed.sum() <= 1.35 * seen.sum()
    for of_tile in tiles.reshape(-1, tiles.shape[2]):
        filled = of_tile[of_tile >= 0]
        np.testing.assert_array_equal(
            of_tile, [*sorted({*filled}), *[-1] * (len(of_tile) - len(filled))]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "window", "softcap", "kv_heads"),
    [
        (0, None, None, 2),
        (1, 5, None, 1),
        (2, None, 2.0, 4),
        (3, 3, 2.0, 2),
        (4, None, None, 1),
        (5, 5, 2.0, 2),
    ],
)
def test_tiled_attention_is_the_masks_with_its_gradients(
    seed, window, softcap, kv_heads, monkeypatch
):
    layout = tiled_case(seed, monkeypatch)
    slots = slots_of(layout)
    tiles = jnp.asarray(layout.key_tiles).reshape(len(slots.index), *layout.key_tiles.shape[3:])
    assert tiles.shape[2] < tiles.shape[1]
    random = np.random.default_rng(seed)
    rows, length = slots.index.shape
    query = jnp.asarray(random.normal(size=(rows, length, 4, 6)), jnp.float32)
    key, value = (
        jnp.asarray(random.normal(size=(rows, kv_heads, length, 6)), jnp.float32) for _ in range(2)
    )
    weigh = random.normal(size=query.shape) * (np.asarray(slots.segment_ids) > 0)[..., None, None]
    how = {"scale": 0.7, "sliding_window": window, "softcap": softcap}

    def attend(tiles: jax.Array | None) -> tuple[Any, Any]:
        def total(
            query: jax.Array, key: jax.Array, value: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            mixed = (
                layers.attention(query, key, value, slots, slots, key_tiles=tiles, **how) * weigh
            )
            return mixed.sum(), mixed

        program = jax.jit(
            jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True),
            compiler_options=tiny.QUICKLY,
        )
        (_, mixed), gradients = program(query, key, value)
        return mixed, gradients

    for actual, expected in zip(*map(jax.tree.leaves, (attend(tiles), attend(None))), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_are_seen_whole_have_no_tiles():
    assert laid_out([(3, (90,)), (1, (60,))], row_length=128)[0].key_tiles is None
    layout, _, _ = laid_out([(30, (20, 20, 20, 20)), (5, (40,))], row_length=128)
    assert layout.key_tiles is None  # two tiles
    layout, _, _ = laid_out([(64, (64,) * 8)], row_length=576, micro_batch_rows=1)
    np.testing.assert_array_equal(layout.key_tiles, [[[[[0, -1]] + [[0, i] for i in range(1, 9)]]]])
    assert laid_out([(3, (4, 4))], row_length=131)[0].key_tiles is None  # a prime


@pytest.mark.parametrize("seed", range(4))
def test_actions_are_the_slots_of_the_mask(seed):
    groups, cut = random_case(seed)
    layout, mask, _ = laid_out(groups, **cut)
    learned = np.asarray(layout.pack(jnp.asarray(mask)))
    row_length = learned.shape[-1]
    lists = layout.actions.reshape(-1, layout.actions.shape[-1])
    for row, slots in zip(learned.reshape(-1, row_length), lists, strict=True):
        chosen = np.flatnonzero(row)
        np.testing.assert_array_equal(slots, [*chosen, *[row_length] * (len(slots) - len(chosen))])
    assert layout.actions.shape[-1] < learned.sum(-1).max() + -(-row_length // 8)


def test_batches_of_as_many_texts_have_one_shape():
    """However long the texts are, so that a run compiles its programs once."""
    batch = BatchConfig(prompts=4, group_size=3, row_length=32, micro_batch_rows=2)
    shapes = set()
    for seed in range(8):
        random = np.random.default_rng(seed)
        lengths = random.integers(1, 2 + 2 * seed, 12)
        mask = (np.arange(20) >= 4) & (np.arange(20) < 4 + lengths[:, None])
        data = SimpleNamespace(images=None, action_mask=mask, group_id=np.repeat(np.arange(4), 3))
        shapes.add(layout_of(batch, data).source.shape)
    assert shapes == {(1, 6, 2, 32)}


def test_a_micro_batch_without_tokens_is_not_computed():
    """NaN in a skipped micro-batch does not matter: `function` is not called for it."""
    layout, _, _ = laid_out([(3, (4, 4))], row_length=16, micro_batch_rows=1, row_limit=3)
    rows = layout.rows(jnp.zeros(layout.slot.shape, jnp.int32))
    assert packing.is_occupied(rows).tolist() == [[True, False, False]]
    assert packing.occupancy(layout.source)[0] == 0
    larger, _, _ = laid_out([(3, (4, 4))], row_length=16, micro_batch_rows=4, row_limit=12)
    assert packing.occupancy(larger.source)[0] == 0.75

    def nan_if_empty(micro_batch: PackedRows) -> jax.Array:
        is_token = micro_batch.segment_ids > 0
        return jnp.where(is_token.any(), 1.0 * is_token, jnp.nan)

    result = packing.over_micro_batches(nan_if_empty, rows)
    np.testing.assert_array_equal(result, layout.segment_ids > 0)
