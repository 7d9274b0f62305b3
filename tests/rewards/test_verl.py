"""Functions in verl's form are rewards."""

import pytest

from tpu_rl import rewards
from tpu_rl.errors import InputError
from tpu_rl.runtime import verl_rewards


def compute_score(data_source, solution_str, ground_truth, extra_info=None, limit=3):
    assert limit == 3
    return {"score": float(ground_truth in solution_str) + (extra_info or {}).get("bonus", 0.0)}


COLUMNS = {
    "data_source": ["gsm8k"] * 2,
    "reward_model": [{"style": "rule", "ground_truth": truth} for truth in ("1", "2")],
    "extra_info": [{"bonus": 0.5}, None],
}


@pytest.mark.parametrize("is_chat", [False, True])
def test_each_completion_is_judged_by_itself(is_chat):
    texts = ["it is 1", "it is 1"]
    prompts = [[{"role": "user", "content": "a"}] if is_chat else "a"] * 2
    completions = rewards.as_answers(prompts, texts)
    function = verl_rewards.adapt(compute_score)
    assert function(prompts=prompts, completions=completions, **COLUMNS) == [1.5, 0.0]
    truths = {"ground_truth": ["2", "1"]}
    assert function(prompts=prompts, completions=completions, **truths) == [0.0, 1.0]
    with pytest.raises(KeyError, match="neither this column"):
        function(prompts=prompts, completions=completions)


def test_a_dict_without_a_score_names_what_it_has():
    function = verl_rewards.adapt(lambda solution_str, ground_truth: {"reward": 1.0})
    with pytest.raises(ValueError, match="without `score`, but with reward"):
        function(prompts=["a"], completions=["b"], ground_truth=["c"])


def test_other_functions_stay():
    def score(completions, ground_truth):
        return [0.0] * len(completions)

    assert verl_rewards.adapt(score) is score


def test_a_file_may_hold_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return ground_truth == solution_str\n"
    )
    function = rewards.registry.resolve(
        f"{file}:compute_score", rewards.RewardLimits(isolate=False)
    )
    assert function(prompts=["a"], completions=["1"], ground_truth=["1"]) == [True]
    with pytest.raises(InputError):
        rewards.registry.resolve(f"{file}:score", rewards.RewardLimits(isolate=False))
