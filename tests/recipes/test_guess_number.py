"""The game and the rows of guess a number."""

import json
import random

import pytest

from recipes.guess_number import game, read_games
from tpu_rl.environments import contract


def play(number, guesses, kind=game.Guess):
    """Return the answer and the reward of each guess from 43 to 49. The last ends the game."""
    player = kind()
    player.reset(number=number, low=43, high=49, max_turns=len(guesses), prompt=[])
    answers = [contract.step(player, guess) for guess in guesses]
    assert [done for _, _, done in answers] == [False] * (len(guesses) - 1) + [True]
    return [(text, reward) for text, reward, _ in answers]


def test_answers_repeat_what_is_left():
    assert play(45, ["46", "44", "45"]) == [
        ("Too high: 43 to 45", 0),
        ("Too low: 45 to 45", 0),
        ("right", 1),
    ]
    assert play(45, ["46", "43", "45"], game.ListedGuess) == [
        ("Too high: 43 44 45", 0),
        ("Too low: 44 45", 0),
        ("right", 1),
    ]


def test_a_guess_against_the_hints_tells_nothing():
    assert play(49, ["46", "44", "60"]) == [
        ("Too low: 47 to 49", 0),
        ("Too low: 47 to 49", 0),
        ("Too high: 47 to 49", 0),
    ]


@pytest.mark.parametrize("text", ["", "It is 45", "45.", "-45", "४५५५", "45" * 5000])
def test_a_turn_that_is_no_number_costs_a_guess(text):
    assert play(45, [text, "45"]) == [("A number, please: 43 to 49", 0), ("right", 1)]


def test_the_held_out_ranges_begin_with_other_numbers():
    train, held_out = game.split(game.Guess())
    assert len(train) + len(held_out) == len(game.LOWS) * game.SIZE
    assert {row["low"] for row in train}.isdisjoint(row["low"] for row in held_out)
    for row in train + held_out:
        assert row["low"] <= row["number"] <= row["high"]
        assert f"from {row['low']} to {row['high']}." in row["prompt"][0]["content"]
    listed = game.split(game.ListedGuess())[0][0]
    numbers = map(str, range(listed["low"], listed["high"] + 1))
    assert f": {' '.join(numbers)}." in listed["prompt"][0]["content"]


def test_halving_always_wins():
    for row in game.split(game.Guess())[1]:
        player = game.Guess()
        player.reset(**row, max_turns=game.GUESSES)
        reward, done = 0.0, False
        while not done:
            _, reward, done = contract.step(player, str((player.low + player.high) // 2))
        assert reward == 1


def test_demonstrations_agree_with_the_hints_and_often_lose():
    rows = game.split(game.Guess())[0]
    rng = random.Random(0)
    wins = []
    for row in rows:
        messages = game.demonstration(row, game.Guess(), rng)["messages"]
        guesses = [int(message["content"]) for message in messages[1::2]]
        assert len(guesses) <= game.GUESSES
        low, high = row["low"], row["high"]
        for guess in guesses:
            assert low <= guess <= high
            low = max(low, guess + 1) if guess < row["number"] else low
            high = min(high, guess - 1) if guess > row["number"] else high
        wins.append(guesses[-1] == row["number"])
    # A player who guesses at random among what is left wins 67.8 % of games.
    assert 0.6 < sum(wins) / len(wins) < 0.75


PROMPT = "user: I think of a number from 43 to 49. You have 3 guesses. Say a number."


def test_games_of_an_evaluation_are_read():
    transcripts = [
        "assistant: 46\nuser: Too high: 43 to 45\nassistant: 44\nuser: right",
        "assistant: 44\nuser: Too low\nassistant: 43\nuser: Too low\nassistant: assistant: 45",
    ]
    assert read_games.read_game(PROMPT, transcripts[0]) == ([46, 44], [(43, 49), (43, 45)])
    assert read_games.read_game(PROMPT, transcripts[1]) == (
        [44, 43, None],
        [(43, 49), (45, 49), (45, 49)],
    )
    problem = {"prompt": PROMPT, "completions": transcripts, "rewards": [1.0, 0.0]}
    lines = [json.dumps({"of": "model"}), json.dumps(problem)]
    assert read_games.summary(lines) == "0.50 of 2 | 2.00 of 1 | 0.33 of 3 | 0.50 of 2"
