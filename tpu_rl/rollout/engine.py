"""The rollout engine: sample completions of data rows, and score them.

    request  = RolloutRequest(rows, step)
    sampled  = engine.generate(params, request)      prompts -> sampler, rewards stream meanwhile
    scored   = engine.score(sampled)                 the remaining rewards

An engine is built once, from small values: a policy, a tokenizer, sampler settings, reward
functions. Online rollouts, preference pairs, step labels, Q# examples, partial and stale rollouts,
and evaluation all call it. Another way to produce completions, such as a conversation of
several turns, is another `generate`: it sees the data rows of its request, and `score` stays as it
is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tpu_rl import sampler, wings
from tpu_rl.data import Row
from tpu_rl.rollout import image_prompts, prompts, scoring, signals
from tpu_rl.rollout.group_selection import FirstGroups, ended_before
from tpu_rl.rollout.requests import Decoding as Decoding
from tpu_rl.rollout.requests import Engine as Engine
from tpu_rl.rollout.requests import RolloutRequest as RolloutRequest
from tpu_rl.rollout.requests import Scorer as Scorer
from tpu_rl.rollout.scoring import PartialGroup, Sampled
from tpu_rl.runtime import processes
from tpu_rl.types import Params, Rollout


def make_engine(decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine that answers each prompt, in a conversation if there is an environment."""
    if decoding.thinking is not None and decoding.thinking.is_on:
        from tpu_rl.rollout import thinking

        decoding = thinking.controlled(decoding, scorer.tokenizer)
    if decoding.environment is None:
        return _single_turn_engine(decoding, scorer)
    converse = functools.partial(wings.MODULES["conversations"].generate, decoding, scorer)
    return Engine(converse, scorer, scorer.resume)


def _single_turn_engine(decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine that answers each prompt in a single turn."""
    group_size = decoding.config.samples_per_prompt
    find_end = prompts.stop_at(scorer.tokenizer, decoding.stop_strings)

    def is_truncated(token_ids: list[int]) -> bool:
        if token_ids and token_ids[-1] in decoding.config.stop_ids:
            return False
        return find_end is None or find_end(token_ids) is None

    def generate(params: Params, request: RolloutRequest) -> Sampled:
        began = time.perf_counter()
        num_rows = len(request.rows) * group_size
        resumed = request.resumed or [None] * num_rows
        token_ids, pixels = prompts.encode_with_images(
            request.rows, scorer.tokenizer, decoding.max_prompt_tokens
        )
        reader = scorer.tokenizer.images
        table = None
        if reader is not None and any(images is not None for images in pixels):
            if decoding.policy.with_images is None:
                for row in request.rows:
                    prompts.refuse_images(row, scorer.tokenizer)
            token_ids, table = image_prompts.table(token_ids, pixels, reader)
        verified: list[tuple[int, int]] = []
        signals.mark(decoding.purpose, "rollout", request.step)
        with scorer.streaming(
            request.rows,
            group_size,
            max_groups=request.first_groups,
            step=request.step,
            is_truncated=is_truncated,
        ) as streaming:
            selection = None
            if request.first_groups is not None:
                # With several processes, which of them scores a group is known only at the end.
                on_taken = streaming.on_finished if processes.count() == 1 else None
                selection = FirstGroups(request.first_groups, group_size, resumed, on_taken)
            rollout = decoding.sample(
                params,
                token_ids,
                request.step,
                request.first_row_id + np.arange(num_rows),
                policy_step=request.policy_step,
                stop_at=find_end,
                on_finished=selection.on_finished if selection else streaming.on_finished,
                on_verified=lambda drafts, tokens: verified.append((drafts, tokens)),
                resumed=request.resumed,
                stop_when=selection.is_enough if selection else None,
                images=table,
            )
            if reader is not None and table is not None:
                rollout = image_prompts.with_own_images(rollout, pixels, reader, group_size)
            if selection is None and streaming.on_finished is not None and request.resumed:
                streaming.on_finished(ended_before(resumed))
        signals.mark(decoding.purpose, "rewards", request.step)
        groups = list(range(len(request.rows)))
        unfinished: list[PartialGroup] = []
        streamed_rewards = streaming.answers
        if selection is not None:
            groups = sorted(selection.groups)
            unfinished = _unfinished(request.rows, rollout, selection)
            rollout = take_groups(rollout, groups, group_size)
            streamed_rewards = functools.partial(streaming.answers, groups)
        sampled = scoring.describe(
            [request.rows[group] for group in groups], rollout, scorer.tokenizer
        )
        return replace(
            sampled,
            step=request.step,
            seconds=time.perf_counter() - began,
            drafts=sum(drafts for drafts, _ in verified),
            tokens_of_drafts=sum(tokens for _, tokens in verified),
            unfinished=unfinished,
            num_resumed_tokens=sum(
                len(completion.tokens)
                for group in groups
                for completion in resumed[group * group_size :][:group_size]
                if completion is not None
            ),
            streamed_rewards=streamed_rewards,
            cancel_rewards=streaming.cancel,
        )

    return Engine(generate, scorer, functools.partial(scorer.resume, is_truncated=is_truncated))


def _unfinished(rows: list[Row], rollout: Rollout, selection: FirstGroups) -> list[PartialGroup]:
    """Return the groups that were not taken, with what they have so far."""
    group_size = len(rollout.tokens) // len(rows)
    taken = set(selection.groups)
    groups = [group for group in range(len(rows)) if group not in taken]
    ended = selection.ended.reshape(-1, group_size)[groups].reshape(-1)
    completions = sampler.partial_completions(take_groups(rollout, groups, group_size), ended)
    return [
        PartialGroup(rows[group], completions[index * group_size : (index + 1) * group_size])
        for index, group in enumerate(groups)
    ]


def take_groups(rollout: Rollout, groups: Sequence[int], group_size: int) -> Rollout:
    """Return some groups of a rollout, renumbered."""
    rows = (np.asarray(groups, int)[:, None] * group_size + np.arange(group_size)).reshape(-1)
    part = scoring.entries(rollout, rows)
    group_id = np.repeat(np.arange(len(groups), dtype=np.int32), group_size)
    if rollout.parent is not None:
        part = replace(part, parent=scoring.renumbered(np.asarray(rollout.parent), rows))
    return replace(part, group_id=group_id)
