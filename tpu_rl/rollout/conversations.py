"""Conversations: the policy's turns, and what an environment answers, until the episode is over.

    prompts   = episodes.begin()                 environments are reset
    turns     = live.step()                      the policy writes, in `sampler.live`
                episodes.on_turn(turn)           tools start, in other processes
    answers   = episodes.poll()                  token ids, which follow the turn

A conversation keeps its cache while its tools work, and others are decoded meanwhile. What the
policy wrote is never encoded again: a conversation is its prompt's ids, the sampled ids of each
turn, and the ids of each observation. The limit `max_new_tokens` counts turns and observations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tpu_rl import sampler
from tpu_rl.environments.pool import EnvironmentPool
from tpu_rl.errors import InputError
from tpu_rl.rollout import prompts, scoring, signals
from tpu_rl.rollout.episodes import EpisodeResult, Episodes
from tpu_rl.rollout.scoring import EpisodeOutcomes, Sampled
from tpu_rl.rollout.streaming_rewards import StreamingRewards
from tpu_rl.runtime import processes
from tpu_rl.sampler import LiveSampler, SamplerConfig, TurnRequest, slots
from tpu_rl.types import Params, Purpose, Rollout

if TYPE_CHECKING:
    from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer

STEPS_PER_SEGMENT = 16
"""Decode steps between two visits of the host, at most. A turn that ends, and an answer that
arrives, wait for the end of a segment."""


class Environment(NamedTuple):
    """What answers the policy, and how long."""

    pool: EnvironmentPool
    max_turns: int
    """Turns of the policy in an episode."""
    max_observation_tokens: int
    """Tokens of one observation."""

    @property
    def is_scored(self) -> bool:
        """True if a class of the environment gives rewards."""
        classes = self.pool.descriptions.values()
        return any(known.is_scored or known.form == "game" for known in classes)


@dataclass
class _Conversation:
    """One row in the making. Lists have one entry for each token after the prompt."""

    prompt: list[int]
    key: np.ndarray
    tokens: list[int] = field(default_factory=list)
    is_action: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    behaviour_log_probs: list[float] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    """The number of tokens up to the end of each turn."""
    truncated: bool = True

    @property
    def actions(self) -> list[int]:
        """The tokens that the policy chose."""
        return [token for token, chosen in zip(self.tokens, self.is_action, strict=True) if chosen]

    def add_turn(self, turn: sampler.Turn) -> None:
        self.tokens += turn.tokens
        self.is_action += [True] * len(turn.tokens)
        self.log_probs += turn.log_probs.tolist()
        self.behaviour_log_probs += turn.behaviour_log_probs.tolist()
        self.turn_ends.append(len(self.tokens))
        self.truncated = not turn.stopped

    def add_observation(self, token_ids: list[int]) -> None:
        self.tokens += token_ids
        self.is_action += [False] * len(token_ids)
        zeros = [0.0] * len(token_ids)
        self.log_probs += zeros
        self.behaviour_log_probs += zeros


def generate(
    decoding: Decoding, scorer: Scorer, params: Params, request: RolloutRequest
) -> Sampled:
    """Hold a conversation for each completion that the request asks for.

    All processes call it together. Each runs the environments of its own groups.
    """
    began = time.perf_counter()
    environment = decoding.environment
    assert environment is not None
    if request.resumed is not None or request.first_groups is not None:
        raise InputError(
            "conversations cannot be left unfinished",
            where="--rollout.partial, --environment",
            why="the state of an environment is not part of checkpoints",
            fix="leave out --rollout.partial",
        )
    group_size = decoding.config.samples_per_prompt
    num_rows = len(request.rows) * group_size
    signals.mark(decoding.purpose, "rollout", request.step)
    rewarding = scorer.streaming(request.rows, group_size, step=request.step)
    with (
        rewarding as streaming,
        Episodes(
            request.rows,
            group_size,
            environment.pool,
            scorer.tokenizer,
            max_turns=environment.max_turns,
            max_observation_tokens=environment.max_observation_tokens,
            max_prompt_tokens=decoding.max_prompt_tokens,
            local=scoring.local_rows(num_rows, group_size),
            step=request.step,
            first_row_id=request.first_row_id,
            seed=decoding.seed,
            stop_strings=decoding.stop_strings,
            is_evaluation=decoding.purpose == Purpose.EVALUATION,
        ) as episodes,
    ):
        first_turns = _shared(episodes.begin())
        row_ids = request.first_row_id + np.arange(num_rows)
        run_key = sampler.run_key(decoding.seed, decoding.purpose, request.step)
        keys = np.asarray(jax.random.key_data(sampler.row_keys(run_key, row_ids)))
        conversations = [_Conversation(first_turns[row], keys[row]) for row in range(num_rows)]
        with jax.set_mesh(decoding.policy.mesh):
            _converse(decoding, scorer, params, conversations, episodes, streaming)
        signals.mark(decoding.purpose, "rewards", request.step)
        results = _shared(episodes.results())
    columns = _prompt_columns(decoding.config, conversations)
    rollout = _rollout(decoding.config, conversations, columns, group_size, request.policy_step)
    names = [environment.pool.description(row).name for row in request.rows]
    outcomes = _outcomes(
        np.repeat(names, group_size).tolist(),
        environment.is_scored,
        conversations,
        results,
        rollout.action_mask.shape,
    )
    return Sampled(
        rollout=rollout,
        rows=request.rows,
        prompts=[prompts.as_text(results[row].prompt) for row in range(num_rows)],
        completions=[prompts.as_text(results[row].messages) for row in range(num_rows)],
        lengths=np.asarray(rollout.action_mask).sum(-1),
        step=request.step,
        seconds=time.perf_counter() - began,
        streamed_rewards=streaming.answers,
        cancel_rewards=streaming.cancel,
        episodes=outcomes,
    )


def _converse(
    decoding: Decoding,
    scorer: Scorer,
    params: Params,
    conversations: list[_Conversation],
    episodes: Episodes,
    streaming: StreamingRewards,
) -> None:
    """Decode turns and wait for answers, until all episodes are over.

    Reward functions are asked about a group once its episodes are over.
    """
    config = decoding.config
    live = _live_sampler(decoding, scorer, params, conversations)
    local = episodes.local
    live.submit([_next_turn(row, conversations[row], config) for row in range(len(conversations))])
    remaining = len(conversations)
    while remaining:
        for turn in live.step():
            row = turn.conversation
            conversations[row].add_turn(turn)
            if local.start <= row < local.stop:
                episodes.on_turn(row, turn.tokens, turn.stopped)
        # Only if no row is decoded there is nothing better to do than to wait.
        answers = _shared(episodes.poll(wait=live.is_idle))
        signals.between_segments()
        over = {}
        requests = []
        for row, token_ids in sorted(answers.items()):
            conversation = conversations[row]
            if token_ids is None:
                live.close(row)
                remaining -= 1
                if local.start <= row < local.stop:
                    over[row] = episodes.result(row).messages
            elif len(conversation.tokens) + len(token_ids) >= config.max_new_tokens:
                # No room for another turn: the episode ends here, and is still judged.
                conversation.truncated = True
                if local.start <= row < local.stop:
                    episodes.end(row)
            else:
                conversation.add_observation(token_ids)
                requests.append(_next_turn(row, conversation, config))
        live.submit(requests)
        streaming.on_answered(over, {row: conversations[row].actions for row in over})


def _live_sampler(
    decoding: Decoding, scorer: Scorer, params: Params, conversations: list[_Conversation]
) -> LiveSampler:
    config = decoding.config
    columns = _prompt_columns(config, conversations)
    segments = replace(config.segments, steps=min(config.segments.steps, STEPS_PER_SEGMENT))
    mesh = decoding.policy.mesh
    devices = slots.device_count(mesh)
    contexts = len({tuple(conversation.prompt) for conversation in conversations})
    return LiveSampler(
        decoding.policy.policy,
        decoding.policy.params(params),
        replace(config, segments=segments),
        num_slots=min(config.max_num_seqs, len(conversations)),
        max_length=columns + config.max_new_tokens,
        prompt_length=columns,
        contexts_at_once=-(-contexts // devices),
        mesh=mesh,
        stop_at=prompts.stop_at(scorer.tokenizer, decoding.stop_strings),
        on_segment=signals.between_segments,
    )


def _prompt_columns(config: SamplerConfig, conversations: list[_Conversation]) -> int:
    """Return the columns of the rollout that prompts take."""
    longest = max(len(conversation.prompt) for conversation in conversations)
    return config.prompt_length or 1 << (longest - 1).bit_length()


def _next_turn(row: int, conversation: _Conversation, config: SamplerConfig) -> TurnRequest:
    token_ids = conversation.prompt + conversation.tokens
    room = config.max_new_tokens - len(conversation.tokens)
    return TurnRequest(row, token_ids, conversation.key, room)


def _shared(values: Mapping[int, Any]) -> dict[int, Any]:
    """Return the values of all processes' rows."""
    if processes.count() == 1:
        return dict(values)
    # JSON's keys are texts, and named tuples become lists.
    gathered = processes.gather([[row, _plain(value)] for row, value in values.items()])
    return {row: _restored(value) for pairs in gathered for row, value in pairs}


