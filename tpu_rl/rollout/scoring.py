"""Sampled completions, and their rewards.

`Sampled` is what an engine's `generate` returns, `Scored` what its `score` makes of it. With
several processes, each one computes the rewards of its own groups, and all processes then share
the values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tpu_rl import rewards
from tpu_rl.data import Row
from tpu_rl.errors import InputError
from tpu_rl.plain_values import fields_of
from tpu_rl.rollout.prompts import as_text
from tpu_rl.runtime import processes, typed_json
from tpu_rl.runtime.segments import count_tokens
from tpu_rl.sampler import PartialCompletion
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Rollout

if TYPE_CHECKING:
    from tpu_rl.rollout.conversations.episode_log import EpisodeLog

ENVIRONMENT = "environment"
"""The reward that stands for the environment's own."""


@dataclass(frozen=True)
class PartialGroup:
    """A prompt whose completions are not all complete. A new one has no completions yet."""

    row: Row
    completions: list[PartialCompletion] = field(default_factory=list)
    logs: list[EpisodeLog] = field(default_factory=list)
    """The completions if they are conversations."""


@dataclass(frozen=True)
class EpisodeOutcomes:
    """What an environment says about N conversations."""

    names: list[str]
    """The class of each episode's environment, which names its rewards."""
    is_scored: bool
    """True if it gives rewards. If not, only reward functions do."""
    rewards: np.ndarray
    """[N] float32: the sum of an episode's rewards; NaN if it gave none."""
    turn_rewards: np.ndarray
    """[N, T] float32: rewards of turns, on their last actions. What `rewards` has beyond them
    belongs to the last action of the episode."""
    faults: list[str]
    """Why an episode failed; "" if it did not. Such an episode is not scored."""
    messages: list[list[dict[str, Any]]]
    """The messages of each episode after its prompt, the answers of the environment included."""
    states: list[Mapping[str, Any]]
    """The public attributes of each environment at the end."""
    counts: dict[str, np.ndarray]
    """Name -> [N] numbers: turns, tool calls, errors and tokens of observations."""
    images: list[list[bytes]] = field(default_factory=list)
    """The images that the environment showed in each episode, as files; empty if it shows none."""
    idle_seconds: float = 0.0
    """Time in which nothing was decoded, because all episodes waited for tools or agents."""
    waits: list[list[tuple[str, float]]] = field(default_factory=list)
    """(kind, seconds) of the waits of each episode in their order: "policy" (in the queue and
    decoding), "reset", "call" and "step" (tools and games), "reward", "agent"."""

    @property
    def seconds(self) -> dict[str, np.ndarray]:
        """Kind of wait -> [N] seconds of each episode."""
        kinds = sorted({kind for waits in self.waits for kind, _ in waits})
        return {
            kind: np.array([sum(time for name, time in of if name == kind) for of in self.waits])
            for kind in kinds
        }

    def take(self, rows: np.ndarray) -> EpisodeOutcomes:
        """Return some of the episodes."""
        return replace(self, **entries(fields_of(self), rows))


def entries(value: Any, rows: np.ndarray) -> Any:
    """Return some entries of an array or of a list that is not empty, also in dicts and pytrees.

    Anything else stays as it is.
    """
    match value:
        case list():
            return [value[row] for row in rows] if value else value
        case np.ndarray():
            return value[rows]
        case dict():
            return {name: entries(part, rows) for name, part in value.items()}
        case Rollout():
            return jax.tree.map(lambda array: np.asarray(array)[rows], value)
    return value


