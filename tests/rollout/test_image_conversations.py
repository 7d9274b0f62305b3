"""Conversations in which the environment shows images."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.fixtures.picture_model import PER_IMAGE, picture_model, picture_tokenizer
from tpu_rl import models
from tpu_rl.environments.pool import EnvironmentLimits, EnvironmentPool
from tpu_rl.errors import InputError
from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.layout import pack_experience
from tpu_rl.losses.log_probs import token_log_probs
from tpu_rl.models.vision.features import Features
from tpu_rl.rollout import image_prompts, records, requests
from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.image_prompts import ImageFeatures, ImageTable
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.sampler import SamplerConfig
from tpu_rl.tasks.pictures import PictureLook, PicturesData, PicturesSource
from tpu_rl.tokenizers.images import MARK
from tpu_rl.train import packing, sharding

ROWS: list[Any] = [*PicturesSource(PicturesData(questions="look"), "train", 3)]
FIRST = 46


class Gallery(PictureLook):
    """Shows the cell of the number of letters that the model wrote; each turn another one."""

    def step(self, text: str):
        if self.looked == 2:
            return "", 1.0, True, {}
        place = len(text) % 4 + 1
        return super().step(f"look {place},{self.looked + 1}")


@pytest.fixture(scope="module")
def rolled():
    """Return (tokenizer, model, params, scored completions of three groups of four)."""
    tokenizer = picture_tokenizer()
    model, params = picture_model()
    role = models.Select("policy")
    settings = SamplerConfig(
        max_new_tokens=48,
        stop_ids=tokenizer.eos_ids,
        logit_bias=((tokenizer.eos_ids[0], 2.5),),
        samples_per_prompt=4,
        prompt_length=32,
    )
    pool = EnvironmentPool(Gallery, EnvironmentLimits(isolate=False))
    policy = RolloutPolicy(models.policy(model, role), lambda tree: tree, sharding.make_mesh())
    policy = policy._replace(with_images=image_prompts.with_images(model, role))
    environment = requests.Environment(pool, 5, 20)
    decoding = Decoding(policy, settings, 32, environment=environment)
    engine = make_engine(decoding, Scorer(tokenizer))
    with jax.set_mesh(policy.mesh):
        scored = engine.roll_out({"policy": params}, RolloutRequest(ROWS, step=1))
    return tokenizer, model, params, scored


def test_the_gap_over_turns_with_images_is_that_of_text(rolled):
    tokenizer, model, params, scored = rolled
    rollout = scored.rollout
    counts = scored.episodes.counts
    assert set(counts["turns"]) == {3}
    # Two images of each episode, and a line end behind each.
    assert set(counts["observation_tokens"]) == {2 * (PER_IMAGE + 1)}
    assert [len(images) for images in scored.episodes.images] == [2] * 12
    assert np.asarray(rollout.images).shape == (12, 3, 3, 32, 32)
    assert len({np.asarray(rollout.images)[row, 2].tobytes() for row in range(12)}) > 2
    batch = BatchConfig(prompts=3, group_size=4, row_length=512, micro_batch_rows=2)
    mesh = sharding.make_mesh()
    role = models.role(model, lambda tree: tree)
    log_probs = jax.jit(lambda rows: token_log_probs(role, params, rows).log_probs)

    def exact(rollout):
        experience = pack_experience(batch, rollout, mesh, images=tokenizer.images)
        rows = experience.layout.rows(experience.data.tokens)
        packed = packing.over_micro_batches(log_probs, rows)
        return np.asarray(experience.layout.unpack(packed)), np.asarray(experience.layout.images)

    mask = rollout.action_mask
    with jax.set_mesh(mesh):
        of_trainer, stored = exact(rollout)
        of_others, _ = exact(replace(rollout, images=np.asarray(rollout.images)[:, ::-1]))
    assert np.abs(rollout.log_probs - of_trainer)[mask].max() <= 1e-4
    assert np.abs(of_others - of_trainer)[mask].max() > 1e-2
    # Each group's first image stands once in a micro-batch, and so do equal cells.
    pieces = np.asarray(rollout.images).reshape(3, -1, 3 * 32 * 32)
    distinct = sum(len({piece.tobytes() for piece in group}) for group in pieces)
    assert stored.reshape(-1, 3 * 32 * 32).any(1).sum() <= distinct < 36


def test_records_have_the_images_and_rewards_read_texts(rolled):
    tokenizer, _, _, scored = rolled
    record = records.records(scored, 1)[0]
    assert len(record["images"]) == 3
    shown = [message for message in record["messages"] if message["role"] == "user"]
    assert [message["content"] for message in shown] == ["<image>\n"] * 2
    assert "images" not in shown[0]
    text = tokenizer.decode(scored.rollout.tokens[0].tolist(), skip_special=False)
    assert text.count("<image>") == 3


def test_equal_images_have_equal_ids_and_rows_get_their_own():
    tokenizer = picture_tokenizer()
    red, blue = (Image.new("RGB", (32, 32), color) for color in ("red", "blue"))
    features: Any = image_prompts.with_images(picture_model()[0])
    table = ImageTable(tokenizer, features)
    first = table.place(tokenizer.encode_prompt(f"{MARK}{MARK}a"), [red, blue])
    again = table.place(tokenizer.encode_prompt(f"{MARK}b"), [blue.copy()])
    begin = len(tokenizer.prefix_ids)
    assert first[begin:-1] == [*range(FIRST, FIRST + 2 * PER_IMAGE)]
    assert again[begin:-1] == [*range(FIRST + PER_IMAGE, FIRST + 2 * PER_IMAGE)]
    with pytest.raises(InputError, match="2 images, and its text 1 places"):
        table.place(tokenizer.encode_prompt(f"{MARK}b"), [blue, red])
    with pytest.raises(InputError, match="follow an image directly"):
        table.place(tokenizer.encode_prompt(MARK), [blue])
    tokens = np.zeros((2, len(first)), np.int32)
    tokens[0] = first
    tokens[1, : len(again)] = again
    fields: dict[str, Any] = dict.fromkeys(
        (
            "action_mask",
            "log_probs",
            "behaviour_log_probs",
            "rewards",
            "group_id",
            "policy_step",
            "birth_key",
            "truncated",
            "scored",
        )
    )
    rollout = image_prompts.Rollout(**(fields | {"tokens": tokens}))
    own = table.with_own_images(rollout)
    assert own.tokens[0].tolist() == first
    assert own.tokens[1, begin : begin + PER_IMAGE].tolist() == [*range(FIRST, FIRST + PER_IMAGE)]
    images: Any = own.images
    np.testing.assert_array_equal(images[1, 0], images[0, 1])
    assert not images[1, 1].any()


def test_tokens_get_all_that_their_features_have():
    """States, what later layers add (DeepStack) and places in images stand where tokens do."""
    tokenizer = picture_tokenizer()
    deep = jnp.arange(2.0)[:, None, None]

    def compute(params, pieces):
        means = pieces.mean((1, 2, 3)).repeat(PER_IMAGE) + params["shift"]
        states = means[:, None] + jnp.arange(3.0)[None]
        return Features(states, states[None] + 10 * deep)

    features = ImageFeatures(compute, lambda params, made: params | {"made": made}, (3, 32, 32))
    table = ImageTable(tokenizer, features)
    colors = ["white", "black"]
    images = [Image.new("RGB", (32, 32), color) for color in colors]
    ids = table.place(tokenizer.encode_prompt(f"{MARK}a{MARK}b"), images)
    tokens = np.array([ids, ids[::-1]])
    params, read = table.read({"shift": 0.5}, tokens)
    flat, before = read.reshape(-1), tokens.reshape(-1)
    places = np.flatnonzero(before >= FIRST)
    np.testing.assert_array_equal(np.delete(flat, places), np.delete(before, places))
    # The place inside of a piece stays.
    assert ((flat - before)[places] % PER_IMAGE == 0).all()
    made = params["made"]
    expected = np.where(before[places] < FIRST + PER_IMAGE, 1.5, -0.5)
    index = flat[places] - FIRST
    np.testing.assert_allclose(made.states[index], expected[:, None] + np.arange(3))
    np.testing.assert_allclose(made.deep[1, index], made.states[index] + 10)
    assert not np.delete(made.states, index, 0).any()
    few = ImageTable(tokenizer, features, most=1)
    ids = few.place(tokenizer.encode_prompt(f"{MARK}a{MARK}b"), images)
    with pytest.raises(InputError, match="no longer kept"):
        few.read({"shift": 0.5}, np.array([ids]))