def _plain(value: Any) -> Any:
    return {"result": value._asdict()} if isinstance(value, EpisodeResult) else value


def _restored(value: Any) -> Any:
    return EpisodeResult(**value["result"]) if isinstance(value, dict) else value


def _rollout(
    config: SamplerConfig,
    conversations: list[_Conversation],
    columns: int,
    group_size: int,
    policy_step: int,
) -> Rollout:
    """Return the rollout: prompts, turns and observations up to the last action, then padding."""
    num_rows = len(conversations)
    shape = (num_rows, columns + config.max_new_tokens)
    tokens = np.full(shape, config.pad_id, np.int32)
    action_mask = np.zeros(shape, bool)
    log_probs = np.zeros(shape, np.float32)
    behaviour_log_probs = np.zeros(shape, np.float32)
    for row, conversation in enumerate(conversations):
        start = len(conversation.prompt)
        tokens[row, :start] = conversation.prompt
        # Observations after the last turn were answered by nobody.
        end = conversation.turn_ends[-1]
        part = slice(start, start + end)
        tokens[row, part] = conversation.tokens[:end]
        action_mask[row, part] = conversation.is_action[:end]
        log_probs[row, part] = conversation.log_probs[:end]
        behaviour_log_probs[row, part] = conversation.behaviour_log_probs[:end]
    # Rollout's fields are declared as jax arrays; these numpy arrays are placed on devices later.
    fields: dict[str, Any] = {
        "tokens": tokens,
        "action_mask": action_mask,
        "log_probs": log_probs,
        "behaviour_log_probs": behaviour_log_probs,
        "rewards": np.zeros(shape, np.float32),
        "group_id": np.repeat(np.arange(num_rows // group_size, dtype=np.int32), group_size),
        "policy_step": np.full(num_rows, policy_step, np.int32),
        "birth_key": np.stack([conversation.key for conversation in conversations]),
        "truncated": np.array([conversation.truncated for conversation in conversations]),
        "scored": np.ones(num_rows, bool),
    }
    return Rollout(**fields | _shared_prompts(conversations, group_size))


def _shared_prompts(conversations: list[_Conversation], group_size: int) -> dict[str, Any]:
    """Return `parent` and `shared` if prompts of a group differ, as `reset` may make them."""
    num_rows = len(conversations)
    first = np.arange(num_rows) // group_size * group_size
    if all(
        conversation.prompt == conversations[first[row]].prompt
        for row, conversation in enumerate(conversations)
    ):
        return {}
    shared = [
        0
        if row == first[row]
        else sampler.common_prefix(conversation.prompt, conversations[first[row]].prompt)
        for row, conversation in enumerate(conversations)
    ]
    return {"parent": first.astype(np.int32), "shared": np.array(shared, np.int32)}


def _outcomes(
    names: list[str],
    is_scored: bool,
    conversations: list[_Conversation],
    results: Mapping[int, EpisodeResult],
    shape: tuple[int, ...],
) -> EpisodeOutcomes:
    """Return what the environment says about the episodes; `shape` is that of the rollout."""
    ordered = [results[row] for row in range(len(conversations))]
    turn_rewards = np.zeros(shape, np.float32)
    totals = np.full(len(conversations), np.nan, np.float32)
    for row, (conversation, result) in enumerate(zip(conversations, ordered, strict=True)):
        given = [reward for reward in (*result.turn_rewards, result.reward) if reward is not None]
        if given:
            totals[row] = sum(given)
        start = len(conversation.prompt)
        # A turn that the environment never saw has no reward.
        for end, reward in zip(conversation.turn_ends, result.turn_rewards, strict=False):
            turn_rewards[row, start + end - 1] = reward or 0.0
    return EpisodeOutcomes(
        names=names,
        is_scored=is_scored,
        rewards=totals,
        turn_rewards=turn_rewards,
        faults=[result.fault for result in ordered],
        messages=[result.messages for result in ordered],
        states=[result.state for result in ordered],
        counts={
            "turns": np.array([len(text.turn_ends) for text in conversations]),
            "tool_calls": np.array([result.tool_calls for result in ordered]),
            "errors": np.array([result.errors for result in ordered]),
            "observation_tokens": np.array(
                [text.turn_ends[-1] - sum(text.is_action) for text in conversations]
            ),
        },
    )
