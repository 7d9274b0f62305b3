"""A reflection between two trials of a game."""

import pytest

from tpu_rl.environments import contract, named
from tpu_rl.errors import InputError

ROW = {
    "prompt": "bin etc\nremove jam\n$ ",
    "directories": ["bin", "etc"],
    "files": {"bin/fig": "red", "etc/jam": "blue"},
    "goal": {"bin/fig": "red"},
}


def episode(*turns: str) -> tuple[list[tuple[str, float | None, bool]], float | None]:
    """Return what follows each turn, and the reward at the end."""
    (factory,) = named.load("reflection:mini_shell").values()
    instance = factory()
    assert contract.describe(instance, "").form == "game"
    assert contract.reset(instance, ROW, seed=3) is None
    return [contract.step(instance, turn) for turn in turns], contract.reward(instance)


def test_a_trial_that_fails_is_followed_by_a_reflection_and_the_same_game():
    steps, reward = episode("rm bin/jam", "exit", "look first", "rm etc/jam", "exit")
    assert steps == [
        ("not found\n$ ", None, False),
        ("Reflect: ", 0.0, False),
        (f"\n{ROW['prompt']}", None, False),
        ("$ ", None, False),
        ("", 1.0, True),
    ]
    assert reward == 0.0


def test_files_of_the_first_trial_are_there_again():
    steps, _ = episode("rm bin/fig", "exit", "wrong file", "ls bin")
    assert steps[-1] == ("fig\n$ ", None, False)


def test_a_game_that_is_won_has_one_trial():
    assert episode("rm etc/jam", "exit") == ([("$ ", None, False), ("", 1.0, True)], 0.0)


def test_a_trial_that_is_cut_off_is_judged_as_it_stands():
    assert episode("exit", "nothing done", "rm etc/jam")[1] == 1.0
    assert episode("exit")[1] == 0.0


def test_only_a_game_can_begin_again():
    with pytest.raises(InputError, match="python_tool is not one text game"):
        named.load("reflection:python_tool")
