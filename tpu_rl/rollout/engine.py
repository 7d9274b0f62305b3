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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl import rewards, sampler
from tpu_rl.data import Row
from tpu_rl.rollout import conversations, prompts, scoring, signals
from tpu_rl.rollout.conversations import Environment
from tpu_rl.rollout.group_selection import FirstGroups
from tpu_rl.rollout.scoring import PartialGroup, Sampled, Scored
from tpu_rl.rollout.streaming_rewards import StreamingRewards
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.runtime import processes
from tpu_rl.sampler import PartialCompletion, SamplerConfig
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Params, Purpose, Rollout


@dataclass(frozen=True)
class RolloutRequest:
    """Data rows whose prompts are to be completed, one group of completions for each row."""

    rows: list[Row]
    step: int
    """The step of the run. Random keys depend on it."""
    first_row_id: int = 0
    """Id of the first completion; the others count up. A completion's random key depends on its id,
    so that two requests in one step must not share ids."""
    policy_step: int = 0
    """The number of optimizer steps that the policy has taken. The rollout records it."""
    resumed: Sequence[PartialCompletion | None] | None = None
    """[completions] what an earlier request sampled of each, or None for a new completion."""
    first_groups: int | None = None
    """Return once so many groups are complete: all resumed ones, and the first of the new ones.
    `Sampled.unfinished` has the others. The default waits for all groups."""


class Engine(NamedTuple):
    """All that a source of experience knows about rollouts."""

    generate: Callable[[Params, RolloutRequest], Sampled]
    """(the whole params tree, request) -> completions. All processes call it together."""
    score: Callable[[Sampled], Scored]
    """Completions -> completions with rewards. All processes call it together."""
    resume: Callable[[Sampled], Sampled] = lambda sampled: sampled
    """Completions of an earlier process -> the same, whose rewards are on their way. By default
    `score` computes all of them."""

    def roll_out(self, params: Params, request: RolloutRequest) -> Scored:
        """Generate completions and score them."""
        return self.score(self.generate(params, request))


class Scorer(NamedTuple):
    """The reward functions of a run, and how they are applied."""

    tokenizer: Tokenizer
    reward_functions: Mapping[str, rewards.Reward] = {}
    """Name -> function. Rewards are added up; without any, they are zero."""
    max_fault_share: float = rewards.DEFAULT_LIMITS.fault_share
    """Scoring fails if reward functions fail on a larger share of the completions."""
    terms: Sequence[rewards.RewardTerm] = ()
    """The terms of the total, by names of functions. By default each function once, unweighted."""

    def __call__(self, sampled: Sampled) -> Scored:
        return scoring.score(sampled, self.reward_functions, self.max_fault_share, self.terms)

    @contextmanager
    def streaming(
        self,
        rows: list[Row],
        group_size: int,
        max_groups: int | None = None,
        step: int = 0,
        is_truncated: Callable[[list[int]], bool] | None = None,
    ) -> Iterator[StreamingRewards]:
        """Yield what computes rewards of complete groups during sampling.

        If sampling fails or is interrupted, questions that wait are dropped. `max_groups` is the
        number of groups that will be asked about, if these are not all. For the others see
        `StreamingRewards`.
        """
        prompt_of, columns = scoring.repeat_rows(rows, group_size)
        streaming = StreamingRewards(
            self.reward_functions,
            prompt_of,
            columns,
            group_size,
            scoring.local_rows(len(prompt_of), group_size),
            self.tokenizer.decode,
            None if max_groups is None else max_groups * group_size,
            step,
            is_truncated,
        )
        try:
            yield streaming
        except BaseException:  # Ctrl-C too.
            streaming.cancel()
            raise

    def resume(
        self, sampled: Sampled, is_truncated: Callable[[list[int]], bool] | None = None
    ) -> Sampled:
        """Ask for rewards of completions that a checkpoint brought, as `streaming` would have."""
        group_size = len(sampled.completions) // len(sampled.rows)
        with self.streaming(
            sampled.rows, group_size, step=sampled.step, is_truncated=is_truncated
        ) as streaming:
            token_ids = dict(enumerate(scoring.chosen_ids(sampled)))
            answers = dict(enumerate(scoring.answers_of(sampled)))
            local = scoring.local_rows(len(answers), group_size)
            streaming.on_answered(
                {row: answers[row] for row in range(len(answers))[local]}, token_ids
            )
        return replace(sampled, streamed_rewards=streaming.answers, cancel_rewards=streaming.cancel)


_SAMPLING = threading.RLock()
"""Held by the thread that samples."""


