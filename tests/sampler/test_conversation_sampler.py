"""Conversations of several turns: the same tokens and log-probs as one text, whatever waits for
what."""

import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.fixtures import several
from tests.fixtures.sampling import (
    HYBRID,
    KEY,
    PROMPTS,
    ROOT,
    STOP,
    TWO_KINDS,
    completions,
    decoder,
)
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import models
from tpu_rl.errors import InputError
from tpu_rl.sampler import (
    SamplerConfig,
    SegmentConfig,
    conversation_sampler,
    row_keys,
    sample,
    slots,
)
from tpu_rl.sampler.conversation_sampler import ConversationSampler, TurnRequest, common_prefix
from tpu_rl.train import sharding

TURN = 6
OBSERVATIONS = ([7, 8], [9] * 20, [])
"""What follows the first, second and third turn of a conversation. The last one is empty."""
LENGTH = 5 + 4 * TURN + 22
CONFIG = SamplerConfig(
    max_new_tokens=TURN,
    stop_ids=(STOP,),
    samples_per_prompt=2,
    prompt_length=5,
    segments=SegmentConfig(steps=3),
)
NUM_ROWS = len(PROMPTS) * 2
KEYS = np.asarray(jax.random.key_data(row_keys(KEY, np.arange(NUM_ROWS))))


def live_sampler(model, params, num_slots=NUM_ROWS, max_length=LENGTH, **settings):
    return ConversationSampler(
        models.policy(model),
        params,
        CONFIG,
        num_slots=num_slots,
        max_length=max_length,
        prompt_length=5,
        contexts_at_once=4,
        **settings,
    )


