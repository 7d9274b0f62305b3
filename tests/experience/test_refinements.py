"""Refinements after critiques: which completion is refined, and what joins its group."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, EchoDecoding, digit, echo_engine, score_prompts
from tpu_rl.algorithm_spec import Refinement
from tpu_rl.commands import config as settings
from tpu_rl.errors import InputError
from tpu_rl.experience.sources.refinements import refinement, with_critique
from tpu_rl.rollout import records
from tpu_rl.types import RowSource

STATE: Any = SimpleNamespace(step=0, params={})
SPEC = Refinement("{answer}", "answer")


def test_a_better_answer_joins_its_group_with_its_own_reward():
    """The engine answers with the first characters of a prompt; a digit is its own reward.

    "21" earns 2 and 1, and refined "2111" earns 2. "12" earns 1 and 2, and refined "1211" earns 1.
    "41" earns 4 and 1. "4012" earns 4 and 0, and is too long with its critique. "00" cannot get
    better.
    """
    scored = score_prompts(["21", "12", "41", "4012", "00"], {"digit": digit}, 2)
    engine = echo_engine(EchoDecoding(1), {"digit": digit})
    result = refinement(engine, SPEC, TOKENIZER, max_prompt_tokens=5)(scored, 1, STATE)
    rollout = result.rollout
    np.testing.assert_array_equal(rollout.source, [0, 0, RowSource.EXPERT] * 5)
    assert [result.completions[place] for place in (2, 5, 8, 11, 14)] == ["2", "", "4", "", ""]
    assert rollout.rewards[2::3].sum(-1).tolist() == [2, 0, 4, 0, 0]
    last = [np.flatnonzero(mask)[-1] for mask in rollout.action_mask[[2, 8]]]
    assert rollout.rewards[[2, 8], last].tolist() == [2, 4]
    assert not rollout.action_mask[[5, 11, 14]].any()
    assert not rollout.scored[2::3].any()
    assert rollout.tokens[2].tolist()[:3] == TOKENIZER.encode("212")
    assert "critique exceeds the 5 tokens" in " ".join(records.warnings(result))
    np.testing.assert_array_equal(rollout.rewards[:2], scored.rollout.rewards[:2])
    assert records.metrics(result) == records.metrics(scored)


def test_a_critique_follows_the_completion():
    spec = Refinement("Wrong: it is {answer}.", "answer")
    row = {"prompt": "2+2=", "answer": "4"}
    assert with_critique(row, "5", spec)["prompt"] == "2+2=5Wrong: it is 4."
    chat = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}
    assert with_critique(chat, "5", spec)["prompt"][1:] == [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Wrong: it is 4."},
    ]
    with pytest.raises(InputError, match="`answer` holds no text"):
        with_critique({"prompt": "p"}, "5", spec)
    assert with_critique({"prompt": "p"}, "5", Refinement("No.", "answer"))["prompt"] == "p5No."


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--rollout.likelihood.coef", "0.5"], "refinements are rewarded without it"),
        (["--rollout.dynamic-sampling-rounds", "2"], "before the solutions join them"),
        (["--environment", "self_verify"], "beside completions of a single turn"),
    ],
)
def test_settings_that_refinements_would_not_see_are_refused(flags, error):
    argv = ["mixed", "--model.path", "builtin:arithmetic", "--data.path", "rows.jsonl"]
    argv += ["--reward", "arithmetic", "--algorithm.method", "critique"]
    with pytest.raises(InputError, match=error):
        settings.parse([*argv, *flags])
