"""Several attempts at one problem: what the model reads, and the rewards."""

import pytest

from tpu_rl.environments import contract, named
from tpu_rl.tasks.multi_attempt import MultiAttempt

ROW = {"prompt": "3+4*2=", "answer": "11"}
QUESTION = {"prompt": [{"role": "user", "content": "How many?"}], "answer": "1,100"}


def play(row: dict, *attempts: str) -> tuple[list[str | None], list[bool], float | None]:
    """Return the observations of an evaluation with 3 attempts, its ends, and the reward."""
    game = MultiAttempt()
    observations = [contract.reset(game, row, seed=0, max_turns=3, is_evaluation=True)]
    ends = []
    for attempt in attempts:
        observation, reward, done = contract.step(game, attempt)
        assert reward is None
        observations.append(observation)
        ends.append(done)
    return observations, ends, contract.reward(game)


def test_expressions_are_answered_in_their_own_characters():
    seen, ends, reward = play(ROW, "#3", "no answer", "4*2=8;3+8=11;#11")
    assert seen == [None, "=2;", "=1;", ""]
    assert ends == [False, False, True]
    assert reward == 1.0


def test_questions_are_answered_in_words():
    seen, ends, reward = play(QUESTION, "#### 12", "\\boxed{1100}")
    assert seen == [
        "\nYou have 3 attempts.",
        "Your answer is incorrect. You have 2 attempts left.",
        "",
    ]
    assert ends == [False, True]
    assert reward == 1.0


@pytest.mark.parametrize(
    ("attempts", "reward"),
    [(["#3", ";", "#4"], -0.5), (["#", ";", "11"], -1.0), ([], -1.0), (["#3"], -0.5)],
)
def test_a_readable_wrong_answer_earns_more_than_none(attempts, reward):
    _, ends, earned = play(ROW, *attempts)
    assert ends == [False, False, True][: len(attempts)]
    assert earned == reward


def test_training_has_one_to_five_attempts_which_a_group_shares():
    def attempts(seed: int, max_turns: int) -> int:
        game = MultiAttempt()
        contract.reset(game, ROW, seed, max_turns)
        return next(n for n in range(1, 9) if contract.step(game, "#0")[2])

    assert {attempts(seed, max_turns=8) for seed in range(40)} == {1, 2, 3, 4, 5}
    assert {attempts(seed, max_turns=2) for seed in range(20)} == {1, 2}
    assert attempts(7, max_turns=8) == attempts(7, max_turns=8)
    assert named.load("multi_attempt") == {None: MultiAttempt}
