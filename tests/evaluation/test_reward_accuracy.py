"""Simple rules that reward models are compared with."""

from tpu_rl.evaluation import reward_accuracy


def test_majority_vote_counts_different_completions_that_end_with_a_number():
    """Problem 0 has 18 twice and 20 once. Problem 1 is a tie. Problem 2 has no numbers."""
    rows = [
        {"chosen": "9 x 2 = 18", "rejected": "A: 20."},
        {"chosen": "so $18.00", "rejected": "A: 20."},
        {"chosen": "1,000", "rejected": "7 then 5"},
        {"chosen": "none", "rejected": "nothing"},
    ]
    assert reward_accuracy.by_vote(rows, [0, 0, 1, 2]).tolist() == [1, 1, 0.5, 0.5]
    same_completion_twice = [
        {"chosen": "3", "rejected": "x = 4"},
        {"chosen": "3", "rejected": "4"},
    ]
    assert reward_accuracy.by_vote(same_completion_twice, [0, 0])[0] == 0
    assert reward_accuracy.last_number("1,000") == 1000
