"""Prompts of the wrong length, and stop strings."""

import pytest

from tests.fixtures.echo import MAX_PROMPT_TOKENS, TOKENIZER, digit, score_prompts
from tpu_rl.errors import InputError
from tpu_rl.rollout import prompts


@pytest.mark.parametrize(
    ("prompt", "message"), [("123456", "a prompt has 6 tokens"), ("", "a prompt has 0 tokens")]
)
def test_prompt_of_the_wrong_length_is_an_input_error(prompt, message):
    with pytest.raises(InputError, match=message) as error:
        score_prompts(["12", prompt], {"digit": digit}, group_size=2)
    assert "--sampling.max-prompt-tokens" in error.value.fix


def test_prompts_that_are_too_long_are_dropped():
    rows = [{"prompt": "12345"}, {"prompt": "123456"}, {"prompt": "1234567"}]
    fitting, message = prompts.drop_misfits(rows, TOKENIZER, MAX_PROMPT_TOKENS)
    assert fitting == rows[:1]
    assert message == "2 of 3 prompts dropped: they must have 1 to 5 tokens, and the longest has 7"
    assert prompts.drop_misfits(fitting, TOKENIZER, MAX_PROMPT_TOKENS) == (fitting, "")
    with pytest.raises(InputError, match="0 of 2 prompts left") as error:
        prompts.drop_misfits(rows[1:], TOKENIZER, MAX_PROMPT_TOKENS)
    assert "the longest has 7" in error.value.why


def test_completion_ends_with_the_token_that_completes_a_stop_string():
    find_end = prompts.stop_at(TOKENIZER, ["34", "99"])
    tokens = TOKENIZER.encode_prompt("0123456999")
    assert find_end is not None
    assert find_end(tokens) == 5
    assert find_end(tokens[:4]) is None
    assert find_end([*tokens[:5], TOKENIZER.eos_ids[0]]) == 5
    assert find_end([]) is None
    find_nines = prompts.stop_at(TOKENIZER, ["99"])
    assert find_nines is not None
    assert find_nines(tokens) == 9
