"""Labels of steps from continuations, with a decoder whose continuations are known."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.echo import TOKENIZER, EchoDecoding, score_prompts
from tpu_rl.algos.process_reward import ProcessRewardConfig
from tpu_rl.errors import InputError
from tpu_rl.experience.config import FileData
from tpu_rl.experience.sources import step_labels
from tpu_rl.rollout.engine import Scorer
from tpu_rl.types import Rollout

ZERO = TOKENIZER.encode("0")[0]
WIDTH = 10
TEXTS = ("1023041", "1023041", "12")
"""Prompts of one token, with completions of the steps 0 | 230 | 41 and 2."""


class Continuing(EchoDecoding):
    """Continues each prefix with 1, 2, 1, 2, ... and an end, and remembers the prefixes."""

    def sample(
        self, params: Any, prompts: Any, step: int, row_ids: np.ndarray, **settings: Any
    ) -> Rollout:
        self.__dict__["prefixes"] = [TOKENIZER.decode(ids) for ids in prompts]
        self.__dict__["limits"] = settings["limits"]
        count = len(row_ids) // len(prompts)
        texts = []
        for row in range(len(row_ids)):
            digit = TOKENIZER.encode("12")[row % count % 2]
            texts.append((prompts[row // count], [digit, TOKENIZER.eos_ids[0]]))
        return rollout_of(texts)


def rollout_of(texts: Any) -> Rollout:
    tokens = np.zeros((len(texts), WIDTH), np.int32)
    mask = np.zeros((len(texts), WIDTH), bool)
    for row, (begin, rest) in enumerate(texts):
        tokens[row, : len(begin) + len(rest)] = [*begin, *rest]
        mask[row, len(begin) : len(begin) + len(rest)] = True
    template = score_prompts(["12"], {}, group_size=2).rollout
    rows = np.zeros(len(texts), int)
    taken = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], template)
    return taken.replace(
        tokens=tokens,
        action_mask=mask,
        group_id=np.arange(len(texts), dtype=np.int32),
        scored=np.ones(len(texts), bool),
    )


def labels(config: ProcessRewardConfig, step: int) -> Any:
    """The examples of a step, and the decoder that continued."""
    decoding = Continuing(config.continuations)
    ids = [TOKENIZER.encode(text) for text in TEXTS]
    answers = rollout_of([(row[:1], [*row[1:], TOKENIZER.eos_ids[0]]) for row in ids])

    def ends_with_1(completions: Any, **_: Any) -> list[float]:
        return [float(text.endswith("1")) for text in completions]

    scorer = Scorer(TOKENIZER, {"one": ends_with_1})
    scored = score_prompts(["12"], {}, group_size=1)
    scored = scored.__class__(
        **vars(scored)
        | {
            "rollout": answers,
            "rows": [{"prompt": "1"}] * 3,
            "rewards": np.array([1.0, np.nan, 0.0], np.float32),
        }
    )
    return step_labels.monte_carlo_labels(scored, decoding, scorer, {}, step, config), decoding


def test_a_step_is_worth_the_share_of_right_continuations():
    """Of three continuations two end with 1. What was cut at its end has its own reward."""
    config = ProcessRewardConfig(steps="monte_carlo", separators=(ZERO,), continuations=3)
    cuts = set()
    for step in range(12):
        examples, decoding = labels(config, step)
        for row, text in enumerate(TEXTS):
            prefix = decoding.prefixes[row]
            assert text.startswith(prefix)
            label_at = np.flatnonzero(examples.action_mask[row])
            if prefix == text:
                # The second completion has no reward, so its last end has no label.
                assert len(label_at) == (row != 1)
                assert examples.returns[row].sum() == (row == 0)
                assert decoding.limits[3 * row] == 1
            else:
                assert list(label_at) == [len(prefix) - 1]
                assert examples.returns[row, label_at[0]] == pytest.approx(2 / 3)
                cuts.add(prefix)
    # Packing takes what stands before a label for the prompt, which no two rows share.
    assert list(examples.group_id) == [0, 1, 2]
    # The ends of both inner steps were drawn.
    assert cuts == {"10", "10230"}


def test_a_task_labels_steps_by_the_text_of_a_conversation():
    rows = [{"prompt": [{"role": "user", "content": "Edges"}]}]
    scored = replace(score_prompts(["12"], {}, group_size=2), rows=rows)

    def label(prompt: str, completion: str) -> list[tuple[str, bool]]:
        return [(completion, prompt == "Edges")]

    labeled = step_labels.label_steps(scored, label)
    assert [row["labels"] for row in labeled] == [(True,), (True,)]
    assert labeled[0]["prompt"] == rows[0]["prompt"]


def test_what_cannot_label_steps_is_refused():
    with pytest.raises(InputError, match="no continuations"):
        ProcessRewardConfig(continuations=8)
    with pytest.raises(InputError, match="nothing says which steps are right"):
        step_labels.require_steps(FileData(), "reference", "monte_carlo", is_judged=False)
    step_labels.require_steps(FileData(), "reference", "monte_carlo")
