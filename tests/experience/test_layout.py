"""The shapes of batches in packed rows."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl.experience.config import BatchConfig
from tpu_rl.experience.layout import Widths, pack_experience
from tpu_rl.experience.source import Source, with_widths
from tpu_rl.train import sharding
from tpu_rl.types import Demonstrations


def demonstrations(*lengths: int) -> Demonstrations:
    """Return texts of a prompt of two tokens and so many learned ones each."""
    columns = np.arange(128)[None]
    ends = 2 + np.array(lengths)[:, None]
    mask = (columns >= 2) & (columns < ends)
    arrays: Any = (mask.astype(np.int32), mask, np.arange(len(lengths)), mask.astype(np.float32))
    return Demonstrations(*arrays)


def test_a_narrower_batch_has_the_shapes_of_a_wider_one():
    """Also after a resume. Nothing is computed for what is added: no slot, and no tile."""
    batch = BatchConfig(prompts=4, group_size=1, row_length=256, micro_batch_rows=1)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    wide, narrow = demonstrations(120, 120, 60, 60), demonstrations(20, 6, 3, 3)
    widths = Widths()

    def shapes(data: Any, widths: Widths | None) -> Any:
        return jax.tree.map(jnp.shape, pack_experience(batch, data, mesh, widths=widths))

    known = shapes(wide, widths)
    alone = pack_experience(batch, narrow, mesh).layout
    assert alone.actions.shape < known.layout.actions
    state = json.loads(json.dumps(widths.get_state()))
    assert shapes(narrow, widths) == known
    resumed = Widths()
    resumed.set_state(state)
    padded = pack_experience(batch, narrow, mesh, widths=resumed).layout
    assert jax.tree.map(jnp.shape, padded) == known.layout
    count = alone.actions.shape[-1]
    rows = alone.actions.shape[1]
    np.testing.assert_array_equal(padded.actions[:, :rows, :, :count], alone.actions)
    assert (np.asarray(padded.actions)[..., count:] == batch.row_length).all()


def test_widths_are_part_of_checkpoints_and_earlier_ones_have_none():
    states = []
    plain = Source(lambda step, state: None, lambda: lambda: {"row": 3}, states.append)
    widths = Widths()
    widths.set_state({"actions": [1, 2, 1, 96]})
    source = with_widths(plain, widths)
    saved = source.get_state()
    source.set_state({"row": 5})
    assert widths.get_state() == {}
    source.set_state(saved)
    assert widths.get_state() == {"actions": [1, 2, 1, 96]}
    assert states == [{"row": 5}, {"row": 3}]
