"""Thoughts of a chosen length, and answers with sampling settings of their own.

    thought of min to max tokens | close (forced where the thought is too long) | answer

A completion is sampled in phases. A thought that reaches its limit is closed by `close`. One that
ends too soon goes on: what ended it is dropped, and `wait` stands in its place. This is budget
forcing (s1, arXiv 2501.19393). Then the answer follows, from fewer tokens if `answer_top_k` says
so: a stochastic plan, and an execution that is as good as greedy (E2C, arXiv 2509.23946).

Forced tokens are no actions. All others keep the log-probs that they were sampled with: over the
full vocabulary at the sampling temperature, and those of the truncated distribution. So both phases
share one temperature, which the update knows.

Rows differ in where their phases end, so each phase reads its contexts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tpu_rl.plain_values import fields_of
from tpu_rl.rollout.branches import Branch, to_rollout
from tpu_rl.rollout.prompts import first_length
from tpu_rl.rollout.requests import Decoding
from tpu_rl.sampler import SamplerConfig, Turn
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Params, Rollout


@dataclass(frozen=True)
class ThinkingDecoding(Decoding):
    """Decoding in phases, as `thinking` says; see the module."""

    tokenizer: Tokenizer | None = None

    def sample(
        self,
        params: Params,
        prompts: list[list[int]],
        step: int,
        row_ids: np.ndarray,
        **settings: Any,
    ) -> Rollout:
        """Complete prompts in phases. `settings` are those of `Decoding.sample`."""
        thinking = self.thinking
        tokenizer = self.tokenizer
        assert thinking is not None
        assert tokenizer is not None
        close = tokenizer.encode(thinking.close, special=True)
        wait = tokenizer.encode_continuation(thinking.wait) if thinking.wait else []
        group = self.config.samples_per_prompt
        starts = [len(prompt) for prompt in prompts for _ in range(group)]
        rows = [Branch() for _ in starts]
        for i, row in enumerate(rows):
            row.observe(list(prompts[i // group]))
        budget = self.config.max_new_tokens
        longest = min(thinking.max_tokens or budget, budget - len(close) - 1)
        births = np.zeros((len(rows), 2), np.uint32)

        def written(i: int) -> list[int]:
            """Return the completion of a row so far."""
            return rows[i].tokens[starts[i] :]

        def text(ids: Sequence[int]) -> str:
            return tokenizer.decode(ids, skip_special=False)

        def has_closed(ids: list[int]) -> int | None:
            return first_length(ids, lambda part: thinking.close in text(part))

        def decode(
            which: list[int],
            config: SamplerConfig,
            limits: list[int],
            stop_at: Any,
            is_first: bool = False,
        ) -> None:
            # Few different numbers of rows, so that few programs are compiled.
            places = which + which[-1:] * (_power_of_two(len(which), len(rows)) - len(which))
            columns = config.prompt_length
            if columns is not None and not is_first:
                columns += budget
            config = replace(config, samples_per_prompt=1, prompt_length=columns)
            found = replace(self, config=config)._sample_once(
                params,
                [rows[i].tokens for i in places],
                step,
                row_ids[places],
                **{**settings, "stop_at": stop_at, "on_finished": None},
                limits=np.array(limits + limits[-1:] * (len(places) - len(which))),
            )
            for place, i in enumerate(which):
                mask = np.asarray(found.action_mask)[place]
                rows[i].add(
                    [],
                    Turn(
                        i,
                        np.asarray(found.tokens)[place][mask].tolist(),
                        np.asarray(found.log_probs)[place][mask],
                        np.asarray(found.behaviour_log_probs)[place][mask],
                        not found.truncated[place],
                    ),
                )
                if not births[i].any():
                    births[i] = np.asarray(found.birth_key)[place]

        thoughts = list(range(len(rows)))
        answers: list[int] = []
        for number in range(thinking.waits + 1):
            if not thoughts:
                break
            limits = [longest - len(written(i)) for i in thoughts]
            decode(thoughts, self.config, limits, has_closed, is_first=number == 0)
            again = []
            for i in thoughts:
                row = rows[i]
                ids = written(i)
                end = has_closed(ids)
                is_over = ids[-1] in self.config.stop_ids
                start = _before(ids, text, thinking.close) if end else len(ids) - 1
                # A further thought must have a token, and leave room for its end and an answer.
                room = longest - start - len(wait)
                is_short = (end or is_over) and start < thinking.min_tokens and room > 0
                if is_short and number < thinking.waits:
                    row.cut(starts[i] + start)
                    row.observe(wait)
                    again.append(i)
                    continue
                if not end and not is_over:
                    row.observe(close)
                if not is_over:
                    answers.append(i)
            thoughts = again
        if answers:
            answers.sort()
            config = replace(self.config, top_k=thinking.answer_top_k or self.config.top_k)
            limits = [budget - len(written(i)) for i in answers]
            decode(answers, config, limits, settings.get("stop_at"))
        if settings.get("on_finished") is not None:
            settings["on_finished"]({i: written(i) for i in range(len(rows))})
        return to_rollout(
            [[row] for row in rows],
            births,
            group,
            (self.config.prompt_length or max(starts)) + budget,
            self.config.pad_id,
            settings.get("policy_step", 0),
        )

    def _sample_once(self, *args: Any, **settings: Any) -> Rollout:
        return super().sample(*args, **settings)


def controlled(decoding: Decoding, tokenizer: Tokenizer) -> Decoding:
    """Return decoding in phases if its settings ask for it."""
    if decoding.thinking is None or not decoding.thinking.is_on:
        return decoding
    return ThinkingDecoding(**fields_of(decoding), tokenizer=tokenizer)


def _before(ids: list[int], text: Any, close: str) -> int:
    """Count the tokens before the first `close`."""
    first = text(ids).index(close)
    for count in range(len(ids), -1, -1):
        if len(text(ids[:count])) <= first:
            return count
    return 0


def _power_of_two(count: int, most: int) -> int:
    return min(1 << (count - 1).bit_length(), most)
