"""Images in packed rows: once for each group, and with the right tokens."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.picture_model import picture_model, picture_tokenizer
from tpu_rl import models
from tpu_rl.data.encoding import bucket
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.layout import _with_rest_of_images, layout_of, with_images
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.rollout import image_prompts
from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.sampler import SamplerConfig
from tpu_rl.tasks.pictures import PicturesData, PicturesSource
from tpu_rl.tokenizers.images import ImageReader
from tpu_rl.train import sharding
from tpu_rl.types import Demonstrations

TOWER: Any = SimpleNamespace(features_per_piece=2, advances=lambda pieces: None, is_two_way=False)
READER = ImageReader("", 4, "<image>", first_id=10, tower=TOWER)


def completions(images_of_group, group_size):
    """Rows of a begin token, the images of their group and two actions. Pixels number images."""
    rows = [group for group in range(len(images_of_group)) for _ in range(group_size)]
    tokens = np.zeros((len(rows), 8), np.int32)
    mask = np.zeros(tokens.shape, bool)
    pixels = np.zeros((len(rows), 2, 3, 1, 1), np.float32)
    for row, group in enumerate(rows):
        count = images_of_group[group]
        prompt = [1, *range(10, 10 + 2 * count)]
        tokens[row, : len(prompt) + 2] = [*prompt, 5, 6]
        mask[row, len(prompt) : len(prompt) + 2] = True
        for image in range(count):
            pixels[row, image] = 10 * group + image + 1
    arrays: list[Any] = [tokens, mask, np.array(rows, np.int32), None, pixels]
    return Demonstrations(*arrays)


def test_a_group_with_an_image_stands_in_one_row():
    """Texts of the same lengths are split over two rows, which saves a micro-batch."""
    data = completions([1, 1, 1], group_size=2)
    batch = BatchConfig(prompts=3, group_size=2, row_length=12, micro_batch_rows=1)

    def rows_of_groups(data: Any) -> list[int]:
        layout: Any = layout_of(batch, data)
        row_of_slot = np.asarray(layout.slot) // batch.row_length
        return [len(np.unique(row_of_slot[data.group_id == group, 1:3])) for group in range(3)]

    assert rows_of_groups(data) == [1, 1, 1]
    assert rows_of_groups(replace(data, images=None)) == [1, 2, 1]


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("micro_batch_rows", [1, 4])
def test_tokens_refer_to_the_images_of_their_group(share_prefixes, micro_batch_rows):
    images_of_group = [1, 0, 2, 1, 2]
    data = completions(images_of_group, group_size=2)
    batch = BatchConfig(
        prompts=5,
        group_size=2,
        row_length=16,
        micro_batch_rows=micro_batch_rows,
        share_prefixes=share_prefixes,
    )
    layout = layout_of(batch, data)
    layout, moved = with_images(layout, data, READER)
    assert moved.images is None
    source = np.asarray(layout.source)
    tokens = np.where(source >= 0, moved.tokens.reshape(-1)[np.maximum(source, 0)], 0)
    pixels = np.asarray(layout.images)
    seen = {}
    stored = 0
    for m, k in np.ndindex(source.shape[:2]):
        stored += int((pixels[m, k, :, 0, 0, 0] > 0).sum())
        for slot in np.argwhere(tokens[m, k] >= 10):
            token = tokens[m, k][tuple(slot)]
            row, column = divmod(int(source[m, k][tuple(slot)]), 8)
            shown = int(pixels[m, k, (token - 10) // 2, 0, 0, 0])
            # Each image has two tokens, behind the first token of the row.
            assert shown == 10 * data.group_id[row] + (column - 1) // 2 + 1
            assert (token - 10) % 2 == (column - 1) % 2
            seen[shown] = seen.get(shown, 0) + 1
    assert stored == sum(images_of_group)
    copies = 1 if share_prefixes else 2
    assert seen == {
        10 * group + image + 1: 2 * copies
        for group, count in enumerate(images_of_group)
        for image in range(count)
    }


def test_prompts_share_one_table_and_rows_get_their_images_back():
    prompts = [[1, 10, 11, 5], [1, 5], [1, 10, 11, 12, 13]]
    pixels = [
        np.full((1, 3, 1, 1), 7.0),
        None,
        np.arange(2.0)[:, None, None, None] + np.zeros((1, 3, 1, 1)),
    ]
    shifted, table = image_prompts.table(prompts, pixels, READER)
    assert shifted == [[1, 10, 11, 5], [1, 5], [1, 12, 13, 14, 15]]
    assert table[:, 0, 0, 0].tolist() == [7.0, 0.0, 1.0]
    tokens = np.zeros((6, 5), np.int32)
    for row in range(6):
        tokens[row, : len(shifted[row // 2])] = shifted[row // 2]
    arrays: list[Any] = [tokens, tokens > 0, np.arange(6) // 2]
    rollout: Any = Demonstrations(*arrays)
    own: Any = image_prompts.with_own_images(rollout, pixels, READER, group_size=2)
    for row in range(6):
        assert own.tokens[row, : len(prompts[row // 2])].tolist() == prompts[row // 2]
    assert own.images.shape == (6, 2, 3, 1, 1)
    assert own.images[:, 0, 0, 0, 0].tolist() == [7, 7, 0, 0, 0, 0]


def test_few_numbers_of_images_occur():
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 7, 9, 13, 24, 25)] == [
        *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    ]


def test_tiles_list_the_rest_of_an_image():
    # Images of any size: both have five features, each a piece.
    later = np.array([[[4, 3, 2, 1, 0] * 2]])
    tower: Any = SimpleNamespace(later_features=lambda pieces: later)
    reader = ImageReader("", 4, "<image>", first_id=10, tower=tower)
    # Tiles of four tokens; images in slots 2 to 6 and 9 to 13.
    tokens = np.array([[1, 2, *range(10, 15), 3, 3, *range(15, 20), 5, 5]])
    key_tiles = np.where(np.tri(4) > 0, np.arange(4), -1)[None, None, None]
    source = np.arange(16).reshape(1, 1, 1, 16)
    layout: Any = SimpleNamespace(key_tiles=key_tiles, source=source, images=None)
    listed = _with_rest_of_images(layout, tokens, reader)[0, 0, 0]
    assert [sorted({*row} - {-1}) for row in listed.tolist()] == [
        *([0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3])
    ]


MODEL, PARAMS = picture_model()
TOKENIZER = picture_tokenizer()
QUESTIONS: list[Any] = [*PicturesSource(PicturesData(), "train", 8)]


def operations(function, *arguments):
    """Count the floating-point operations of a program. Nothing is compiled."""
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


def operations_of_tower_in_update(prompts, group_size):
    """Count those that an update does for images, beyond those for the same rows without."""
    read = [TOKENIZER.encode_row(row) for row in QUESTIONS[:prompts]]
    rows = [text for text in read for _ in range(group_size)]
    tokens = np.zeros((len(rows), 40), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, text in enumerate(rows):
        tokens[row, : len(text.ids) + 4] = [*text.ids, 6, 7, 8, 9]
        mask[row, len(text.ids) : len(text.ids) + 4] = True
    group_id = np.repeat(np.arange(prompts), group_size)
    images = np.stack([text.pieces for text in rows])
    arrays: list[Any] = [tokens, mask, group_id, None, images]
    data = Demonstrations(*arrays)
    batch = BatchConfig(prompts=prompts, group_size=group_size, row_length=512, micro_batch_rows=1)
    layout, data = with_images(layout_of(batch, data), data, TOKENIZER.images)
    packed = jax.tree.map(lambda leaf: leaf[0, 0], layout.rows(data.tokens))
    assert layout.source.shape[:3] == (1, 1, 1)
    role = models.role(MODEL, lambda params: params)

    def gradient(params, rows):
        return jax.grad(lambda p: token_log_probs(role, p, rows).log_probs.sum())(params)

    whole = operations(gradient, PARAMS, packed)
    return whole - operations(gradient, PARAMS, packed.replace(images=None))


def operations_of_tower_in_prefill(prompts, group_size):
    """Count those of the features that the sampler gets, once, for groups of completions."""
    select = models.Select("policy")
    counted = []

    class Sampled(Exception):
        pass

    def with_features(params, images):
        counted.append(operations(models.image_features(MODEL), PARAMS, images))
        raise Sampled

    policy = RolloutPolicy(models.policy(MODEL, select), lambda tree: tree, sharding.make_mesh())
    policy = policy._replace(with_images=with_features)
    settings = SamplerConfig(max_new_tokens=4, samples_per_prompt=group_size, prompt_length=32)
    engine = make_engine(Decoding(policy, settings, 32), Scorer(TOKENIZER))
    with pytest.raises(Sampled):
        engine.roll_out({"policy": PARAMS}, RolloutRequest(QUESTIONS[:prompts], step=1))
    return counted[0]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(operations_of_tower_in_update, marks=pytest.mark.slow),
        operations_of_tower_in_prefill,
    ],
)
def test_the_tower_reads_the_image_of_a_group_once(count):
    one = count(1, 1)
    assert one > 5e4
    assert count(1, 8) <= 1.3 * one
    assert count(8, 1) > 6 * one
