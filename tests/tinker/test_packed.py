"""Data in packed rows against the data themselves."""

import numpy as np
import pytest

from tpu_rl.tinker import packed
from tpu_rl.tinker.wire import Datum


def datum(tokens, targets=None):
    tokens = np.asarray(tokens, np.int32)
    targets = tokens + 1 if targets is None else np.asarray(targets)
    return Datum(tokens, {"target_tokens": targets})


def group(prompt, sizes, seed=0):
    """Return completions of a prompt, as clients send them: the last token is a target only.

    No two of them begin with the same token.
    """
    rng = np.random.default_rng(seed)
    ids = [
        np.concatenate([prompt, [1000 + number], rng.integers(0, 50, size - 1)])
        for number, size in enumerate(sizes)
    ]
    return [datum(row[:-1], row[1:]) for row in ids]


def pack(data, multiple=1, share_prefixes=True):
    return packed.pack({}, data, 1, multiple, share_prefixes)


def occupied(batch):
    return int((batch.rows.segment_ids > 0).sum())


def text_before(batch, where):
    """Return the tokens up to the slot of a pair [K, R, A], by following `previous`."""
    row = where[:2]
    slot = batch.targets.slots[where]
    text = [int(batch.rows.tokens[row][slot])]
    while batch.rows.positions[row][slot] > 0:
        slot = batch.rows.previous[row][slot]
        text.append(int(batch.rows.tokens[row][slot]))
    return text[::-1]


def test_a_prompt_stands_once_and_its_last_token_has_a_target_for_each_completion():
    data = group(np.arange(100, 120), [5, 7, 9])
    batch, _ = pack(data)
    assert occupied(batch) == 20 + 4 + 6 + 8
    here = (batch.rows.tokens == 119) & (batch.rows.segment_ids > 0)
    [slot] = np.flatnonzero(here)
    used = sorted(set(batch.places[batch.places >= 0].tolist()))
    assert (batch.targets.slots.reshape(-1)[used] == slot).sum() == 3
    # The prompt has one pair for each other token, though all three data have numbers for it.
    assert len(used) == 19 + 3 + 4 + 6 + 8
    assert (batch.places >= 0).sum() == sum(len(one.tokens) for one in data)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_every_token_of_every_datum_follows_its_own_text(seed, share_prefixes):
    rng = np.random.default_rng(seed)
    data = []
    for number in range(6):
        data += group(rng.integers(0, 3, rng.integers(1, 60)), rng.integers(2, 40, 5), number)
    data += [data[3], datum(data[3].tokens[:-1]), datum([7])]
    data = [data[index] for index in rng.permutation(len(data))]
    batch, unpack = pack(data, share_prefixes=share_prefixes)
    numbers = np.arange(batch.targets.slots.size).reshape(batch.targets.slots.shape)
    for one, places in zip(data, unpack(numbers), strict=True):
        assert len(places) == len(one.tokens)
        for index, place in enumerate(places):
            where = np.unravel_index(place, numbers.shape)
            assert text_before(batch, where) == one.tokens[: index + 1].tolist()
            assert batch.targets.tokens[where] == one.inputs["target_tokens"][index]
    total = sum(len(one.tokens) for one in data)
    assert occupied(batch) < total if share_prefixes else occupied(batch) == total
    assert (batch.places >= 0).sum() == total


def test_a_tree_longer_than_a_row_repeats_its_prompt():
    data = group(np.arange(40), [25] * 40)
    batch, _ = pack(data)
    assert batch.rows.tokens.shape[-1] == 64 * packed.LONGEST_TREE
    rows = int((batch.rows.segment_ids > 0).any(-1).sum())
    assert rows > 1
    assert occupied(batch) == 40 * rows + 24 * 40


def test_few_common_tokens_are_not_shared():
    data = group(np.arange(packed.WORTH_SHARING - 1), [30, 30])
    batch, _ = pack(data)
    assert occupied(batch) == sum(len(one.tokens) for one in data)


def test_numbers_of_shared_tokens_stay_those_of_each_datum():
    data = group(np.arange(20), [3, 4])
    for number, one in enumerate(data, start=1):
        one.inputs["weights"] = np.full(len(one.tokens), number, np.float32)
    batch, _ = pack(data)
    weights = batch.numbers.weights[..., 0][batch.places >= 0]
    assert weights.sum() == len(data[0].tokens) + 2 * len(data[1].tokens)
    first = batch.places[batch.places >= 0].min()
    assert sorted(batch.numbers.weights[batch.places == first].reshape(-1)) == [1.0, 2.0]


def test_rows_of_a_micro_batch_are_a_multiple_of_the_devices():
    batch, _ = pack(group(np.arange(20), [3, 4]), multiple=8)
    assert batch.rows.tokens.shape[1] == 8


def test_few_rows_are_empty():
    data = [one for seed in range(6) for one in group(np.arange(40) + 100 * seed, [25] * 8, seed)]
    batch, _ = pack(data)
    assert batch.rows.tokens.shape == (1, 6, 256)
