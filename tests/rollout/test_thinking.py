"""Thoughts of a chosen length: what is forced, what is dropped, and what counts as an action."""

from types import SimpleNamespace

import numpy as np
import pytest

from tpu_rl.commands import config
from tpu_rl.errors import InputError
from tpu_rl.rollout.requests import Decoding
from tpu_rl.rollout.scoring import written_ids
from tpu_rl.rollout.thinking import ThinkingDecoding, controlled
from tpu_rl.sampler import SamplerConfig, Thinking

END = 0
"""The end-of-sequence token of a tokenizer whose ids are characters."""


class Characters:
    """A tokenizer of one id for each character; `.` is the end of a sequence."""

    def encode(self, text, special=False):
        del special
        return [END if c == "." else ord(c) for c in text]

    encode_continuation = encode

    def decode(self, ids, skip_special=True):
        del skip_special
        return "".join("." if i == END else chr(i) for i in ids)


def sample(texts, prompts=("ab",), max_new_tokens=30, stop_at=None, group=1, **settings):
    """Return (the rollout, contexts, limits, top-k) of a policy that goes on with `texts`, each of
    which ends at its limit, behind its first full stop, or where its call says."""
    calls = []
    text = iter(texts)

    def sample_once(self, params, contexts, step, row_ids, *, limits, stop_at, **_):
        del params, step, row_ids
        columns = max(map(len, contexts)) + self.config.max_new_tokens
        shape = (len(contexts), columns)
        tokens = np.zeros(shape, np.int32)
        mask = np.zeros(shape, bool)
        truncated = []
        for row, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
            said = Characters().encode(next(text))[:limit]
            ends = [n for n in range(1, len(said) + 1) if said[n - 1] == END]
            found = stop_at(said) if stop_at is not None else None
            length: int = min([*ends, found or len(said), len(said)])
            said = said[:length]
            tokens[row, len(context) : len(context) + len(said)] = said
            mask[row, len(context) : len(context) + len(said)] = True
            truncated.append(not ends and found is None)
        calls.append((list(map(Characters().decode, contexts)), list(limits), self.config.top_k))
        return SimpleNamespace(
            tokens=tokens,
            action_mask=mask,
            log_probs=np.where(mask, -tokens.astype(np.float32), 0),
            behaviour_log_probs=np.where(mask, np.float32(len(calls)), 0),
            truncated=np.array(truncated),
            birth_key=np.ones((len(contexts), 2), np.uint32),
        )

    config = SamplerConfig(
        max_new_tokens, stop_ids=(END,), prompt_length=4, samples_per_prompt=group
    )
    thinking = Thinking(close="|", wait="~", **settings)
    plain = Decoding(None, config, 4, thinking=thinking)  # pyright: ignore
    decoding = controlled(plain, Characters())  # pyright: ignore
    assert isinstance(decoding, ThinkingDecoding)
    patch = pytest.MonkeyPatch()
    patch.setattr(ThinkingDecoding, "_sample_once", sample_once)
    try:
        ids = [Characters().encode(prompt) for prompt in prompts]
        rollout = decoding.sample({}, ids, 0, np.arange(len(ids) * group), stop_at=stop_at)
    finally:
        patch.undo()
    return rollout, calls


def texts_of(rollout):
    """Return (whole completions, the tokens of them that are actions)."""
    whole = [Characters().decode(ids) for ids in written_ids(rollout)]
    mask = rollout.action_mask
    actions = [Characters().decode(t[m]) for t, m in zip(rollout.tokens, mask, strict=True)]
    return whole, actions


def test_a_thought_that_is_too_long_is_closed():
    rollout, calls = sample(["thinking on and on", "42."], max_tokens=5)
    assert texts_of(rollout) == (["think|42."], ["think42."])
    assert calls == [(["ab"], [5], None), (["abthink|"], [24], None)]
    assert rollout.tokens.shape == (1, 34)
    assert rollout.tokens[0, :2].tolist() == Characters().encode("ab")
    # Log-probs stay with their tokens, and forced ones have none.
    mask = rollout.action_mask
    np.testing.assert_array_equal(rollout.log_probs, np.where(mask, -rollout.tokens, 0))
    np.testing.assert_array_equal(rollout.behaviour_log_probs[0, 2:11], [1, 1, 1, 1, 1, 0, 2, 2, 2])
    assert not rollout.truncated[0]


def test_a_thought_that_ends_too_soon_goes_on():
    texts = ["no|", "yes.", "maybe so|", "42."]
    rollout, calls = sample(texts, min_tokens=8)
    assert texts_of(rollout) == (["no~yes~maybe so|42."], ["noyesmaybe so|42."])
    assert [contexts for contexts, _, _ in calls] == [
        ["ab"],
        ["abno~"],
        ["abno~yes~"],
        ["abno~yes~maybe so|"],
    ]
    rollout, _ = sample(["no|", "no|", "5."], min_tokens=8, waits=1)
    assert texts_of(rollout)[0] == ["no~no|5."]


def test_a_row_that_begins_with_a_forced_token_says_where_its_prompt_ends():
    rollout, _ = sample(["|", "so it is|", "1."], min_tokens=3)
    assert texts_of(rollout)[1] == ["so it is|1."]
    assert rollout.tokens[0, 2:4].tolist() == Characters().encode("~s")
    # The second one's first action is later, and the two share the prompt alone.
    rollout, _ = sample(["so it is|", "|", "no it is|", "1.", "2."], group=2, min_tokens=3)
    assert texts_of(rollout)[0] == ["so it is|1.", "no it is|2."]
    assert rollout.parent is not None
    assert (rollout.parent.tolist(), rollout.shared.tolist()) == ([0, 0], [0, 2])
    same, _ = sample(["so it is|", "no it is|", "1.", "2."], group=2, min_tokens=3)
    assert same.parent is None


def test_answers_have_settings_of_their_own():
    rollout, calls = sample(["x|", "y.", "1.", "2."], ("ab", "c"), answer_top_k=1)
    assert texts_of(rollout)[0] == ["x|1.", "y."]  # The second ended without a thought's end.
    assert [top_k for _, _, top_k in calls] == [None, 1]
    assert calls[1][0] == ["abx|"]
    assert rollout.group_id.tolist() == [0, 1]


def test_completions_keep_their_limit():
    rollout, _ = sample(["x" * 40, "y" * 40], max_new_tokens=10, min_tokens=1)
    assert texts_of(rollout)[0] == ["xxxxxxxx|y"]
    assert rollout.truncated[0]


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="at least 9 and at most 5"):
        Thinking(min_tokens=9, max_tokens=5)
    flags = ["arithmetic_grpo", "--sampling.thinking.max-tokens=9"]
    assert config.parse(flags).sampling.thinking.is_on
    with pytest.raises(InputError, match="no token is left"):
        config.parse([*flags, "--sampling.max-new-tokens=9"])
    with pytest.raises(InputError, match="continued in another step"):
        config.parse([*flags, "--rollout.partial=2"])