def converse(sampler, late=()):
    """Hold four turns with every row -> its tokens, mask and log-probs. Rows in `late` get their
    observations only once nothing else is to be decoded."""
    texts = [list(PROMPTS[row // 2]) for row in range(NUM_ROWS)]
    masks = [[False] * len(text) for text in texts]
    log_probs = [[0.0] * len(text) for text in texts]
    turns = [0] * NUM_ROWS
    held = []

    def ask(row):
        return TurnRequest(row, list(texts[row]), KEYS[row], TURN)

    sampler.submit([ask(row) for row in range(NUM_ROWS)])
    while not sampler.is_idle:
        asked = []
        for turn in sampler.step():
            row = turn.conversation
            texts[row] += turn.tokens
            masks[row] += [True] * len(turn.tokens)
            log_probs[row] += turn.log_probs.tolist()
            if turns[row] == len(OBSERVATIONS):
                sampler.close(row)
                continue
            observation = OBSERVATIONS[turns[row]]
            turns[row] += 1
            texts[row] += observation
            masks[row] += [False] * len(observation)
            log_probs[row] += [0.0] * len(observation)
            (held if row in late else asked).append(row)
        sampler.submit([ask(row) for row in asked])
        if sampler.is_idle and held:
            sampler.submit([ask(row) for row in held])
            held = []
    return texts, masks, log_probs


def of_whole_texts(model, params, texts):
    """Log-probs of the tokens of each text, read at once without a cache."""
    results = []
    for text in texts:
        tokens = jnp.asarray([text])
        positions = jnp.arange(len(text))[None]
        hidden = model.hidden(
            params, tokens, positions, jnp.ones_like(tokens), jnp.zeros_like(tokens)
        )
        logits = jax.nn.log_softmax(model.logits(params, hidden)[0])
        results.append(np.asarray(logits[np.arange(len(text) - 1), text[1:]]))
    return results


@pytest.fixture(scope="module")
def llama():
    return decoder()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "num_slots"),
    [
        pytest.param({}, NUM_ROWS, id="llama"),
        pytest.param(TWO_KINDS, NUM_ROWS, id="sliding", marks=pytest.mark.nightly),
        pytest.param(HYBRID, 3, id="recurrent", marks=pytest.mark.nightly),
    ],
)
def test_log_probs_of_turns_are_those_of_the_whole_text(changes, num_slots):
    """With few slots, states move to the host and come back."""
    model, params = decoder(**changes)
    texts, masks, log_probs = converse(live_sampler(model, params, num_slots=num_slots))
    exact = of_whole_texts(model, params, texts)
    for row, mask in enumerate(masks):
        actions = np.flatnonzero(mask)
        assert len(actions) >= 4
        np.testing.assert_allclose(
            np.asarray(log_probs[row])[actions], exact[row][actions - 1], atol=2e-5
        )


@pytest.mark.slow
def test_one_turn_has_the_bits_of_the_single_turn_sampler(llama):
    model, params = llama
    rollout = sample(models.policy(model), params, PROMPTS, KEY, CONFIG)
    sampler = live_sampler(model, params, max_length=5 + TURN)
    sampler.submit(
        [TurnRequest(row, PROMPTS[row // 2], KEYS[row], TURN) for row in range(NUM_ROWS)]
    )
    turns = {}
    while not sampler.is_idle:
        turns |= {turn.conversation: turn for turn in sampler.step()}
    assert [turns[row].tokens for row in range(NUM_ROWS)] == completions(rollout)
    for row in range(NUM_ROWS):
        mask = rollout.action_mask[row]
        np.testing.assert_array_equal(turns[row].log_probs, rollout.log_probs[row, mask])
        assert turns[row].stopped == (not rollout.truncated[row])


@pytest.mark.slow
def test_late_tools_and_few_slots_change_nothing(llama):
    """With three slots for eight conversations, caches move to the host and come back."""
    model, params = llama
    expected = converse(live_sampler(model, params, num_slots=3))
    assert converse(live_sampler(model, params, num_slots=3), late=(0, 5)) == expected
    texts, masks, log_probs = converse(live_sampler(model, params))
    assert (texts, masks) == expected[:2]
    for row in range(NUM_ROWS):
        np.testing.assert_allclose(log_probs[row], expected[2][row], atol=1e-5)


@pytest.mark.slow
def test_a_turn_that_rewrites_history_continues_what_is_common(llama):
    model, params = llama
    sampler = live_sampler(model, params, num_slots=1)
    sampler.submit([TurnRequest(0, [5, 6, 7, 8, 9], KEYS[0], TURN)])
    while not sampler.is_idle:
        turns = sampler.step()
    history = [5, 6, 7, 8, 9, *turns[0].tokens[:1], 4, 4]
    sampler.submit([TurnRequest(0, history, KEYS[1], TURN)])
    while not sampler.is_idle:
        again = sampler.step()
    fresh = live_sampler(model, params, num_slots=1)
    fresh.submit([TurnRequest(3, history, KEYS[1], TURN)])
    while not fresh.is_idle:
        expected = fresh.step()
    assert again[0].tokens == expected[0].tokens
    np.testing.assert_allclose(again[0].log_probs, expected[0].log_probs, atol=1e-5)


def test_a_closed_conversation_frees_its_slot(llama):
    model, params = llama
    sampler = live_sampler(model, params, num_slots=1)
    sampler.submit([TurnRequest(row, [1, 2], KEYS[row], TURN) for row in range(3)])
    sampler.step()
    sampler.close(0)
    sampler.close(2)
    turns = []
    while not sampler.is_idle:
        turns += sampler.step()
    assert [turn.conversation for turn in turns if turn.conversation] == [1]


def test_turns_that_do_not_fit_are_refused(llama):
    model, params = llama
    sampler = live_sampler(model, params)
    for tokens, limit in (([], 3), ([1], 0), ([1] * LENGTH, 3), ([1], TURN + 1)):
        with pytest.raises(InputError):
            sampler.submit([TurnRequest(0, tokens, KEYS[0], limit)])


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2]) == 2
    assert common_prefix([1, 2, 3], [1, 4, 3]) == 1
    assert common_prefix([], [1]) == 0


@pytest.mark.nightly
def test_several_devices_hold_the_same_conversations(llama):
    """On a mesh of four devices, with slots for all and with too few."""
    code = """
        import jax, numpy as np
        from tests.sampler.test_conversation_sampler import converse, live_sampler, NUM_ROWS
        from tests.fixtures.sampling import decoder
        from tpu_rl.train import sharding
        model, params = decoder()
        expected = converse(live_sampler(model, params))
        mesh = sharding.make_mesh(2, 2, 1)
        with jax.set_mesh(mesh):
            placed = sharding.place(params, model.axes, mesh)
            for slots in (8, 4):
                texts, masks, log_probs = converse(
                    live_sampler(model, placed, num_slots=slots, mesh=mesh), late=(1,)
                )
                assert (texts, masks) == expected[:2]
                for one, other in zip(log_probs, expected[2]):
                    np.testing.assert_allclose(one, other, atol=1e-5)
        print("same")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=several.virtual_devices(4),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=several.LIMIT,
    )
    assert ended.stdout.strip() == "same", ended.stderr


@needs_libtpu
def test_its_programs_compile_for_tpus_without_gathering_caches():
    """No program moves caches between chips, however long they are."""
    model, _ = decoder(hidden_size=256, intermediate_size=512, max_position_embeddings=2048)
    policy = models.policy(model)
    mesh = sharding.make_mesh(2, 2, 1, devices=tpu_devices("v5e:2x2"))
    rows, chunk, length = 32, 64, 1024
    by_row = PartitionSpec(slots.slot_axes(mesh))

    def placed(tree, specs):
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
            ),
            tree,
            specs,
        )

    def vector(dtype=jnp.int32, *shape):
        return placed(jax.ShapeDtypeStruct(shape or (rows,), dtype), by_row)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        sharding.shardings(model.axes, mesh, shapes),
    )
    with jax.set_mesh(mesh):
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        empty = jax.eval_shape(
            lambda params, keys: slots.empty_slots(policy, CONFIG, params, keys, length, None),
            params,
            keys,
        )
        begun = placed(empty, slots._specs(slots.slot_axes(mesh), empty))
        place = conversation_sampler._Place(vector(), vector(), vector(jnp.int32, 4))
        extended = conversation_sampler._extend_rows.lower(
            policy,
            mesh,
            params,
            begun,
            place,
            vector(),
            vector(jnp.int32, rows, chunk),
            vector(),
            length,
        ).compile()
        started = conversation_sampler._start_turns.lower(
            begun, vector(jnp.bool_), vector(), vector(), vector(), begun.key, vector()
        ).compile()
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(empty.cache))
    gathers = re.findall(r"= (.*) all-gather(?:-start)?\(", extended.as_text())
    assert gathers  # Of weights, which are sharded.
    gathered = [result for result in gathers if f"{length}" in result]
    assert not gathered
    assert extended.memory_analysis().temp_size_in_bytes < 2 * cache_bytes
    assert started.memory_analysis().temp_size_in_bytes < cache_bytes
