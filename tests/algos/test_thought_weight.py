"""Advantages of thoughts with a weight of their own (E2C)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fixtures.runs import TINY
from tpu_rl import tokenizers
from tpu_rl.algos.grpo import GrpoConfig, grpo
from tpu_rl.commands import config
from tpu_rl.commands.checks import preflight
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.proofs import cases, tiny
from tpu_rl.train import update_step

# 8 9 ends a thought. The prompt of the first row has it, too.
TOKENS = jnp.array(
    [
        [8, 9, 1, 2, 8, 9, 3, 8, 9, 4],
        [1, 1, 8, 8, 9, 5, 5, 0, 0, 0],
        [1, 2, 3, 4, 5, 6, 8, 0, 0, 0],  # Cut before its thought ended.
        [1, 8, 9, 5, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # Nothing was sampled.
    ]
)
MASK = jnp.array(
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 0, 0, 1, 1, 0, 0, 0],  # The end was forced.
        [0, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    bool,
)


def test_a_thought_lasts_up_to_its_first_end_behind_the_prompt():
    np.testing.assert_array_equal(
        advantages.thoughts(TOKENS, MASK, (8, 9)),
        [
            [0, 0, 0, 1, 1, 1, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0, 0, 0, 0],
            [0, 1, 1, 1, 1, 1, 1, 0, 0, 0],
            [0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
    )
    one = advantages.thoughts(TOKENS, MASK, (9,))
    np.testing.assert_array_equal(one[0], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0])


def test_advantages_of_thoughts_have_the_weight_and_answers_stay():
    """In the packed batch, where the action of a token is the one that its place holds."""
    data = cases.off_policy()
    tokens = np.array(data.tokens)
    masks = np.array(data.action_mask)
    end = int(tokens[0][masks[0]][0])  # A token that is there, in thoughts of some rows.
    experience = tiny.experience(data)

    def batch_of(settings: GrpoConfig):
        roles, params = tiny.cast(settings.roles)
        algorithm = grpo(settings, roles, tiny.SAMPLING)
        batch, _ = algorithm.make_batch(experience, params, algorithm.init_state(params))
        part = update_step.minibatch(update_step.minibatch(batch, 0), 0)
        return batch, jax.jit(algorithm.loss)(params, part)[1]

    plain, metrics = batch_of(GrpoConfig())
    weighted, weighted_metrics = batch_of(GrpoConfig(thought_weight=2.5, thought_end=(end,)))
    expected = np.zeros(tokens.shape)
    for row, mask, factor in zip(tokens, masks, expected, strict=True):
        places = np.flatnonzero(mask)
        over = next((i + 1 for i, place in enumerate(places) if row[place] == end), len(places))
        factor[places[:over]] = 1.0
    packed = np.asarray(experience.layout.pack(jnp.asarray(expected)))
    assert 0 < packed.sum() < np.asarray(weighted.action_mask).sum()
    assert np.abs(np.asarray(plain.advantages)[packed > 0]).max() > 0
    np.testing.assert_allclose(
        weighted.advantages, plain.advantages * (1 + 1.5 * packed), rtol=1e-6
    )
    np.testing.assert_array_equal(weighted.weights["policy"], plain.weights["policy"])
    mean = weighted_metrics["policy/thoughts"]
    assert float(mean.value / mean.weight) == pytest.approx(
        packed[0, 0].sum() / np.asarray(weighted.action_mask)[0, 0].sum()
    )
    assert "policy/thoughts" not in metrics


def test_an_end_without_a_weight_is_refused():
    with pytest.raises(InputError, match="nothing differs between thoughts and answers"):
        GrpoConfig(thought_end=(3,))


def test_a_weight_without_an_end_names_the_ids_of_the_tag(capsys):
    tokenizer = tokenizers.characters("</think>#")
    flags = [*TINY, "--algorithm.thought-weight", "2", "--sampling.thinking.close", "#"]
    (expected,) = tokenizer.encode("#")
    with pytest.raises(InputError, match=f"# is --algorithm.thought-end {expected}"):
        preflight.check_thoughts(config.parse(flags), tokenizer)
    flags += ["--algorithm.thought-end", str(expected)]
    preflight.check_thoughts(config.parse(flags), tokenizer)
    assert "thoughts end with '#'" in capsys.readouterr().err
    with pytest.raises(InputError, match="no token has the id 99"):
        preflight.check_thoughts(config.parse([*flags[:-1], "99"]), tokenizer)
    with pytest.raises(InputError, match="have no phases"):
        preflight.check_thoughts(config.parse([*flags, "--environment", "calculator"]), tokenizer)


def test_a_run_of_before_there_were_weights_has_the_same_identity():
    plain = config.parse(["arithmetic_grpo"])
    assert not [name for name in config.fixed_settings(plain) if "thought" in name]
    flags = ["--algorithm.thought-weight", "2", "--algorithm.thought-end", "5"]
    weighing = config.parse(["arithmetic_grpo", *flags])
    assert "algorithm.thought_weight: None -> 2.0" in config.differences(plain, weighing)
