"""Prompts + sampler + rewards -> Rollout: the border between host and device.

Text is made from tokens once, for the reward; it is never encoded again, so what is trained on is what was sampled.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from tpu_rl import processes, rewards
from tpu_rl.early_rewards import EarlyRewards
from tpu_rl.errors import InputError
from tpu_rl.redaction import redact
from tpu_rl.tokenizers import Tokenizer
from tpu_rl.types import Rollout

OnFinished = Callable[[dict[int, list[int]]], None]
"""What is told which rows have ended: row -> the tokens of its completion."""

Generate = Callable[[list[list[int]], np.ndarray, OnFinished | None], Rollout]
"""(prompts as token ids, row ids [N], who wants to know of rows as they end) -> Rollout without rewards: the sampler
with policy, key and settings bound. It tells of all rows, each once, or of none."""

NextRows = Callable[[], list[dict[str, Any]]]
"""The next batch of data rows, each with a `prompt`."""

RAISE_OR_SHORTEN = "raise --sampling.max-prompt-tokens, or shorten or drop the prompt"


@dataclass(frozen=True)
class Scored:
    """A rollout with its rewards and, for people, what was said. Arrays and lists have one entry a completion."""

    rollout: Rollout
    prompts: list[str]
    completions: list[str]
    lengths: np.ndarray
    """[N] int: sampled tokens."""
    rewards: np.ndarray
    """[N] float32; NaN where the completion is not scored. Zero where there is no reward function at all."""
    parts: dict[str, np.ndarray]
    """The same for each reward function."""
    faults: list[str]
    """Why a reward function failed on the completion, "" mostly."""
    seconds_rollout: float
    seconds_reward: float
    """After the last row had ended; earlier rewards cost no time."""
    drafts: int = 0
    """Of speculative decoding, that were verified; with `tokens_of_drafts`, what this drew."""
    tokens_of_drafts: int = 0
    chosen_from: tuple[Scored, ...] = ()
    """All that was sampled, where dynamic sampling took these completions from more: what metrics are about."""

    @property
    def errors(self) -> list[str]:
        """The faults that there are, with the row they are of."""
        return [f"row {row}, {fault}" for row, fault in enumerate(self.faults) if fault]


def roll_out(
    rows: list[dict[str, Any]],
    row_ids: np.ndarray,
    generate: Generate,
    tokenizer: Tokenizer,
    reward_functions: dict[str, rewards.Reward],
    max_prompt_tokens: int,
    max_fault_share: float = rewards.DEFAULT_LIMITS.fault_share,
) -> Scored:
    """Completions of each row's prompt, scored; with no reward functions, all of them with zero.

    Raises InputError where a prompt has no tokens or more than `max_prompt_tokens`, and as `rewards.score` does.
    """
    began = time.perf_counter()
    prompts = encode(rows, tokenizer, max_prompt_tokens)
    with asking(rows, len(row_ids) // len(rows), tokenizer, reward_functions) as early:
        rollout = generate(prompts, row_ids, early.on_finished)
    sampled = replace(unscored(rows, rollout, tokenizer), seconds_rollout=time.perf_counter() - began)
    return score(sampled, rows, reward_functions, max_fault_share, early.answers)


@contextmanager
def asking(
    rows: list[dict[str, Any]],
    group: int,
    tokenizer: Tokenizer,
    reward_functions: dict[str, rewards.Reward],
    most: int | None = None,
) -> Iterator[EarlyRewards]:
    """What is told of completions as they end, so many of each row's prompt, and of at most so many of them; after an
    error nobody asks any more."""
    prompts, columns = _repeated(rows, group)
    early = EarlyRewards(reward_functions, prompts, columns, group, _own(len(prompts), group), tokenizer.decode, most)
    with ExitStack() as after_an_error:  # Ctrl-C too
        after_an_error.callback(early.give_up)
        yield early
        after_an_error.pop_all()


def _repeated(rows: list[dict[str, Any]], group: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """(the prompt of each completion, the other columns: those of any row, None where a row lacks one)."""
    repeated = [row for row in rows for _ in range(group)]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    columns = {name: [row.get(name) for row in repeated] for name in names}
    return [row["prompt"] for row in repeated], columns


def unscored(rows: list[dict[str, Any]], rollout: Rollout, tokenizer: Tokenizer) -> Scored:
    """The completions of the rows' prompts, before anybody has judged them."""
    prompts, _ = _repeated(rows, len(rollout.tokens) // len(rows))
    return Scored(
        rollout=rollout,
        prompts=[as_text(prompt) for prompt in prompts],
        completions=[
            tokenizer.decode(tokens[mask].tolist())
            for tokens, mask in zip(rollout.tokens, rollout.action_mask, strict=True)
        ],
        lengths=np.asarray(rollout.action_mask).sum(-1),
        rewards=np.zeros(len(prompts), np.float32),
        parts={},
        faults=[""] * len(prompts),
        seconds_rollout=0.0,
        seconds_reward=0.0,
    )


def score(
    sampled: Scored,
    rows: list[dict[str, Any]],
    reward_functions: dict[str, rewards.Reward],
    max_fault_share: float,
    early: Callable[[], dict[str, rewards.Answer]],
) -> Scored:
    """The completions of the rows' prompts with their rewards; `early` gives those that were asked for meanwhile."""
    began, group = time.perf_counter(), len(sampled.completions) // len(rows)
    prompts, columns = _repeated(rows, group)
    scores = rewards.Scores(sampled.rewards, {}, [])
    if reward_functions:
        texts = sampled.completions
        scores = score_together(reward_functions, prompts, texts, columns, max_fault_share, group, early())
    return replace(
        sampled,
        rollout=place_rewards(sampled.rollout, scores.totals),
        rewards=scores.totals,
        parts=scores.parts,
        faults=_by_row(scores.faults, len(prompts)),
        seconds_reward=time.perf_counter() - began,
    )


def stop_at(tokenizer: Tokenizer, strings: Sequence[str]) -> Callable[[list[int]], int | None]:
    """What says where a completion ends: with the token that completes one of the strings in its text; None if nowhere.

    What tokens decode to is taken to go on as it began: a string that is there stays.
    """

    def holds(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens)
        return any(string in text for string in strings)

    def end(tokens: list[int]) -> int | None:
        if not holds(tokens):
            return None
        return 1 + bisect.bisect_left(range(1, len(tokens) + 1), True, key=lambda count: holds(tokens[:count]))

    return end


def score_together(
    reward_functions: dict[str, rewards.Reward],
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    max_fault_share: float,
    group: int,
    known: dict[str, rewards.Answer],
) -> rewards.Scores:
    """`rewards.score`, each of several processes asking its reward functions about whole groups of its own only.

    known: answers about those that were asked for earlier.
    """
    if processes.count() == 1:
        return rewards.score(reward_functions, prompts, completions, columns, max_fault_share, known)
    own = _own(len(completions), group)
    mine = {name: values[own] for name, values in columns.items()}
    # Whether too many have a fault is asked of them all, below.
    found = rewards.score(reward_functions, prompts[own], completions[own], mine, 1.0, known)
    faults = [asdict(fault) | {"row": fault.row + own.start} for fault in found.faults]
    parts = {name: values.tolist() for name, values in found.parts.items()}
    everywhere = processes.gather({"totals": found.totals.tolist(), "parts": parts, "faults": faults})
    scores = rewards.Scores(
        np.array([total for one in everywhere for total in one["totals"]], np.float32),
        {name: np.array([x for one in everywhere for x in one["parts"][name]], np.float32) for name in parts},
        [rewards.RewardFault(**fault) for one in everywhere for fault in one["faults"]],
    )
    rewards.require_few_faults(scores, completions, max_fault_share)
    return scores


def _own(completions: int, group: int) -> slice:
    """Those whose rewards this process asks for."""
    groups = processes.share(completions // group)
    return slice(groups.start * group, groups.stop * group)


def _by_row(faults: Sequence[rewards.RewardFault], rows: int) -> list[str]:
    texts = [""] * rows
    for fault in faults:
        texts[fault.row] += f"{'; ' if texts[fault.row] else ''}{fault.function}: {fault.message}"
    return texts


def encode(rows: list[dict[str, Any]], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[list[int]]:
    """The tokens of each row's prompt. Raises InputError where one has none, or more than `max_prompt_tokens`."""
    return [_encode(row, tokenizer, max_prompt_tokens) for row in rows]


def _encode(row: dict[str, Any], tokenizer: Tokenizer, limit: int) -> list[int]:
    tokens = tokenizer.encode_prompt(row["prompt"])
    if not 0 < len(tokens) <= limit:
        raise InputError(
            f"a prompt has {len(tokens)} tokens",
            where=f"prompt {as_text(row['prompt'])[:60]!r}",
            why=f"prompts must have 1 to {limit} tokens",
            fix=RAISE_OR_SHORTEN,
        )
    return tokens


def check_prompts(rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, limit: int) -> tuple[list[dict[str, Any]], str]:
    """(the rows whose prompts have 1 to `limit` tokens, what to tell the user of the others: "" if there are none).

    For data that end: called before a run, so that no prompt ends it later. Raises InputError where no row is left.
    """
    lengths = [len(tokenizer.encode_prompt(row["prompt"])) for row in rows]
    kept = [row for row, length in zip(rows, lengths, strict=True) if 0 < length <= limit]
    message = (
        f"{len(rows) - len(kept)} of {len(rows)} prompts dropped: they must have 1 to {limit} tokens, "
        f"and the longest has {max(lengths, default=0)}"
    )
    if not kept:
        raise InputError(f"0 of {len(rows)} prompts left", why=message, fix=RAISE_OR_SHORTEN)
    return kept, message if len(kept) < len(rows) else ""


def as_text(prompt: str | Sequence[dict[str, str]]) -> str:
    """A prompt as people read it: text as it is, messages one a line."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def place_rewards(rollout: Rollout, scores: np.ndarray) -> Rollout:
    """The rollout with each score [N] on its row's last action; a row whose score is NaN is not scored."""
    scored = np.isfinite(scores)
    last = rollout.action_mask.shape[1] - 1 - np.asarray(rollout.action_mask)[:, ::-1].argmax(1)
    placed = np.zeros(rollout.action_mask.shape, np.float32)
    placed[np.arange(len(scores)), last] = np.where(scored, scores, 0.0)
    return replace(rollout, rewards=placed, scored=scored)


def collect(next_rows: NextRows, roll: Callable[[list[dict[str, Any]], int], Scored], refill_rounds: int = 0) -> Scored:
    """One batch of scored completions; with `refill_rounds`, of groups that can teach something.

    Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal are replaced by groups
    of further batches, at most `refill_rounds` of them; what is still missing then is filled up with such groups, so
    that a batch has always the same size. `roll(rows, round)` samples and scores.
    """
    first = roll(next_rows(), 0)
    if not refill_rounds:
        return first
    rounds = [first]
    wanted = len(np.unique(first.rollout.group_id))
    while _informative(rounds).sum() < wanted * group_size(first) and len(rounds) <= refill_rounds:
        rounds.append(roll(next_rows(), len(rounds)))
    informative = _informative(rounds)
    order = np.concatenate([np.flatnonzero(informative), np.flatnonzero(~informative)])
    return replace(_take(rounds, order[: wanted * group_size(first)]), chosen_from=tuple(rounds))


def group_size(scored: Scored) -> int:
    """Completions of each prompt."""
    return len(scored.rewards) // len(np.unique(scored.rollout.group_id))


def _informative(rounds: list[Scored]) -> np.ndarray:
    """[all rows of all rounds] bool: the row's group has different rewards."""
    return np.concatenate([~zero_variance(scored) for scored in rounds])


def zero_variance(scored: Scored) -> np.ndarray:
    """[N] bool: rows of groups whose rewards are all equal, or missing."""
    of_groups = scored.rewards.reshape(-1, group_size(scored))
    highest = np.max(of_groups, axis=1, where=np.isfinite(of_groups), initial=-np.inf)
    lowest = np.min(of_groups, axis=1, where=np.isfinite(of_groups), initial=np.inf)
    return np.repeat(highest <= lowest, of_groups.shape[1])


def _take(rounds: Sequence[Scored], rows: np.ndarray) -> Scored:
    """Some rows, whole groups, of several rounds as one; group ids are numbered anew."""
    rollout = jax.tree.map(lambda *parts: np.concatenate(parts)[rows], *[scored.rollout for scored in rounds])
    group_id = np.repeat(np.arange(len(rows) // group_size(rounds[0]), dtype=np.int32), group_size(rounds[0]))

    def texts(of: Callable[[Scored], list[str]]) -> list[str]:
        everything = [text for scored in rounds for text in of(scored)]
        return [everything[row] for row in rows]

    return Scored(
        rollout=replace(rollout, group_id=group_id),
        prompts=texts(lambda scored: scored.prompts),
        completions=texts(lambda scored: scored.completions),
        lengths=np.concatenate([scored.lengths for scored in rounds])[rows],
        rewards=np.concatenate([scored.rewards for scored in rounds])[rows],
        parts={name: np.concatenate([scored.parts[name] for scored in rounds])[rows] for name in rounds[0].parts},
        faults=texts(lambda scored: scored.faults),
        seconds_rollout=sum(scored.seconds_rollout for scored in rounds),
        seconds_reward=sum(scored.seconds_reward for scored in rounds),
        drafts=sum(scored.drafts for scored in rounds),
        tokens_of_drafts=sum(scored.tokens_of_drafts for scored in rounds),
    )


def _all_sampled(scored: Scored) -> Scored:
    """The completions and those that dynamic sampling passed over."""
    rounds = scored.chosen_from
    return _take(rounds, np.arange(sum(len(part.rewards) for part in rounds))) if rounds else scored


def metrics(scored: Scored) -> dict[str, float]:
    """The rollout's and the rewards' part of a metrics row, about all that was sampled. Lengths are tokens.

    "rollout/kept" is the share of the sampled groups that are learned from: in the batch, with a scored completion.
    "reward/zero_std_groups", the share whose rewards are all equal, is there where a prompt has several completions.
    "rollout/tokens_per_draft", at least 1, is there where decoding was speculative.
    """
    sampled = _all_sampled(scored)
    finite = sampled.rewards[np.isfinite(sampled.rewards)]
    learned = np.asarray(scored.rollout.scored).reshape(-1, group_size(scored)).any(1)
    lengths = sampled.lengths
    return {
        "reward/mean": _finite_mean(sampled.rewards),
        "reward/std": float(finite.std()) if finite.size else float("nan"),
        **{f"reward/{name}/mean": _finite_mean(part) for name, part in sampled.parts.items()},
        **({"reward/zero_std_groups": float(zero_variance(sampled).mean())} if group_size(sampled) > 1 else {}),
        "reward/errors": float(len(sampled.errors)),
        "rollout/kept": float(learned.sum() * group_size(sampled) / len(lengths)),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated": float(np.mean(sampled.rollout.truncated)),
        "rollout/tokens": float(lengths.sum()),
        **({"rollout/tokens_per_draft": sampled.tokens_of_drafts / sampled.drafts} if sampled.drafts else {}),
        "time/rollout": sampled.seconds_rollout,
        "time/reward": sampled.seconds_reward,
        "perf/rollout_tokens_per_second": float(lengths.sum()) / sampled.seconds_rollout,
    }


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def warnings(scored: Scored, most: int = 3) -> list[str]:
    """For the console: which faults of reward functions left how many completions unscored, the commonest first."""
    faults = _all_sampled(scored).faults
    counts = Counter(fault for fault in faults if fault)
    common = counts.most_common()
    lines = [redact(f"{count} of {len(faults)} completions not scored: {fault}") for fault, count in common]
    if len(lines) > most:
        lines[most - 1 :] = [f"{len(lines) - most + 1} more kinds of fault in reward functions"]
    return lines


def records(scored: Scored, step: int) -> list[dict[str, Any]]:
    """One samples.jsonl object a completion of the batch; `error` says why it is not scored."""
    return [
        {
            "step": step,
            "prompt": scored.prompts[row],
            "completion": scored.completions[row],
            "reward": float(scored.rewards[row]),
            "parts": {name: float(part[row]) for name, part in scored.parts.items()},
            **({"error": scored.faults[row]} if scored.faults[row] else {}),
        }
        for row in range(len(scored.rewards))
    ]
