"""Conversations: the policy's turns, and what an environment answers, until the episode is over.

    prompts   = episodes.begin()                 environments are reset
    turns     = live.step()                      the policy writes, in `ConversationSampler`
                episodes.on_turn(turn)           tools start, in other processes
    answers   = episodes.poll()                  token ids, which follow the turn

A conversation keeps its cache while its tools work, and others are decoded meanwhile. What the
policy wrote is never encoded again: a conversation is its prompt's ids, the sampled ids of each
turn, and the ids of each observation. The limit `max_new_tokens` counts turns and observations.

An episode that goes on (`RolloutRequest.logs`) takes the turns and the answers of its log first.

A chat template may rewrite what came before, for example drop what the model thought in earlier
turns. The next turn then begins a row of its own, which reads the rewritten history.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpu_rl import sampler
from tpu_rl.rollout import signals
from tpu_rl.rollout.branches import Branch
from tpu_rl.rollout.conversations.batches import EpisodeBatch, FinishedEpisode
from tpu_rl.rollout.conversations.episode_log import EpisodeLog, LoggedTurn
from tpu_rl.rollout.conversations.episodes import Episode, Episodes, History
from tpu_rl.rollout.conversations.rounds import Rounds
from tpu_rl.rollout.requests import Decoding, Environment, RolloutRequest, Scorer
from tpu_rl.rollout.scoring import Sampled
from tpu_rl.runtime import typed_json
from tpu_rl.sampler import ConversationSampler, SamplerConfig, TurnRequest, slots
from tpu_rl.types import Params, Purpose


@dataclass
class _Conversation:
    """An episode in the making."""

    prompt: list[int]
    key: np.ndarray
    turns: list[LoggedTurn]
    """Those of its log."""
    num_earlier: int = 0
    """The number of tokens that earlier requests sampled."""
    branches: list[Branch] = field(default_factory=list)
    """Its rows. There are several if the chat template has rewritten what came before."""
    turn_ends: list[tuple[int, int]] = field(default_factory=list)
    """Of each turn, its branch, and the number of the branch's tokens up to its end."""

    def __post_init__(self):
        self._begin(self.prompt, 0, 0)

    def _begin(self, tokens: list[int], parent: int, shared: int) -> None:
        branch = Branch(parent, shared, truncated=True)
        branch.observe(tokens)
        self.branches.append(branch)

    @property
    def tokens(self) -> list[int]:
        """Everything that the next turn continues."""
        return self.branches[-1].tokens

    @property
    def actions(self) -> list[int]:
        """The tokens that the policy chose."""
        return [token for branch in self.branches for token in branch.actions]

    @property
    def logged_turn(self) -> sampler.Turn | None:
        """The next turn, if the log has it."""
        number = len(self.turn_ends)
        return self.turns[number].turn if number < len(self.turns) else None

    def add_turn(self, turn: sampler.Turn) -> None:
        self.branches[-1].add([], turn)
        self.turn_ends.append((len(self.branches) - 1, len(self.tokens)))

    def rewrite(self, token_ids: list[int]) -> None:
        """Begin a row with a rewritten history."""
        common = [sampler.common_prefix(branch.tokens, token_ids) for branch in self.branches]
        parent = int(np.argmax(common))
        self._begin(token_ids, parent, common[parent])

    def end(self) -> None:
        """Drop observations that nobody answered."""
        branch, end = self.turn_ends[-1]
        del self.branches[branch + 1 :]
        self.branches[-1].cut(end)

    def finished(self, environment: Environment, episode: Episode) -> FinishedEpisode:
        """Return the episode with what its environment says about it."""
        # A turn that the environment never saw has no reward.
        turns = list(zip(self.turn_ends, episode.turn_rewards, strict=False))
        given = [r for r in (*episode.turn_rewards, episode.reward) if r is not None]
        return FinishedEpisode(
            environment.pool.description(episode.row).name,
            episode.prompt,
            episode.messages,
            self.branches,
            {
                "turns": len(self.turn_ends),
                "tool_calls": episode.tool_calls,
                "errors": episode.errors,
                "observation_tokens": sum(branch.num_observed for branch in self.branches),
            },
            sum(given) if given else None,
            episode.fault,
            [(*place, reward) for place, reward in turns if reward],
            episode.log.waits,
            episode.state,
            episode.images,
            self.turns[0].policy_step,
            self.num_earlier,
        )


