"""An answer and the judgment of it: what the model reads, the rewards, and who is compared."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl.algos.grpo import GrpoConfig
from tpu_rl.environments import contract, named
from tpu_rl.errors import InputError
from tpu_rl.losses import advantages
from tpu_rl.tasks.self_verify import ASK, SelfVerify

ROW = {"prompt": "3+4*2=", "answer": "11"}
QUESTION = {"prompt": [{"role": "user", "content": "How many?"}], "answer": "1,100"}


def play(row: dict, *texts: str, max_turns: int = 2) -> tuple[list[tuple], SelfVerify]:
    game = SelfVerify()
    assert contract.reset(game, row, seed=0, max_turns=max_turns) is None
    return [contract.step(game, text) for text in texts], game


@pytest.mark.parametrize(
    ("answer", "judgment", "rewards"),
    [
        ("4*2=8;3+8=11;#11", "#1", (1, 1)),
        ("#11", "#0", (1, 0)),
        ("#12", "3+8=11;#0", (0, 1)),
        ("#12", "#1", (0, 0)),
        ("no answer", "#0", (0, 1)),
        ("#11", "#11", (1, 0)),
        ("#12", "hm", (0, 0)),
    ],
)
def test_a_judgment_earns_if_it_agrees_with_the_answer(answer, judgment, rewards):
    turns, game = play(ROW, answer, judgment)
    assert turns == [("=;", rewards[0], False), ("", rewards[1], True)]
    assert game.answer_is_right is bool(rewards[0])


def test_questions_are_asked_in_words():
    turns, game = play(QUESTION, "#### 1100", "Yes: \\boxed{1}")
    assert turns == [(ASK, 1.0, False), ("", 1.0, True)]
    assert contract.state_of(game) == {"answer_is_right": True, "judged_right": True}


def test_with_one_turn_nothing_is_judged():
    assert play(ROW, "#11", max_turns=1)[0] == [("", 1.0, True)]
    assert isinstance(named.load("self_verify")[None](), SelfVerify)


def test_without_a_discount_a_turn_has_its_own_reward_alone():
    mask = jnp.array([[False, True, True, False, True], [False, True, False, True, True]])
    rewards = jnp.array([[0, 0, 1.0, 0, 2], [0, 4.0, 0, 0, 8]])
    expected = [[0, 1, 1, 0, 2], [0, 4, 0, 8, 8]]
    np.testing.assert_array_equal(advantages.turn_returns(rewards, mask, 0.0), expected)
    episode = jnp.array([0, 0])  # Two branches of one episode.
    np.testing.assert_array_equal(
        advantages.turn_returns(rewards, mask, 0.0, episode_id=episode), expected
    )
    assert GrpoConfig(credit="turn", gamma=0.0).gamma == 0
    with pytest.raises(InputError, match="at least -1 and at most 1"):
        GrpoConfig(credit="turn", gamma=-1.1)