class EpisodeRows(NamedTuple):
    """The R rows of N episodes, of which some have several; an episode's rows are neighbors."""

    rollout: Rollout
    """[R, T]. Its rewards are those of turns; rewards of whole episodes are not among them."""
    last: np.ndarray
    """[N] int: the last row of each episode."""
    texts: list[str]
    """[R] what the policy wrote in each row."""

    def with_weights(self, weights: np.ndarray) -> EpisodeRows:
        """Return the rows with the rewards of turns times the weight [N] of their episode."""
        episode_of = np.searchsorted(self.last, np.arange(len(self.rollout.tokens)))
        scaled = np.asarray(self.rollout.rewards) * weights[episode_of][:, None]
        return self._replace(rollout=replace(self.rollout, rewards=scaled))


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Completions without rewards. Unless noted, arrays and lists have one entry per completion."""

    rollout: Rollout
    """Its rewards are zero, until they are scored."""
    rows: list[Row]
    """The data row of each group. Completions of one prompt are neighbors."""
    prompts: list[str]
    completions: list[str]
    lengths: np.ndarray
    """[N] int: number of sampled tokens."""
    step: int = 0
    """The step of the request, which reward functions may ask for."""
    seconds: float = 0.0
    """Wall time of sampling."""
    drafts: int = 0
    """Speculative decoding: how many drafts were verified."""
    tokens_of_drafts: int = 0
    """Speculative decoding: how many tokens these verifications produced."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further arrays that a particular `generate` returns, by name; one entry per completion."""
    unfinished: list[PartialGroup] = field(default_factory=list)
    """Groups that a request for the first complete groups left behind."""
    num_resumed_tokens: int = 0
    """The number of the completions' tokens that an earlier request sampled."""
    streamed_rewards: Callable[[], dict[str, rewards.FunctionScores]] = dict
    """Return the rewards that were computed while other rows were decoded, by reward function."""
    cancel_rewards: Callable[[], None] = lambda: None
    """Drop reward computations that have not begun, because nobody will ask for them."""
    episodes: EpisodeOutcomes | None = None
    """If the completions are conversations with an environment."""
    episode_rows: EpisodeRows | None = None
    """If episodes may have several rows. Everything else then describes the last row of each."""


@dataclass(frozen=True, kw_only=True)
class Scored(Sampled):
    """Completions with rewards, which its rollout has, too."""

    rewards: np.ndarray
    """[N] float32: the sum of all reward terms; NaN where a completion is not scored. All zero if
    there are no reward functions."""
    parts: dict[str, np.ndarray]
    """The values of each reward function, without weights and gates."""
    faults: list[str]
    """The error with which a reward function failed on the completion, or the reason that it gives
    for its reward; "" if there is none."""
    seconds_reward: float
    """Time spent waiting for rewards after the last row had ended."""
    chosen_from: tuple[Scored, ...] = ()
    """With dynamic sampling or a filter: everything that was sampled, from which these groups were
    chosen. Metrics describe all of it."""

    @property
    def errors(self) -> list[str]:
        """One message per completion that a reward function failed on, with its row."""
        return [f"row {row}, {fault}" for row, fault in enumerate(self.failures) if fault]

    @property
    def failures(self) -> list[str]:
        """The fault of each completion without a reward; "" for all others."""
        is_scored = np.isfinite(self.rewards)
        return ["" if one else fault for fault, one in zip(self.faults, is_scored, strict=True)]


def describe(rows: list[Row], rollout: Rollout, tokenizer: Tokenizer) -> Sampled:
    """Return completions of the rows' prompts with their texts. Groups are equally large."""
    group_size = len(rollout.tokens) // len(rows)
    prompts = [row["prompt"] for row in rows for _ in range(group_size)]
    return Sampled(
        rollout=rollout,
        rows=rows,
        prompts=list(map(as_text, prompts)),
        completions=[
            tokenizer.decode_answer(prompt, ids)
            for prompt, ids in zip(prompts, written_ids(rollout), strict=True)
        ],
        lengths=np.asarray(rollout.action_mask).sum(-1),
    )


def score(
    sampled: Sampled,
    reward_functions: Mapping[str, rewards.Reward],
    max_fault_share: float,
    terms: Sequence[rewards.RewardTerm] = (),
    decode_answer: Callable[[Any, list[int]], str] | None = None,
) -> Scored:
    """Return the completions with their rewards; without reward functions, with zeros.

    `terms` are those of `rewards.score`. `decode_answer` is the tokenizer's, for the places of
    segments. Raises InputError if a reward function needs a column that the rows lack, or if reward
    functions fail on more than `max_fault_share` of the completions.
    """
    began = time.perf_counter()
    group_size = len(sampled.completions) // len(sampled.rows)
    prompts, columns = repeat_rows(sampled.rows, group_size)
    answers = answers_of(sampled)
    scores = rewards.Scores(np.zeros(len(prompts), np.float32), {}, [])
    terms = rewards.at_step(terms, sampled.step)
    if reward_functions:
        scores = score_across_processes(
            reward_functions,
            prompts,
            answers,
            columns,
            max_fault_share,
            group_size,
            sampled.streamed_rewards(),
            terms,
            rollout_columns(sampled, reward_functions.values()),
        )
    turn_rewards = None
    if scores.segments:
        turn_rewards = placed_segments(sampled, scores.segments, decode_answer)
    episode_rows = sampled.episode_rows
    if sampled.episodes is not None:
        weights = weights_of_environment(terms, scores.parts)
        scores = with_episodes(scores, sampled.episodes, bool(reward_functions), weights is None)
        rewards.require_few_faults(scores, answers, max_fault_share)
        turn_rewards = sampled.episodes.turn_rewards
        if weights is not None:
            turn_rewards = turn_rewards * weights[:, None]
            episode_rows = episode_rows and episode_rows.with_weights(weights)
    rollout = place_rewards(sampled.rollout, scores.totals, turn_rewards)
    scored = Scored(
        **fields_of(sampled) | {"rollout": rollout, "episode_rows": None},
        rewards=scores.totals,
        parts=scores.parts,
        faults=_fault_messages(scores.faults, len(prompts)),
        seconds_reward=time.perf_counter() - began,
    )
    return scored if episode_rows is None else by_row(scored, episode_rows)