def generate(
    decoding: Decoding, scorer: Scorer, params: Params, request: RolloutRequest
) -> Sampled:
    """Hold a conversation for each completion that the request asks for.

    All processes call it together. Each runs the environments of its own groups.
    """
    environment = decoding.environment
    assert environment is not None
    batch = EpisodeBatch(decoding, scorer, request, shares_images=True)
    group_size = batch.group_size
    with (
        decoding.on_its_mesh(),
        batch.streaming,
        Episodes(
            rows=request.rows,
            group_size=group_size,
            environment=environment,
            tokenizer=scorer.tokenizer,
            max_prompt_tokens=decoding.max_prompt_tokens,
            local=batch.local,
            step=request.step,
            first_row_id=request.first_row_id,
            seed=decoding.seed,
            stop_strings=decoding.stop_strings,
            is_evaluation=decoding.purpose == Purpose.EVALUATION,
            image_table=batch.images,
            old_logs=request.logs,
            saves=request.first_groups is not None,
        ) as episodes,
    ):
        first_turns = _shared(episodes.begin())
        if batch.images is not None:
            batch.images.share()
        conversations = []
        for row, key in enumerate(batch.keys):
            # Those of other processes have no log here.
            log = episodes.logs.get(row, EpisodeLog(seed=0))
            log.key = key
            conversations.append(_Conversation(first_turns[row], key, log.turns, log.num_tokens))
        columns = _prompt_columns(decoding.config, conversations)
        length = columns + decoding.config.max_new_tokens
        contexts = _contexts_at_once(decoding, len(conversations))
        live = batch.live_sampler(params, length, columns, contexts)
        rounds = batch.rounds(slice(None))
        idle_seconds = _converse(batch, live, conversations, episodes, rounds)
        complete_rows = [row for group in sorted(rounds.complete) for row in batch.rows_of(group)]
        episodes.unfinished = set(episodes.logs) - set(complete_rows)
        for row in complete_rows:
            conversations[row].end()
        finished = _shared(
            {
                # All processes have the tokens of all rows.
                row: conversations[row]
                .finished(environment, episodes.by_row[row])
                ._replace(branches=[])
                for row in complete_rows
                if row in episodes.logs
            }
        )
        finished = {
            row: episode._replace(branches=conversations[row].branches)
            for row, episode in finished.items()
        }
    return batch.sampled(finished, episodes.logs, length, environment.is_scored, idle_seconds)


def _converse(
    batch: EpisodeBatch,
    live: ConversationSampler,
    conversations: list[_Conversation],
    episodes: Episodes,
    rounds: Rounds,
) -> float:
    """Decode turns and wait for answers, until the episodes that the step takes are over.

    Reward functions are asked about a group once its episodes are over. Returns the seconds in
    which no turn could be decoded.
    """
    idle_seconds = 0.0
    config = batch.decoding.config
    local = batch.local
    images = batch.images
    # Conversations that wait for their next turn, episodes that are over, and groups about which
    # reward functions were asked.
    ready = list(range(len(conversations)))
    over: set[int] = set()
    judged: set[int] = set()

    def add_turn(row: int, turn: sampler.Turn) -> None:
        conversations[row].add_turn(turn)
        if local.start <= row < local.stop:
            episodes.on_turn(row, turn.tokens, turn.stopped)

    while len(judged) < rounds.num_groups or not rounds.is_over:
        logged = {row: conversations[row].logged_turn for row in ready}
        waiting = [row for row in ready if logged[row] is None]
        begun = rounds.may_begin(waiting)
        live.submit([_next_turn(row, conversations[row], config) for row in begun])
        ready = sorted(set(waiting) - set(begun))
        for row, turn in logged.items():
            if turn is not None:
                add_turn(row, turn)
        for turn in live.step():
            row = turn.conversation
            conversations[row].turns.append(LoggedTurn(turn, batch.request.policy_step))
            add_turn(row, turn)
            if not (local.start <= row < local.stop and episodes.has_ended(row)):
                rounds.add_turn(row)
        # Only if no row is decoded there is nothing better to do than to wait.
        began = time.perf_counter()
        answers = _shared(episodes.poll(wait=live.is_idle))
        if live.is_idle:
            idle_seconds += time.perf_counter() - began
        if images is not None:
            images.share()
        signals.between_segments()
        for row, answer in sorted(answers.items()):
            conversation = conversations[row]
            if answer is None:
                live.close(row)
                rounds.end(row)
                over.add(row)
                continue
            is_rewritten = isinstance(answer, History)
            token_ids = answer.token_ids if is_rewritten else [*conversation.tokens, *answer]
            if len(token_ids) >= len(conversation.prompt) + config.max_new_tokens:
                # No room for another turn: the episode ends here, and is still judged.
                conversation.branches[-1].truncated = True
                if local.start <= row < local.stop:
                    episodes.end(row)
                continue
            if is_rewritten:
                conversation.rewrite(token_ids)
            else:
                conversation.branches[-1].observe(answer)
            ready.append(row)
        for row in range(local.start, local.stop):
            if episodes.has_ended(row):
                rounds.end(row)
        for group in sorted(set(rounds.complete) - judged):
            rows = batch.rows_of(group)
            if over.issuperset(rows):
                judged.add(group)
                of = [row for row in rows if local.start <= row < local.stop]
                messages = {row: episodes.by_row[row].messages for row in of}
                actions = {row: conversations[row].actions for row in of}
                batch.streaming.on_answered(messages, actions)
    return idle_seconds


def _contexts_at_once(decoding: Decoding, num_rows: int) -> int:
    """Return the new prompts of a device that are read together."""
    config = decoding.config
    # The number of groups, and not of different prompts, so that each batch has the same programs.
    contexts = num_rows // config.samples_per_prompt
    if config.shapes_of is not None and config.rows_of_programs(num_rows) > num_rows:
        contexts = config.shapes_of[0]
    return -(-contexts // slots.device_count(decoding.policy.mesh))


def _prompt_columns(config: SamplerConfig, conversations: list[_Conversation]) -> int:
    """Return the columns of the rollout that prompts take."""
    longest = max(len(conversation.prompt) for conversation in conversations)
    return config.prompt_length or 1 << (longest - 1).bit_length()


def _next_turn(row: int, conversation: _Conversation, config: SamplerConfig) -> TurnRequest:
    token_ids = list(conversation.tokens)
    room = len(conversation.prompt) + config.max_new_tokens - len(token_ids)
    return TurnRequest(row, token_ids, conversation.key, min(room, config.max_new_tokens))


def _shared(values: Mapping[int, Any]) -> dict[int, Any]:
    """Return the values of all processes' rows."""
    return typed_json.merge(values, FinishedEpisode, Branch, History)
