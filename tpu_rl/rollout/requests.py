"""The parts of engines, and the requests that they answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tpu_rl import rewards, sampler
from tpu_rl.data import Row
from tpu_rl.environments.pool import EnvironmentPool
from tpu_rl.rollout import scoring, signals
from tpu_rl.rollout.scoring import Sampled, Scored
from tpu_rl.rollout.streaming_rewards import StreamingRewards
from tpu_rl.rollout.weights import RolloutPolicy
from tpu_rl.sampler import PartialCompletion, SamplerConfig, Thinking
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Params, Purpose, Rollout

if TYPE_CHECKING:
    from tpu_rl.rollout.conversations.episode_log import EpisodeLog


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
    logs: Sequence[EpisodeLog | None] = ()
    """The same for conversations: [completions], or empty if all are new."""
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
        return scoring.score(
            sampled,
            self.reward_functions,
            self.max_fault_share,
            self.terms,
            self.tokenizer.decode_answer,
        )

    def streaming(self, rows: list[Row], group_size: int, **settings: Any) -> StreamingRewards:
        """Return the rewards that are computed of complete groups during sampling.

        `settings` are further fields of `StreamingRewards`.
        """
        decode = self.tokenizer.decode_answer
        return StreamingRewards(self.reward_functions, rows, group_size, decode, **settings)

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


class Agent(NamedTuple):
    """A function of the user, and how it is run."""

    path: str
    """FILE.py:FUNCTION."""
    pool: EnvironmentPool
    max_calls: int
    """Calls of the server that an episode may make."""


class Environment(NamedTuple):
    """The environment that answers the policy, and its limits."""

    pool: EnvironmentPool
    max_turns: int
    """Turns of the policy in an episode."""
    max_observation_tokens: int
    """Tokens of one observation."""
    refuses_long: bool = False
    """Longer observations are faults; otherwise they are cut."""

    @property
    def is_scored(self) -> bool:
        """True if a class of the environment gives rewards."""
        classes = self.pool.descriptions.values()
        return any(known.is_scored or known.form == "game" for known in classes)


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
    """The environment that answers the policy. None: a completion is a single turn."""
    thinking: Thinking | None = None
    """The length of thoughts, for engines of single turns."""

    @contextmanager
    def on_its_mesh(self) -> Iterator[None]:
        """Set the sampling mesh, if it has several devices for one thread at a time.

        Programs that two threads start on several devices may wait for each other forever.
        """
        with jax.set_mesh(self.policy.mesh), ExitStack() as contexts:
            if self.policy.mesh.size > 1:
                contexts.enter_context(_SAMPLING)
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
        images: np.ndarray | None = None,
        **settings: Any,
    ) -> Rollout:
        """Complete prompts of token ids with the policy.

        `images` [I, C, H, W] are those that the prompts refer to (`image_prompts.table`). The
        settings are those of `sampler.sample` that say nothing of the policy.
        """
        with self.on_its_mesh():
            policy_params = self.policy.params(params)
            if images is not None:
                assert self.policy.with_images is not None, "the model reads images"
                policy_params = self.policy.with_images(policy_params, images)
            return sampler.sample(
                self.policy.policy,
                policy_params,
                prompts,
                sampler.run_key(self.seed, self.purpose, step),
                self.config,
                row_ids=row_ids,
                mesh=self.policy.mesh,
                on_segment=signals.between_segments,
                drafter=self.policy.drafter,
                **settings,
            )
