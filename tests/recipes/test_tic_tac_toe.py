"""The game of tic-tac-toe, and the returns of its two sides."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.tic_tac_toe import game
from tpu_rl.losses import advantages


def begin(**row) -> tuple[game.Game, str]:
    new = game.Game()
    return new, new.reset(**(row_of("") | row))


def test_one_policy_moves_for_both_sides():
    match, text = begin(moves="5")
    assert text == "1234X6789O "
    assert match.step("1\n") == ("O234X6789X ", 0.0, False, {})
    for cell in "7", "9":
        match.step(cell)
    assert match.step("3") == ("over", 1.0, True, {})


@pytest.mark.parametrize("text", ["5", "0", "55", "", "a"])
def test_a_move_that_is_none_costs_its_side(text):
    match, _ = begin(moves="5")
    assert match.step(text) == ("no move", -1.0, True, {})


def test_the_perfect_player_never_loses():
    assert game.value("." * 9) == 0
    rng = random.Random(0)
    for seed in range(20):
        side = "XO"[seed % 2]
        match, _ = begin(side=side, opponent="perfect", seed=seed, is_evaluation=True)
        reward, done = 0.0, False
        while not done:
            _, reward, done, _ = match.step(rng.choice(game.legal_moves(match.board)))
        assert reward <= 0


def test_a_game_lost_to_the_opponent_has_the_reward_of_a_loss():
    match, text = begin(side="O", opponent="perfect", seed=0, is_evaluation=True)
    assert text.endswith("O ")
    assert text.count("X") == 1
    match.board = "XX.OO...."  # X moves next and can win at once; the policy moves to 9.
    match.board = game.after(match.board, "9")
    assert match.step("8")[1:3] == (-1.0, True)


def test_random_games_are_legal():
    rows = [game.random_game(random.Random(seed)) for seed in range(20)]
    for row in rows:
        boards = (row["prompt"] + row["completion"]).splitlines()[1:]
        for line, later in zip(boards, boards[1:], strict=False):
            text, _, cell = line.partition(" ")
            board = "".join(mark if mark in "XO" else "." for mark in text[:9])
            assert text + " " == game.shown(board)
            assert game.shown(game.after(board, cell)) == later.partition(" ")[0] + " "


def test_openings_are_unfinished_games():
    assert {len(moves) for moves in opening_moves()} == set(range(7))
    for moves in opening_moves():
        match, _ = begin(moves=moves)
        assert not game.is_over(match.board)


def opening_moves() -> list[str]:
    return [row["moves"] for row in game.openings(random.Random(0))]


def row_of(moves: str) -> dict:
    return {"moves": moves, "side": "", "opponent": "", "seed": 0, "is_evaluation": False}


def test_discount_minus_one_gives_each_side_its_own_result():
    """Five moves of one token, each followed by an observation; the fifth wins."""
    mask = np.zeros((1, 9), bool)
    mask[0, ::2] = True
    rewards = np.zeros((1, 9), np.float32)
    rewards[0, 8] = 1
    returns = advantages.turn_returns(jnp.array(rewards), jnp.array(mask), -1.0)
    np.testing.assert_array_equal(returns[0, ::2], [1, -1, 1, -1, 1])
