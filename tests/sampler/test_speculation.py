"""Speculative decoding: the same tokens as plain decoding, whatever the draft, in fewer steps."""

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.drafting import BASE, DRAFTER, PARAMS, POLICY, SMALL
from tests.fixtures.sampling import (
    KEY,
    PROMPTS,
    TWO_KINDS,
    completions,
    contains,
    decoder,
    same_or_within_rounding,
    trigram,
)
from tpu_rl import models
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.errors import InputError
from tpu_rl.sampler import (
    PartialCompletion,
    SamplerConfig,
    SegmentConfig,
    Speculation,
    drafts,
    queues,
    requests,
    sample,
)
from tpu_rl.sampler.cache_ops import with_lengths
from tpu_rl.sampler.drafts import DraftInputs, lookup_draft
from tpu_rl.sampler.slots import NO_TOKEN

ROOT = Path(__file__).parents[2]


SETTINGS = {
    "refilled": {"max_num_seqs": 4},
    "begun late, shrinking and growing": {"segments": SegmentConfig(2, 1, 4)},
    "truncated": {"max_num_seqs": 5, "temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.01},
    "greedy": {"max_num_seqs": 3, "temperature": 0.0, "repetition_penalty": 1.1},
}


def require_same(drafted, plain):
    for name, array in vars(plain).items():
        if "log_probs" in name:
            np.testing.assert_allclose(array, getattr(drafted, name), atol=2e-6)
        else:
            np.testing.assert_array_equal(array, getattr(drafted, name))


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(None, marks=pytest.mark.nightly), "small"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_completions_are_those_of_plain_decoding(settings, model):
    config = replace(BASE, **settings)
    params, limits = PARAMS | SMALL, np.random.default_rng(3).integers(1, 25, 12)
    plain = sample(POLICY, params, PROMPTS, KEY, config, limits=limits)
    verified = []
    config = replace(config, speculation=Speculation(3, model, ngram=2, most_rows=5))
    told = {
        "drafter": DRAFTER if model else None,
        "on_verified": lambda *counts: verified.append(counts),
    }
    require_same(sample(POLICY, params, PROMPTS, KEY, config, limits=limits, **told), plain)
    assert 0 < plain.truncated.sum() < 12
    drafts, tokens = np.sum(verified, axis=0)
    if "segments" in settings:
        assert 0 < tokens < plain.action_mask.sum()
    else:
        assert tokens == plain.action_mask.sum()
    assert drafts <= tokens if model is None else drafts < tokens


@pytest.mark.nightly
def test_look_up_leaves_no_trace_in_what_is_drawn_and_handed_over():
    """With a penalty, which depends on what was drafted before; a bias; rows that stop strings end;
    slots refilled."""
    changes = {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "logit_bias": ((2, -np.inf), (4, 1.5)),
    }
    config = replace(
        BASE, samples_per_prompt=6, max_num_seqs=4, segments=SegmentConfig(5, 4, 24), **changes
    )
    handed, verified = [{}, {}], []
    settings = (config, replace(config, speculation=Speculation(3)))
    plain, drafted = (
        sample(
            POLICY,
            PARAMS,
            PROMPTS,
            KEY,
            sampler_config,
            stop_at=contains("eh", "ab"),
            on_finished=finished.update,
            on_verified=lambda *counts: verified.append(counts),
        )
        for sampler_config, finished in zip(settings, handed, strict=True)
    )
    require_same(drafted, plain)
    assert handed[0] == handed[1] == dict(enumerate(completions(drafted)))
    drafts, tokens = np.sum(verified, axis=0)
    assert drafts < tokens
    ended = [tuple(row[-2:]) in ((4, 7), (0, 1)) for row in completions(plain)]
    assert 0 < sum(ended) < 24


@pytest.mark.slow
def test_a_draft_that_is_always_right_is_taken_whole():
    """The policy itself draws, with the uniforms of the positions, what it will draw: at any
    temperature."""
    limits = np.arange(1, 13)
    config = SamplerConfig(
        12, samples_per_prompt=3, prompt_length=8, max_num_seqs=4, temperature=1.3
    )
    config = replace(config, speculation=Speculation(4, "the same"))
    verified = []
    told = {"drafter": POLICY, "on_verified": lambda *counts: verified.append(counts)}
    sample(POLICY, PARAMS, PROMPTS, KEY, config, limits=limits, **told)
    assert np.sum(verified, axis=0).tolist() == [sum(-(-limits // 5)), limits.sum()]


@pytest.mark.nightly
def test_a_draft_of_what_is_no_token_is_wrong_and_no_harm(monkeypatch):
    model, params = decoder()
    policy, config = models.policy(model), SamplerConfig(8, samples_per_prompt=2, prompt_length=8)

    def no_tokens(params, cache, known, config):
        del params, config
        return jnp.where(known.lengths[:, None] % 2 == 0, 10**6, NO_TOKEN) + jnp.zeros(
            (1, 3), jnp.int32
        ), cache

    plain = sample(policy, params, PROMPTS, KEY, config)
    monkeypatch.setattr(
        drafts,
        "lookup_draft",
        lambda tokens, ngram: lookup_draft(tokens, ngram)._replace(propose=no_tokens),
    )
    require_same(
        sample(policy, params, PROMPTS, KEY, replace(config, speculation=Speculation(3))), plain
    )


@pytest.mark.slow
def test_a_cache_forgets_what_was_drafted_in_full_and_sliding_layers():
    model, params = decoder(**TWO_KINDS)
    right, wrong = (jax.random.randint(jax.random.key(seed), (2, 16), 0, 131) for seed in (0, 1))

    @jax.jit
    def read(cache, tokens, first):
        positions = first + jnp.broadcast_to(jnp.arange(4), (2, 4))
        return model.extend(
            params, cache, tokens, positions, jnp.zeros_like(tokens), jnp.full(2, 4)
        )

    plain = drafted = model.init_cache(params, 2, 24)
    for first in range(0, 16, 4):
        tokens = right[:, first : first + 4]
        if first:
            drafted = with_lengths(
                read(drafted, wrong[:, first : first + 4], first)[1], jnp.full(2, first)
            )
        (expected, plain), (found, drafted) = (
            read(plain, tokens, first),
            read(drafted, tokens, first),
        )
        np.testing.assert_array_equal(expected, found)


@pytest.mark.nightly
def test_caches_of_both_models_forget_what_was_not_drawn():
    """Layers, full and sliding: what a draft left in them must not be seen."""
    model, params = decoder(**TWO_KINDS)
    small, small_params = decoder(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    params = {"policy": params, "small": small_params}
    policy = models.policy(model, lambda tree: tree["policy"])
    drafter = models.policy(small, lambda tree: tree["small"])
    config = SamplerConfig(
        24, stop_ids=(5, 9), samples_per_prompt=2, prompt_length=8, temperature=0.5, max_num_seqs=3
    )
    plain = sample(policy, params, PROMPTS, KEY, config)

    def logits_of(rollout):
        return jax.jit(partial(models.apply, model))(params["policy"], rollout.tokens)

    for how, by in ((Speculation(3, ngram=1), None), (Speculation(2, "small"), drafter)):
        drafted = sample(policy, params, PROMPTS, KEY, replace(config, speculation=how), drafter=by)
        assert same_or_within_rounding(drafted, plain, logits_of, config) >= 7


def looked_up(prompt, completions, own, uniforms, ngram):
    """The draft of a row, by lists of tokens."""
    before = [NO_TOKEN] * ngram

    def longest_match(text, first, here):
        """(tokens, place of what followed) of the longest, of equal ones that nearest to here; (0,
        0) without any."""
        last, best = (before + own)[: -ngram - 1 : -1], (0, 0, 0)
        for place in range(first, len(text)):
            pairs = zip(text[:place][: -ngram - 1 : -1], last, strict=False)
            equal = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            best = max(best, (equal, -abs(place - here), -place) if equal else best)
        return best[0], -best[2]

    found = []
    for completion in completions:
        text = (before + prompt)[-ngram:] + completion
        equal, place = longest_match(text, ngram, ngram + len(own) - len(prompt))
        found.append((equal or -1, text[place:][: len(uniforms)] if equal else []))
    whole = before + own
    equal, place = longest_match(whole, ngram, len(whole))
    for i in range(len(uniforms)):
        whole.append(whole[(place or len(before + own) - 1) + i])
    found.append((equal, whole[len(before + own) :]))

    most = max(equal for equal, _ in found)
    votes, draft = [follow for equal, follow in found if equal == most], []
    for i, uniform in enumerate(uniforms):
        votes = [follow for follow in votes if len(follow) > i]
        tokens = sorted(follow[i] for follow in votes)
        draft.append(tokens[int(uniform * np.float32(len(tokens)))] if tokens else found[-1][1][i])
        votes = [follow for follow in votes if follow[i] == draft[-1]]
    return draft


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 4])
def test_look_up_against_plain_python(others):
    rng = np.random.default_rng(0)
    rows, width, ngram = 300, 14, 3
    text, prompts = rng.integers(0, 3, (rows, width)), rng.integers(1, 6, rows)
    lengths = prompts + rng.integers(0, 8, rows)
    written = rng.integers(0, 3, (rows, others, 9))
    written[np.arange(9) >= rng.integers(0, 10, (rows, others, 1))] = NO_TOKEN
    uniforms = rng.random((rows, 4), np.float32)
    known = DraftInputs(*map(jnp.asarray, (text, lengths, prompts, written, uniforms)))
    found = lookup_draft(4, ngram).propose({}, (), known, BASE)[0]
    for i, guess in enumerate(np.asarray(found).tolist()):
        own = text[i, : lengths[i]].tolist()
        completions = [[token for token in one.tolist() if token != NO_TOKEN] for one in written[i]]
        assert guess == looked_up(own[: prompts[i]], completions, own, uniforms[i], ngram)


@pytest.mark.nightly
def test_what_its_group_has_written_drafts_a_row():
    """The likeliest tokens, which two tokens decide: what follows a first completion is drafted
    whole."""
    verified = []

    def steps(group):
        config = replace(
            BASE, temperature=0.0, stop_ids=(), samples_per_prompt=group, max_num_seqs=1
        )
        told = {"on_verified": lambda *counts: verified.append(counts[0])}
        verified.clear()
        sample(POLICY, PARAMS, PROMPTS, KEY, replace(config, speculation=Speculation(3)), **told)
        return sum(verified)

    assert steps(3) == steps(1) + 2 * len(PROMPTS) * 24 // 4


def orders(config, limits, begun=None):
    """The rows of each pool, in their order."""
    asked = requests.make_request(POLICY, PARAMS, PROMPTS, KEY, config, limits, None, begun)
    device_queues, found = queues.DeviceQueues(asked, config, None), []
    while (device_queues.num_waiting(np.array([len(found[-1]) if found else 0])) > 0).any():
        queue = device_queues.next_pool(np.array([len(found[-1]) if found else 0]))[1]
        found.append(queue.row[: queue.size[0]].tolist())
    return found


def test_rows_of_a_prompt_wait_for_one_another_where_they_are_looked_up():
    """And each prompt is in one pool."""
    drafted = replace(BASE, max_num_seqs=2, speculation=Speculation(3))
    one_by_one = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert orders(drafted, None) == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    assert orders(replace(drafted, speculation=Speculation(3, most_rows=1)), None) == one_by_one
    assert orders(drafted, np.repeat([12, 12, 24, 12], 3)) == [
        [6, 7, 8, 0, 1, 2],
        [3, 9, 4, 10, 5, 11],
    ]
    whole = PartialCompletion(
        np.ones(24, np.int32), *np.zeros((2, 24), np.float32), np.zeros(2, np.uint32), 0, True, True
    )
    assert orders(drafted, None, [whole] + 11 * [None]) == [[1, 2, 3, 4, 5], one_by_one[1]]


def test_what_cannot_be_drafted_is_refused():
    config = replace(BASE, speculation=Speculation(3))
    with pytest.raises(InputError, match="caches that can take tokens back"):
        sample(trigram()[0], PARAMS, PROMPTS, KEY, config)
    drafted = replace(config, speculation=Speculation(3, "small"))
    with pytest.raises(InputError, match="caches that can take tokens back"):
        sample(POLICY, PARAMS, PROMPTS, KEY, drafted, drafter=trigram()[0])
    for speculation, drafter in ((Speculation(3), POLICY), (Speculation(3, "small"), None)):
        with pytest.raises(InputError, match="the draft model is ambiguous"):
            sample(
                POLICY,
                PARAMS,
                PROMPTS,
                KEY,
                replace(config, speculation=speculation),
                drafter=drafter,
            )
    wrong: list[dict[str, Any]] = [
        {"tokens": -1},
        {"ngram": 0},
        {"most_rows": 0},
        {"model": "small"},
    ]
    for values in wrong:
        with pytest.raises(InputError, match="--sampling.speculation"):
            Speculation(**values)


def test_a_run_s_draft_is_a_frozen_role_of_its_own():
    flags = [
        "--sampling.speculation.tokens",
        "3",
        "--sampling.speculation.model",
        "builtin:arithmetic",
    ]
    config = configuration.parse(["arithmetic_grpo", *flags, "--model.lora.rank", "2"])
    assert config.sampling.speculation == Speculation(3, "builtin:arithmetic")
    assert (
        configuration.from_dict(
            type(config), configuration.to_dict(config), configuration.find_class
        )
        == config
    )
    base = models.from_config(roles.model_path("builtin:arithmetic"))
    shapes = roles.param_shapes(config, base)
    assert shapes.keys() == {"base", "policy", "draft"}
    assert jax.tree.structure(shapes["draft"]) == jax.tree.structure(
        jax.eval_shape(base.init, jax.random.key(0))
    )
    assert "draft" not in roles.specs(configuration.parse(["arithmetic_grpo", *flags[:2]]))


ON_A_MESH = """
import jax, numpy as np
from dataclasses import replace
from tests.fixtures.sampling import KEY, PROMPTS
from tests.fixtures.drafting import BASE, DRAFTER, PARAMS, POLICY, SMALL
from jax.sharding import NamedSharding, PartitionSpec
from tpu_rl.train import sharding
from tpu_rl.sampler import SegmentConfig, Speculation, sample
from tpu_rl.sampler.slots import NO_TOKEN, Outputs, slot_axes
from tpu_rl.sampler.speculation import group_completions

mesh, params = sharding.make_mesh(2, 2, 1), PARAMS | SMALL
settings = (
    {"max_num_seqs": 8},
    {"max_num_seqs": 12, "segments": SegmentConfig(2, 1, 8)},
    {"max_num_seqs": 4, "samples_per_prompt": 5},
)
configs = [replace(BASE, **values) for values in settings]
for config, prompts in zip(configs, (PROMPTS, PROMPTS, PROMPTS[:3])):
    alone = sample(POLICY, params, prompts, KEY, config)
    for how, drafter in ((Speculation(3), None), (Speculation(3, "small"), DRAFTER)):
        with jax.set_mesh(mesh):
            drafted = replace(config, speculation=how)
            spread = sample(POLICY, params, prompts, KEY, drafted, mesh=mesh, drafter=drafter)
        np.testing.assert_array_equal(alone.tokens, spread.tokens)
        np.testing.assert_allclose(alone.log_probs, spread.log_probs, atol=2e-6)

# Groups of 5 on devices with 3 rows each: what stands on another device is not looked up.
rows = NamedSharding(mesh, PartitionSpec(slot_axes(mesh)))
tokens, row = np.arange(12 * 6).reshape(12, 6), np.array([0, 2, 1, 2, 0, 1, 2, 0])
drawn = Outputs(*3 * [jax.device_put(tokens, rows)])
with jax.set_mesh(mesh):
    complete = jax.jit(lambda row, drawn: group_completions(5, mesh, row, drawn, 4))
    found = complete(jax.device_put(row, rows), drawn)
for slot, others in enumerate(np.asarray(found)):
    own, block = row[slot] + 3 * (slot // 2), 3 * (slot // 2)
    group = [one for one in range(own - own % 5, own - own % 5 + 5)]
    there = [one != own and block <= one < block + 3 for one in group]
    nothing = np.full(4, NO_TOKEN)
    expected = [tokens[one, :4] if here else nothing for one, here in zip(group, there)]
    np.testing.assert_array_equal(others, expected)
print("same")
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_drafted_rows_spread_over_a_mesh_are_the_same_rows():
    command, env = [sys.executable, "-c", ON_A_MESH], several.virtual_devices(4)
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert result.stdout.strip() == "same", result.stderr
