"""The episodes of a request: what conversations and agents share before and after they run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from tpu_rl import sampler
from tpu_rl.rollout import prompts, scoring, signals
from tpu_rl.rollout.branches import Branch, to_rollout
from tpu_rl.rollout.conversations.episode_log import EpisodeLog
from tpu_rl.rollout.conversations.rounds import Rounds
from tpu_rl.rollout.image_prompts import ImageTable
from tpu_rl.rollout.requests import Decoding, RolloutRequest, Scorer
from tpu_rl.rollout.scoring import EpisodeOutcomes, EpisodeRows, PartialGroup, Sampled, entries
from tpu_rl.sampler import ConversationSampler
from tpu_rl.types import Params, Rollout


class FinishedEpisode(NamedTuple):
    """An episode that is over, on its way to all processes."""

    name: str
    """The class of its environment, which names its rewards."""
    prompt: Any
    """A text or messages, as the policy read it."""
    messages: list[dict[str, Any]]
    """Messages behind the prompt."""
    branches: list[Branch]
    counts: dict[str, int]
    """Counts of `EpisodeOutcomes`."""
    reward: float | None
    """Reward of all of it; None: not scored."""
    fault: str
    turn_rewards: list[tuple[int, int, float]] = []
    """(branch, its tokens up to the turn's end, reward) of turns: parts of the reward."""
    waits: list[tuple[str, float]] = []
    state: Mapping[str, Any] = {}
    images: list[bytes] = []
    policy_step: int = 0
    """The optimizer steps of the policy that sampled its first turn."""
    num_earlier: int = 0
    """The number of tokens that earlier requests sampled."""

    @property
    def actions(self) -> list[int]:
        """The tokens that the policy chose."""
        return [token for branch in self.branches for token in branch.actions]


@dataclass
class EpisodeBatch:
    """The N episodes of a request; completions of a prompt are neighbors."""

    decoding: Decoding
    scorer: Scorer
    request: RolloutRequest
    shares_images: bool = False
    """True if all processes call `ImageTable.share`."""

    def __post_init__(self):
        decoding = self.decoding
        request = self.request
        self._began = time.perf_counter()
        signals.mark(decoding.purpose, "rollout", request.step)
        self.group_size = decoding.config.samples_per_prompt
        count = len(request.rows) * self.group_size
        self.local = scoring.local_rows(count, self.group_size)
        """The episodes that this process runs: those of whole groups."""
        with decoding.on_its_mesh():
            run_key = sampler.run_key(decoding.seed, decoding.purpose, request.step)
            row_ids = request.first_row_id + np.arange(count)
            self.keys = np.array(jax.random.key_data(sampler.row_keys(run_key, row_ids)))
        """[N, 2] uint32: the random key of each. One that goes on keeps its own."""
        for episode, log in enumerate(request.logs):
            if log is not None:
                self.keys[episode] = log.key
        tokenizer = self.scorer.tokenizer
        self.images = None
        if tokenizer.images is not None and decoding.policy.with_images is not None:
            features = decoding.policy.with_images
            self.images = ImageTable(tokenizer, features, is_shared=self.shares_images)
        self.streaming = self.scorer.streaming(
            request.rows, self.group_size, max_groups=request.first_groups, step=request.step
        )

    def rounds(self, episodes: slice) -> Rounds:
        """Return the rounds of some of the episodes, in whole groups."""
        logs = self.request.logs or [None] * len(self.keys)
        is_old = [log is not None for log in logs[episodes]][:: self.group_size]
        return Rounds(self.request.first_groups or len(is_old), is_old, self.group_size)

    def rows_of(self, group: int) -> range:
        """Return the episodes of a group."""
        return range(group * self.group_size, (group + 1) * self.group_size)

    def live_sampler(
        self, params: Params, length: int, prompt_length: int, contexts_at_once: int
    ) -> ConversationSampler:
        """Return the sampler of conversations of `length` tokens; see `ConversationSampler`."""
        decoding = self.decoding
        tokenizer = self.scorer.tokenizer
        config = decoding.config
        return ConversationSampler(
            decoding.policy.policy,
            decoding.policy.params(params),
            config,
            num_slots=min(config.max_num_seqs, config.rows_of_programs(len(self.keys))),
            max_length=length,
            prompt_length=prompt_length,
            contexts_at_once=contexts_at_once,
            mesh=decoding.policy.mesh,
            stop_at=prompts.stop_at(tokenizer, decoding.stop_strings),
            on_segment=signals.between_segments,
            whole_images=tokenizer.images and tokenizer.images.whole_images,
            images=self.images,
        )

    def sampled(
        self,
        finished: Mapping[int, FinishedEpisode],
        unfinished: Mapping[int, EpisodeLog],
        length: int,
        is_scored: bool,
        idle_seconds: float,
    ) -> Sampled:
        """Return the sampled batch of the engine.

        Args:
            finished: the episodes of the groups that are taken, of all processes, by number.
            unfinished: the others.
            length: columns of the rollout.
            is_scored: see `EpisodeOutcomes`, as for `idle_seconds`.
        """
        request = self.request
        tokenizer = self.scorer.tokenizer
        signals.mark(self.decoding.purpose, "rewards", request.step)
        numbers = sorted(finished)
        groups = [number // self.group_size for number in numbers[:: self.group_size]]
        episodes = [finished[number] for number in numbers]
        rollout = to_rollout(
            [episode.branches for episode in episodes],
            self.keys[numbers],
            self.group_size,
            length,
            self.decoding.config.pad_id,
            np.array([episode.policy_step for episode in episodes]),
        )
        if self.images is not None:
            rollout = self.images.with_own_images(rollout)
        turn_rewards = _turn_rewards(episodes, rollout)
        of_rows = None
        if rollout.episode_id is not None:
            texts = [
                tokenizer.decode(tokens[mask].tolist())
                for tokens, mask in zip(rollout.tokens, rollout.action_mask, strict=True)
            ]
            last = np.cumsum([len(episode.branches) for episode in episodes]) - 1
            of_rows = EpisodeRows(replace(rollout, rewards=turn_rewards), last, texts)
            rollout = replace(entries(rollout, last), parent=None, shared=None, episode_id=None)
            turn_rewards = np.zeros(rollout.action_mask.shape, np.float32)
        rewards = [np.nan if episode.reward is None else episode.reward for episode in episodes]
        return Sampled(
            rollout=rollout,
            rows=[request.rows[group] for group in groups],
            prompts=[prompts.as_text(episode.prompt) for episode in episodes],
            completions=[prompts.as_text(episode.messages) for episode in episodes],
            lengths=np.array([len(episode.actions) for episode in episodes]),
            step=request.step,
            seconds=time.perf_counter() - self._began,
            unfinished=[
                PartialGroup(row, logs=[unfinished[number] for number in self.rows_of(group)])
                for group, row in enumerate(request.rows)
                if group not in groups
            ],
            num_resumed_tokens=sum(episode.num_earlier for episode in episodes),
            streamed_rewards=partial(
                self.streaming.answers, groups if request.first_groups else None
            ),
            cancel_rewards=self.streaming.cancel,
            episodes=EpisodeOutcomes(
                names=[episode.name for episode in episodes],
                is_scored=is_scored,
                rewards=np.array(rewards, np.float32),
                turn_rewards=turn_rewards,
                faults=[episode.fault for episode in episodes],
                messages=[episode.messages for episode in episodes],
                states=[episode.state for episode in episodes],
                counts={
                    name: np.array([episode.counts[name] for episode in episodes])
                    for name in episodes[0].counts
                },
                images=[e.images for e in episodes] if any(e.images for e in episodes) else [],
                waits=[episode.waits for episode in episodes],
                idle_seconds=idle_seconds,
            ),
            episode_rows=of_rows,
        )


def _turn_rewards(episodes: list[FinishedEpisode], rollout: Rollout) -> np.ndarray:
    """Return the rewards of turns [rows, T], each on the last token of its turn."""
    turn_rewards = np.zeros(rollout.action_mask.shape, np.float32)
    first_row = 0
    for episode in episodes:
        for branch, end, reward in episode.turn_rewards:
            turn_rewards[first_row + branch, end - 1] = reward
        first_row += len(episode.branches)
    return turn_rewards
