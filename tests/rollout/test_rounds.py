"""Which episodes a step takes depends on their turns, and never on when an answer comes."""

import random

import pytest

from tpu_rl.rollout.conversations.rounds import Rounds

GROUP_SIZE = 2


def play(turns: list[int], ended_by_turn: list[bool], is_old: list[bool], take: int, seed: int):
    """Play a step, in an order of events that depends on the seed.

    Episode n has turns[n] turns in all, and ends with the last of them or with the answer to it.
    Returns the groups and the turns that each episode took.
    """
    events = random.Random(seed)
    rounds = Rounds(take, is_old, GROUP_SIZE)
    taken = [0] * len(turns)
    ready = list(range(len(turns)))
    """Those whose next turn waits, and those whose answer is on its way."""
    waiting: list[int] = []
    decoding: list[int] = []
    while not rounds.is_over:
        begun = rounds.may_begin(ready)
        ready = [episode for episode in ready if episode not in begun]
        decoding += begun
        number = events.randrange(len(decoding) + len(waiting))
        if number < len(decoding):
            episode = decoding.pop(number)
            taken[episode] += 1
            if taken[episode] == turns[episode] and ended_by_turn[episode]:
                rounds.end(episode)
            else:
                rounds.add_turn(episode)
                waiting.append(episode)
        else:
            episode = waiting.pop(number - len(decoding))
            if taken[episode] == turns[episode]:
                rounds.end(episode)
            else:
                ready.append(episode)
    assert not decoding
    return sorted(rounds.complete), taken


@pytest.mark.parametrize("case", range(8))
def test_the_order_of_events_changes_nothing(case):
    lengths = random.Random(case)
    turns = [lengths.choice([1, 1, 2, 3, 9]) for _ in range(12)]
    ended_by_turn = [lengths.random() < 0.5 for _ in turns]
    is_old = [True, False, False, True, False, False]
    outcomes = [play(turns, ended_by_turn, is_old, 4, seed) for seed in range(20)]
    assert outcomes[1:] == outcomes[:-1]
    groups, taken = outcomes[0]
    assert len(groups) == 4
    assert {0, 3} <= set(groups)
    last = max(taken)
    ends = [turns[row] + (not ended_by_turn[row]) for row in range(12)]
    ends_of = [max(ends[row : row + 2]) for row in range(0, 12, 2)]
    new = sorted((ends_of[group], group) for group in (1, 2, 4, 5))
    assert groups == sorted([0, 3, *(group for _, group in new[:2])])
    assert last <= max(ends_of[group] for group in groups)
    for row in range(12):
        if row // 2 not in groups and taken[row] < turns[row]:
            assert taken[row] == max(ends_of[group] for group in groups)


def test_a_late_answer_is_waited_for_only_if_the_step_may_end_without_it():
    rounds = Rounds(2, [False] * 4, 1)
    assert rounds.may_begin(range(4)) == [0, 1, 2, 3]
    for episode in (0, 1, 2):
        rounds.add_turn(episode)
    # Two of three must have a second turn, whatever the fourth one does.
    assert rounds.may_begin([0, 1, 2]) == [0, 1, 2]
    rounds.end(3)
    rounds.add_turn(0)
    # The step may end after the second round.
    assert rounds.may_begin([0]) == []
    rounds.end(1)
    assert not rounds.is_over  # The episode 2 has not taken its second turn.
    rounds.add_turn(2)
    assert rounds.is_over
    assert rounds.complete == [3, 1]
