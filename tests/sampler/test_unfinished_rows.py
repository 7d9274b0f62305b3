"""Completions that one call leaves unfinished and another goes on with are those of one call."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from tests.fixtures import drafting, several
from tests.fixtures.sampling import (
    KEY,
    PROMPTS,
    ROOT,
    STOP,
    TWO_KINDS,
    decoder,
    same_or_within_rounding,
    trigram,
)
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.runtime import typed_json
from tpu_rl.sampler import (
    PartialCompletion,
    SamplerConfig,
    SegmentConfig,
    Speculation,
    partial_completions,
    sample,
)

BASE = SamplerConfig(
    24, stop_ids=(STOP,), samples_per_prompt=3, prompt_length=8, segments=SegmentConfig(4)
)


def in_parts(take, counts: list[int], step: int = 0):
    """The last of several calls, each of which ends when so many rows have ended; they speak in
    JSON."""
    before, rollout = None, None
    for part, count in enumerate([*counts, None]):
        seen = []

        def stop_when(ended, count=count, seen=seen):
            seen.append(ended)
            return count is not None and ended.sum() >= count

        rollout = take(resumed=before, stop_when=stop_when, policy_step=step + part)
        if count is not None:
            ended = seen[-1]
            assert count <= ended.sum() < len(ended)
            completions = partial_completions(rollout, ended)
            text = json.dumps(typed_json.to_json(completions))
            before = typed_json.from_json(json.loads(text), PartialCompletion)
    return rollout


def require_same(found, expected):
    for name in (
        "tokens",
        "action_mask",
        "log_probs",
        "behaviour_log_probs",
        "birth_key",
        "truncated",
        "group_id",
    ):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.fixture(scope="module")
def toy():
    policy, _ = trigram()
    return policy, {"table": 2.0 * jax.random.normal(jax.random.key(8), (13, 13, 13))}


def spells(tokens: list[int]) -> int | None:
    """The first 4, 7 ends a completion: it may lie across the border of two calls."""
    pairs = zip(tokens, tokens[1:], strict=False)
    return next((i + 2 for i, pair in enumerate(pairs) if pair == (4, 7)), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, {}),
        ({"max_num_seqs": 4}, {"limits": np.arange(1, 13) * 2}),
        ({"repetition_penalty": 1.5, "top_k": 5, "temperature": 0.7}, {"stop_at": spells}),
    ],
    ids=["all at once", "refilled", "penalty and stop"],
)
def test_in_parts_is_in_one_piece(toy, changes, told):
    config = replace(BASE, **changes)
    take = partial(sample, *toy, PROMPTS, KEY, config, **told)
    whole = take()
    assert len(set(whole.action_mask.sum(1))) > 5
    require_same(in_parts(take, [2, 7]), whole)
    require_same(in_parts(take, [5]), whole)


@pytest.mark.nightly
def test_rows_know_when_they_were_begun(toy):
    take = partial(sample, *toy, PROMPTS, KEY, replace(BASE, max_num_seqs=4))
    rollout = in_parts(take, [3, 8], step=5)
    assert set(rollout.policy_step.tolist()) == {5, 6, 7}


def test_who_has_ended_is_told_once(toy):
    told = []
    take = partial(sample, *toy, PROMPTS, KEY, BASE, on_finished=lambda rows: told.append(rows))
    whole = take()
    once = {row: tokens for rows in told for row, tokens in rows.items()}
    told.clear()
    require_same(in_parts(take, [4]), whole)
    assert sum(map(len, told)) == 12
    assert {row: tokens for rows in told for row, tokens in rows.items()} == once


@pytest.mark.nightly
def test_a_draft_goes_on_too():
    config = replace(drafting.BASE, samples_per_prompt=3, segments=SegmentConfig(2))
    take = partial(sample, drafting.POLICY, drafting.PARAMS, PROMPTS, KEY)
    drafted = partial(take, replace(config, speculation=Speculation(3, ngram=2)))
    require_same(in_parts(drafted, [4]), take(config))


@pytest.mark.nightly
def test_a_models_cache_is_filled_again():
    model, params = decoder(**TWO_KINDS)
    config = SamplerConfig(
        40, stop_ids=(5, 9), samples_per_prompt=3, prompt_length=8, segments=SegmentConfig(6, 1, 8)
    )
    take = partial(sample, models.policy(model), params, PROMPTS * 2, KEY, config)
    whole = take()

    def logits_of(rollout):
        return jax.jit(partial(models.apply, model))(params, rollout.tokens)

    assert same_or_within_rounding(in_parts(take, [9]), whole, logits_of, config) >= 22


def test_what_cannot_go_on_is_refused(toy):
    one = PartialCompletion(
        np.ones(24, int),
        np.zeros(24),
        np.zeros(24),
        np.zeros(2, int),
        0,
        ended=False,
        truncated=False,
    )
    with pytest.raises(InputError, match="(?s)too long.*row 3.*24 tokens already"):
        sample(*toy, PROMPTS, KEY, BASE, resumed=[None] * 3 + [one] + [None] * 8)
    with pytest.raises(InputError, match="resumed has shape"):
        sample(*toy, PROMPTS, KEY, BASE, resumed=[None] * 3)


ON_DEVICES = """
import jax
from dataclasses import replace
from functools import partial
from tests.sampler import test_unfinished_rows as here
from tpu_rl.train import sharding

policy, _ = here.trigram()
params = {"table": 2.0 * jax.random.normal(jax.random.key(8), (13, 13, 13))}
# All at once, and in slots that are refilled: prompts of the second half of the rows are begun.
for rows in (256, 4):
    config = replace(here.BASE, max_num_seqs=rows)
    take = partial(here.sample, policy, params, here.PROMPTS * 2, here.KEY, config)
    mesh = sharding.make_mesh(4)
    with jax.set_mesh(mesh):
        found = [here.in_parts(partial(take, mesh=mesh), counts) for counts in ([3, 14], [8])]
    for one in found:
        here.require_same(one, take())
"""


@pytest.mark.nightly
def test_devices_go_on_with_their_own():
    environment = several.virtual_devices(4) | {"PYTHONPATH": "."}
    subprocess.run(
        [sys.executable, "-c", ON_DEVICES], env=environment, cwd=ROOT, check=True, timeout=240
    )