@dataclass(frozen=True)
class Decoding:
    """Everything that decides how completions are decoded."""

    policy: RolloutPolicy
    config: SamplerConfig
    """`samples_per_prompt` is the group size."""
    max_prompt_tokens: int
    seed: int = 0
    purpose: Purpose = Purpose.ROLLOUT
    """Random keys depend on the seed, the purpose and the step."""
    stop_strings: tuple[str, ...] = ()
    environment: Environment | None = None
    """What answers the policy. None: a completion is a single turn."""

    @contextmanager
    def on_its_mesh(self) -> Iterator[None]:
        """Set the sampling mesh, for one thread at a time.

        Programs that two threads start on several devices may wait for each other forever.
        """
        with _SAMPLING, jax.set_mesh(self.policy.mesh), ExitStack() as contexts:
            if self.policy.device is not None:
                contexts.enter_context(jax.default_device(self.policy.device))
            yield

    def sample(
        self,
        params: Params,
        prompts: list[list[int]],
        step: int,
        row_ids: np.ndarray,
        *,
        policy_step: int = 0,
        limits: np.ndarray | None = None,
        stop_at: sampler.StopAt | None = None,
        on_finished: sampler.OnFinished | None = None,
        on_verified: sampler.OnVerified | None = None,
        resumed: Sequence[PartialCompletion | None] | None = None,
        stop_when: Callable[[np.ndarray], bool] | None = None,
    ) -> Rollout:
        """Complete prompts of token ids with the policy; see `sampler.sample` for the arguments."""
        with self.on_its_mesh():
            return sampler.sample(
                self.policy.policy,
                self.policy.params(params),
                prompts,
                sampler.run_key(self.seed, self.purpose, step),
                self.config,
                limits=limits,
                row_ids=row_ids,
                policy_step=policy_step,
                mesh=self.policy.mesh,
                on_finished=on_finished,
                stop_at=stop_at,
                on_segment=signals.between_segments,
                drafter=self.policy.drafter,
                on_verified=on_verified,
                resumed=resumed,
                stop_when=stop_when,
            )


def make_engine(decoding: Decoding, scorer: Scorer) -> Engine:
    """Return the engine that answers each prompt, in a conversation if there is an environment."""
    if decoding.environment is None:
        return _single_turn_engine(decoding, scorer)
    converse = functools.partial(conversations.generate, decoding, scorer)
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
        token_ids = prompts.encode(request.rows, scorer.tokenizer, decoding.max_prompt_tokens)
        verified: list[tuple[int, int]] = []
        signals.mark(decoding.purpose, "rollout", request.step)
        with scorer.streaming(
            request.rows, group_size, request.first_groups, request.step, is_truncated
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
            )
            if selection is None and streaming.on_finished is not None and request.resumed:
                streaming.on_finished(_ended_before(resumed))
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
            num_resumed_tokens=_num_resumed_tokens(resumed, groups, group_size),
            streamed_rewards=streamed_rewards,
            cancel_rewards=streaming.cancel,
        )

    return Engine(generate, scorer, functools.partial(scorer.resume, is_truncated=is_truncated))


def _ended_before(resumed: Sequence[PartialCompletion | None]) -> dict[int, list[int]]:
    """Return row -> token ids of resumed rows that had ended before: the sampler reports none."""
    return {
        row: completion.tokens.tolist()
        for row, completion in enumerate(resumed)
        if completion is not None and completion.ended
    }


def _num_resumed_tokens(
    resumed: Sequence[PartialCompletion | None], groups: Sequence[int], group_size: int
) -> int:
    completions = [
        resumed[row]
        for group in groups
        for row in range(group * group_size, (group + 1) * group_size)
    ]
    return sum(len(completion.tokens) for completion in completions if completion is not None)


def _unfinished(rows: list[Row], rollout: Rollout, selection: FirstGroups) -> list[PartialGroup]:
    """Return the groups that were not taken, with what they have so far."""
    group_size = len(rollout.tokens) // len(rows)
    taken = set(selection.groups)
    groups = [group for group in range(len(rows)) if group not in taken]
    ended = selection.ended.reshape(-1, group_size)[groups].reshape(-1)
    completions = sampler.partial_completions(take_groups(rollout, groups, group_size), ended)
    return in_groups([rows[group] for group in groups], completions)


def in_groups(rows: list[Row], completions: Sequence[PartialCompletion]) -> list[PartialGroup]:
    """Return each row with its completions, which are equally many and stand together."""
    size = len(completions) // max(len(rows), 1)
    return [
        PartialGroup(row, list(completions[index * size : (index + 1) * size]))
        for index, row in enumerate(rows)
    ]


def take_groups(rollout: Any, groups: Sequence[int], group_size: int) -> Any:
    """Return some groups of a rollout, renumbered."""
    rows = (np.asarray(groups, int)[:, None] * group_size + np.arange(group_size)).reshape(-1)
    part = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], rollout)
    group_id = np.repeat(np.arange(len(groups), dtype=np.int32), group_size)
    if getattr(rollout, "parent", None) is not None:
        part = replace(part, parent=scoring.renumbered(rollout.parent, rows))
    return replace(part, group_id=group_id)
