"""Log-ratios of a teacher that sees a hint, with log-probs that the tests choose."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.echo import TOKENIZER, digit, score_prompts
from tests.fixtures.picture_model import PER_IMAGE, picture_tokenizer
from tpu_rl.algorithm_spec import Hint
from tpu_rl.algos import SelfDistillConfig
from tpu_rl.commands.config import preset, require_trainable
from tpu_rl.errors import InputError
from tpu_rl.experience.config import LikelihoodConfig
from tpu_rl.experience.rows.hints import log_ratios, with_hint
from tpu_rl.tokenizers.images import MARK

STATE: Any = dataclasses.make_dataclass("State", ["params"])(None)
HINT = Hint("reference", "solution", "{hint}0{prompt}")


def test_a_hint_joins_a_text_or_the_last_message():
    assert with_hint("a {hint}", "b {prompt}", "{prompt}\n{hint}") == "a {hint}\nb {prompt}"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    hinted = with_hint(chat, "b", "{hint}: {prompt}")
    assert hinted == [chat[0], {"role": "user", "content": "b: a"}]
    assert chat[1]["content"] == "a"
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(InputError, match="plain text"):
        with_hint(picture, "b", "{prompt}{hint}")


def test_rewards_are_the_teachers_log_ratios_of_the_same_tokens():
    scored = score_prompts(["12", "21"], {"digit": digit}, 2)
    for row, solution in zip(scored.rows, ("7", "5" * 9), strict=True):
        row["solution"] = solution
    log_probs_of_policy = np.linspace(-2, -1, scored.rollout.tokens.size).astype(np.float32)
    rollout = dataclasses.replace(
        scored.rollout, log_probs=log_probs_of_policy.reshape(scored.rollout.tokens.shape)
    )
    scored = dataclasses.replace(scored, rollout=rollout)
    seen: list[str] = []

    def log_probs(params: Any, rows: Any, to_texts: Any) -> Any:
        texts = to_texts(rows)
        seen.extend(TOKENIZER.decode(row["ids"][: -row["answer"]]) for row in rows)
        counts = np.asarray(texts.action_mask).sum(1)
        return [[-0.5 * np.arange(1, count + 1)] for count in counts]

    result = log_ratios(HINT, log_probs, TOKENIZER, 8)(scored, 1, STATE)
    assert seen == ["7012", "7012", "555555555021", "555555555021"]
    mask = np.asarray(rollout.action_mask)
    values = np.asarray(result.rollout.rewards)
    for n in (0, 1):
        teacher = -0.5 * np.arange(1, mask[n].sum() + 1)
        policy = np.asarray(rollout.log_probs)[n, mask[n]]
        np.testing.assert_allclose(values[n, mask[n]], teacher - policy, rtol=1e-6)
    assert not values[2:].any()
    assert not values[~mask].any()
    np.testing.assert_array_equal(result.rollout.scored, [True, True, False, False])
    assert "exceeds the 8 tokens" in result.faults[2]
    np.testing.assert_array_equal(result.rewards, scored.rewards)


def test_a_teacher_with_a_hint_sees_the_image_of_the_prompt():
    tokenizer = picture_tokenizer()
    assert tokenizer.images is not None
    first_id = tokenizer.images.first_id
    scored = score_prompts(["12", "21"], {"digit": digit}, 2)
    for row in scored.rows:
        row |= {
            "prompt": f"{MARK}count red?",
            "solution": "3",
            "images": [Image.new("RGB", (8, 8))],
        }

    def log_probs(params: Any, rows: Any, to_texts: Any) -> Any:
        texts = to_texts(rows)
        features = (np.asarray(texts.tokens) >= first_id).sum(1)
        np.testing.assert_array_equal(features, [PER_IMAGE] * 4)
        assert texts.images.shape[:2] == (4, 1)
        return [[np.zeros(count)] for count in np.asarray(texts.action_mask).sum(1)]

    spec = Hint("reference", "solution", "{prompt} {hint}")
    result = log_ratios(spec, log_probs, tokenizer, 64)(scored, 1, STATE)
    assert np.asarray(result.rollout.scored).all()


def test_settings_that_have_no_place_for_the_hint_are_refused():
    run = preset("self_distill")
    likelihood = dataclasses.replace(run.rollout, likelihood=LikelihoodConfig(coef=1.0))
    for changes in ({"environment": "calculator"}, {"rollout": likelihood}):
        with pytest.raises(InputError):
            require_trainable(dataclasses.replace(run, **changes))


@pytest.mark.parametrize(
    "settings",
    [
        {"template": "{prompt}"},
        {"reference_mix": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(InputError):
        SelfDistillConfig(**settings)