def placed_segments(
    sampled: Sampled,
    segments: Mapping[int, Sequence[rewards.Segment]],
    decode_answer: Callable[[Any, list[int]], str] | None,
) -> np.ndarray:
    """Return rewards [N, T] of segments, each on the token that writes its last character.

    Those that end with the text are on the last action, the end-of-sequence token. Raises
    InputError if the completions are conversations.
    """
    if sampled.episodes is not None or decode_answer is None:
        raise InputError(
            "a reward gives segments of a conversation",
            where="--reward",
            why="their characters are counted in one completion of the policy",
            fix="return one number for each conversation, or give rewards of turns in the "
            "environment",
        )
    mask = np.asarray(sampled.rollout.action_mask)
    tokens = np.asarray(sampled.rollout.tokens)
    group_size = len(mask) // len(sampled.rows)
    placed = np.zeros(mask.shape, np.float32)
    for row, of_row in segments.items():
        decode = partial(decode_answer, sampled.rows[row // group_size]["prompt"])
        actions = np.flatnonzero(mask[row])
        columns = np.arange(actions[0], actions[-1] + 1)
        ids = tokens[row, columns].tolist()
        for _, end, value in of_row:
            count = len(ids)
            if end < len(sampled.completions[row]):
                count = max(count_tokens(ids, end, decode), 1)
            # Behind a forced token, on the action before it.
            place = max(np.searchsorted(actions, columns[count - 1], side="right") - 1, 0)
            placed[row, actions[place]] += value
    return placed


def weights_of_environment(
    terms: Sequence[rewards.RewardTerm], parts: Mapping[str, np.ndarray]
) -> np.ndarray | None:
    """Return the weight [N] of each episode's own reward; None if no term is called so.

    It is the sum of the weights of the terms `environment` whose gates hold.
    """
    own = [term for term in terms if term.name == ENVIRONMENT]
    if not own:
        return None
    ones = {**parts, ENVIRONMENT: np.ones_like(parts[ENVIRONMENT])}
    return np.nan_to_num(rewards.totals(own, ones))


def with_episodes(
    scores: rewards.Scores, episodes: EpisodeOutcomes, are_judged: bool, adds_rewards: bool = True
) -> rewards.Scores:
    """Return the scores with the rewards and the faults of an environment.

    Its rewards are one more term with the weight 1, as in TRL, unless a term of the total is called
    `environment` and has added them (`adds_rewards`). An episode without such a reward has
    the total of the reward functions, if there are any (`are_judged`). An episode that failed has
    no total.
    """
    totals = scores.totals
    parts = dict(scores.parts)
    failed = np.array([bool(fault) for fault in episodes.faults])
    if episodes.is_scored and adds_rewards:
        # A function that does not score an episode leaves it to the environment; a fault does not.
        failed_rows = [fault.row for fault in scores.faults if not fault.is_scored]
        is_faulty = np.isin(np.arange(len(totals)), failed_rows)
        judged = np.where(np.isfinite(totals) | is_faulty, totals, 0) if are_judged else 0.0
        known = np.isfinite(episodes.rewards)
        alone = totals if are_judged else np.full_like(totals, np.nan)
        totals = np.where(known, judged + np.where(known, episodes.rewards, 0), alone)
        names = np.array(episodes.names)
        for name in dict.fromkeys(episodes.names):
            is_known = (names == name) & ~failed
            if np.isfinite(episodes.rewards[is_known]).any():
                parts[name] = np.where(is_known, episodes.rewards, np.float32(np.nan))
    faults = [
        rewards.RewardFault(episodes.names[row], row, fault)
        for row, fault in enumerate(episodes.faults)
        if fault
    ]
    totals = np.where(failed, np.nan, totals).astype(np.float32)
    return rewards.Scores(totals, parts, [*scores.faults, *faults], scores.segments)


def score_across_processes(
    reward_functions: Mapping[str, rewards.Reward],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: dict[str, list[Any]],
    max_fault_share: float,
    group_size: int,
    known: dict[str, rewards.FunctionScores],
    terms: Sequence[rewards.RewardTerm] = (),
    rollout_columns: Mapping[str, Sequence[Any]] | None = None,
) -> rewards.Scores:
    """Return `rewards.score` of all completions; each process computes whole groups of its own.

    `known` holds the values that were already computed, of this process's completions.
    """
    local = local_rows(len(completions), group_size)
    # A process checks no share of faults on its own: the check below is about all completions.
    local_scores = rewards.score(
        reward_functions,
        prompts[local],
        completions[local],
        {name: values[local] for name, values in columns.items()},
        1.0,
        known,
        terms,
        {name: values[local] for name, values in (rollout_columns or {}).items()},
    )
    gathered = typed_json.gather((local.start, local_scores), rewards.Scores, rewards.RewardFault)
    scores = rewards.Scores(
        np.concatenate([of_process.totals for _, of_process in gathered]),
        {
            name: np.concatenate([of_process.parts[name] for _, of_process in gathered])
            for name in local_scores.parts
        },
        [
            replace(fault, row=fault.row + start)
            for start, of_process in gathered
            for fault in of_process.faults
        ],
        {
            row + start: parts
            for start, of_process in gathered
            for row, parts in of_process.segments.items()
        },
    )
    rewards.require_few_faults(scores, completions, max_fault_share)
    return scores


def repeat_rows(rows: list[Row], group_size: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the prompt of each completion, and each further column.

    A column that any row has is there for all of them; it is None where a row lacks it.
    """
    repeated = [row for row in rows for _ in range(group_size)]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    columns = {name: [row.get(name) for row in repeated] for name in names}
    return [row["prompt"] for row in repeated], columns


def rollout_columns(
    sampled: Sampled, functions: Iterable[rewards.Reward]
) -> dict[str, Sequence[Any]]:
    """Collect the columns of `rewards.ROLLOUT_COLUMNS` that functions request by name."""
    num_rows = len(sampled.completions)
    group_size = num_rows // len(sampled.rows)
    columns: dict[str, Callable[[], Sequence[Any]]] = {
        "completion_ids": lambda: chosen_ids(sampled),
        "token_counts": lambda: np.asarray(sampled.lengths).tolist(),
        "truncated": lambda: np.asarray(sampled.rollout.truncated).tolist(),
        "group": lambda: [row // group_size for row in range(num_rows)],
        "step": lambda: [sampled.step] * num_rows,
        "environments": lambda: (
            [SimpleNamespace(**state) for state in sampled.episodes.states]
            if sampled.episodes
            else [None] * num_rows
        ),
    }
    episodes = sampled.episodes
    if episodes is not None and episodes.is_scored:
        columns["environment_rewards"] = lambda: [
            float(value) if np.isfinite(value) else None for value in episodes.rewards
        ]
    requested = {name for function in functions for name in rewards.requested_columns(function)}
    if "environment_rewards" in requested - columns.keys():
        raise without_environment()
    return {name: column() for name, column in columns.items() if name in requested}


def without_environment() -> InputError:
    """Return the error of the reward `environment` where there is none."""
    return InputError(
        "the reward environment has no value",
        where="--reward",
        why="no environment gives rewards",
        fix="name one with get_reward: --environment",
    )


def answers_of(sampled: Sampled) -> list[Any]:
    """Return the completions as reward functions see them: texts, or lists of messages."""
    if sampled.episodes is not None:
        return sampled.episodes.messages
    prompts, _ = repeat_rows(sampled.rows, len(sampled.completions) // len(sampled.rows))
    return rewards.as_answers(prompts, sampled.completions)


def written_ids(rollout: Rollout) -> list[list[int]]:
    """Return the tokens of each completion, those among them that were forced."""
    ids = []
    for tokens, mask in zip(rollout.tokens, np.asarray(rollout.action_mask), strict=True):
        columns = np.flatnonzero(mask)
        span = slice(columns[0], columns[-1] + 1) if len(columns) else slice(0)
        ids.append(np.asarray(tokens)[span].tolist())
    return ids


def chosen_ids(sampled: Sampled) -> list[list[int]]:
    """Return the tokens of each completion, or those that the policy chose in an episode."""
    if sampled.episodes is None and sampled.episode_rows is None:
        return written_ids(sampled.rollout)
    rollout = sampled.rollout if sampled.episode_rows is None else sampled.episode_rows.rollout
    chosen = [
        row[row_mask].tolist()
        for row, row_mask in zip(
            np.asarray(rollout.tokens), np.asarray(rollout.action_mask), strict=True
        )
    ]
    if sampled.episode_rows is None:
        return chosen
    starts = np.append(0, sampled.episode_rows.last[:-1] + 1)
    ends = sampled.episode_rows.last + 1
    return [sum(chosen[start:end], []) for start, end in zip(starts, ends, strict=True)]


def local_rows(num_completions: int, group_size: int) -> slice:
    """Return the completions whose rewards this process computes: whole groups."""
    groups = processes.share(num_completions // group_size)
    return slice(groups.start * group_size, groups.stop * group_size)


def _fault_messages(faults: Sequence[rewards.RewardFault], num_rows: int) -> list[str]:
    messages = [""] * num_rows
    for fault in faults:
        separator = "; " if messages[fault.row] else ""
        messages[fault.row] += f"{separator}{fault.function}: {fault.message}"
    return messages


def place_rewards(
    rollout: Rollout, scores: np.ndarray, turn_rewards: np.ndarray | None = None
) -> Rollout:
    """Return the rollout with each score [N] on its row's last action.

    A part of a score that belongs to turns stays where `turn_rewards` [N, T] has it. A row whose
    score is NaN is marked as not scored.
    """
    scored = np.isfinite(scores)
    last = rollout.action_mask.shape[1] - 1 - np.asarray(rollout.action_mask)[:, ::-1].argmax(1)
    placed = np.zeros(rollout.action_mask.shape, np.float32)
    finite_scores = np.where(scored, scores, 0.0)
    if turn_rewards is not None:
        placed += np.where(scored[:, None], turn_rewards, 0)
        finite_scores = finite_scores - placed.sum(1)
    placed[np.arange(len(scores)), last] += finite_scores
    return replace(rollout, rewards=placed, scored=scored)


def by_episode(scored: Scored) -> Scored:
    """Return one entry per episode: sums over its rows, and the tokens and texts of its last row.

    Rows without actions are padding and left out. Without `Rollout.episode_id` nothing changes.
    """
    rollout = scored.rollout
    if rollout.episode_id is None:
        return scored
    rows = np.flatnonzero(np.asarray(rollout.action_mask).any(1))
    starts = first_of_runs(np.asarray(rollout.episode_id)[rows])
    last = rows[np.append(starts[1:], len(rows)) - 1]

    def total(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values[rows], starts)

    episodes = entries(rollout, last)
    faults = [
        "; ".join(fault for row in rows_of_episode if (fault := scored.faults[row]))
        for rows_of_episode in np.split(rows, starts[1:])
    ]
    return replace(
        scored,
        rollout=replace(
            episodes,
            episode_id=None,
            parent=None,
            shared=None,
            truncated=np.logical_or.reduceat(np.asarray(rollout.truncated)[rows], starts),
            scored=np.logical_and.reduceat(np.asarray(rollout.scored)[rows], starts),
        ),
        lengths=total(scored.lengths),
        rewards=total(scored.rewards),
        parts={name: total(part) for name, part in scored.parts.items()},
        faults=faults,
        episodes=None if scored.episodes is None else scored.episodes.take(last),
        prompts=entries(scored.prompts, last),
        completions=entries(scored.completions, last),
    )


def by_row(scored: Scored, rows: EpisodeRows) -> Scored:
    """Return one entry for each row of the episodes that `scored` has one entry each for.

    Rewards of turns stay where they are. The rest of an episode's reward is on the last action of
    its last row, as are its parts and its fault.
    """
    num_rows = len(rows.rollout.tokens)
    episode_of = np.searchsorted(rows.last, np.arange(num_rows))
    is_last = rows.last[episode_of] == np.arange(num_rows)
    is_scored = np.asarray(scored.rollout.scored)
    rewards_placed = np.where(is_scored[episode_of][:, None], rows.rollout.rewards, 0)
    of_turns = np.add.reduceat(rewards_placed.sum(1), np.append(0, rows.last[:-1] + 1))
    mask = np.asarray(rows.rollout.action_mask)[rows.last]
    last_action = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    totals = np.where(is_scored, scored.rewards, 0)
    rewards_placed[rows.last, last_action] += totals - of_turns

    def on_last(values: np.ndarray) -> np.ndarray:
        return np.where(is_last, values[episode_of], values.dtype.type(0))

    row_rewards = rewards_placed.sum(1)
    return replace(
        scored,
        rollout=replace(
            rows.rollout, rewards=rewards_placed.astype(np.float32), scored=is_scored[episode_of]
        ),
        prompts=entries(scored.prompts, episode_of),
        completions=[
            scored.completions[episode] if last else text
            for episode, last, text in zip(episode_of, is_last, rows.texts, strict=True)
        ],
        lengths=np.asarray(rows.rollout.action_mask).sum(-1),
        rewards=np.where(is_scored[episode_of] | ~is_last, row_rewards, np.nan).astype(np.float32),
        parts={name: on_last(part) for name, part in scored.parts.items()},
        faults=[
            scored.faults[episode] if last else ""
            for episode, last in zip(episode_of, is_last, strict=True)
        ],
        episodes=None
        if scored.episodes is None
        else replace(
            scored.episodes.take(episode_of), turn_rewards=np.asarray(rows.rollout.rewards)
        ),
    )


def number_of_run(ids: np.ndarray) -> np.ndarray:
    """Return the number, from 0, of the run of equal neighbors that each of `ids` [N] is in."""
    starts = first_of_runs(ids)
    return np.repeat(np.arange(len(starts), dtype=np.int32), np.diff([*starts, len(ids)]))


def first_of_runs(ids: np.ndarray) -> np.ndarray:
    """Return the indices at which runs of equal neighbors begin."""
    return np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))


def with_parents(rollout: Rollout) -> Rollout:
    """Return a rollout that states what its rows share, as `Rollout.parent` and `shared` do.

    Without them, the rows of a group share their prompt.
    """
    if rollout.parent is not None:
        return rollout
    rows = np.arange(len(rollout.tokens), dtype=np.int32)
    starts = first_of_runs(np.asarray(rollout.group_id))
    parent = np.repeat(rows[starts], np.diff([*starts, len(rows)]))
    prompt_lengths = np.asarray(rollout.action_mask).argmax(1)
    shared = np.where(parent == rows, 0, prompt_lengths).astype(np.int32)
    return replace(rollout, parent=parent, shared=shared)


def with_episode_ids(rollout: Rollout) -> Rollout:
    """Return a rollout that numbers its episodes; without `Rollout.episode_id` each row is one."""
    if rollout.episode_id is not None:
        return rollout
    return replace(rollout, episode_id=np.arange(len(rollout.tokens), dtype=np.int32))


def renumbered(parent: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return `Rollout.parent` [N] of some of the rows, which become rows 0, 1, ...

    Each row's parent is one of them.
    """
    new_row = np.zeros(len(parent), np.int32)
    new_row[rows] = np.arange(len(rows))
    return new_row[np.asarray(parent)[rows]]


def require_single_rows(scored: Scored) -> None:
    """Raise InputError if an episode has several rows, which only `by_episode` takes together."""
    episode_id = scored.rollout.episode_id
    if episode_id is not None and len(first_of_runs(np.asarray(episode_id))) < len(episode_id):
        raise InputError(
            "completions are compared one by one, and an episode has several rows",
            where="--algorithm",
            why="the history of a conversation was rewritten on the way",
            fix="use grpo, ppo or reinforce",
        )


def group_size(scored: Scored) -> int:
    """Return the number of completions of each prompt.

    Raises:
        InputError: see `require_single_rows`.
    """
    require_single_rows(scored)
    return len(scored.rewards) // len(np.unique(scored.rollout.group_id))


def zero_variance(scored: Scored) -> np.ndarray:
    """Return [N] bool: True in groups whose rewards are all equal, or missing."""
    grouped = scored.rewards.reshape(-1, group_size(scored))
    highest = np.max(grouped, axis=1, where=np.isfinite(grouped), initial=-np.inf)
    lowest = np.min(grouped, axis=1, where=np.isfinite(grouped), initial=np.inf)
    return np.repeat(highest <= lowest, grouped.shape[1])
