"""A step's completions are sampled before the update of the step before, while that one's rewards are computed.

Reward functions that work elsewhere (see `rewards`) have the whole of a rollout and an update for their answers, where
they would otherwise be waited for after the last completion. The devices have no less to do: where rewards are quick
nothing is won. Its price: each batch but the first is drawn by the policy of one update before (after a run has gone
back: by a later one), and one batch is drawn and judged at the end that nobody learns from. The log-probs that a batch
was drawn with are the ratio's old ones; GRPO's `--algorithm.old-log-probs recomputed` with an
`--algorithm.importance-cap` corrects for it (AReaL, arXiv 2505.24298).

What is sampled and not learned from is part of a checkpoint, so that a resumed run is the one that never ended; its
rewards are asked for again.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from launch import dataset
from launch.carry_over import STALE, Group, as_json, from_json, in_groups
from launch.config import Stage
from launch.sources import Drawn, Setup, Source, as_drawn, prompt_values, reward_functions, sampling, with_baseline
from tpu_rl import data, rollouts, sampler
from tpu_rl.early_rewards import EarlyRewards
from tpu_rl.types import Params, TrainState


class Pending(NamedTuple):
    """A batch that is sampled, and whose rewards are asked for."""

    rows: list[data.Row]
    sampled: rollouts.Scored
    early: EarlyRewards


def source_ahead(setup: Setup, stage: Stage, params: Params) -> Source:
    """Completions of the stream's prompts by the policy before the last update, scored."""
    del params
    config, lang = setup.config, setup.language
    stream, functions = dataset.make_stream(config, stage, lang), reward_functions(config)
    sample, worth = sampling(setup), prompt_values(setup, stage)
    group = config.batch.completions
    size = config.batch.prompts * group
    pending: Pending | None = None
    restored: list[Group] = []

    def ask(
        step: int, state: TrainState, rows: list[data.Row], first: int, begun: list[sampler.Begun] | None
    ) -> Pending:
        began = time.perf_counter()
        prompts, row_ids = rollouts.encode(rows, lang.tokenizer, config.sampling.max_prompt_tokens), np.arange(size)
        with rollouts.asking(rows, group, lang.tokenizer, functions) as early:
            found = sample(step, state, prompts, first + row_ids, early.on_finished, begun=begun)
            if begun is not None and early.on_finished is not None:
                early.on_finished({row: one.tokens.tolist() for row, one in enumerate(begun)})
        return Pending(rows, found.unscored(rows, lang, began), early)

    def draw(step: int, state: TrainState) -> Drawn:
        nonlocal pending, restored
        now = pending
        if restored:  # whole already: nothing is drawn for them
            completions = [one for some in restored for one in some.completions]
            now = ask(step, state, [some.row for some in restored], 0, completions)
        elif now is None:
            now = ask(step, state, next(stream)[1], size, None)
        # Before the next batch is asked about: this one's questions would wait behind.
        values = None if worth is None else worth(step, state, now.rows, 0)
        ahead = ask(step, state, next(stream)[1], 0, None)
        scored = rollouts.score(now.sampled, now.rows, functions, config.reward_limits.fault_share, now.early.answers)
        scored = scored if values is None else with_baseline(scored, values)
        pending, restored = ahead, []
        is_older = np.asarray(scored.rollout.policy_step) != int(state.step)
        others = {STALE: int(scored.lengths[is_older].sum()) / max(int(scored.lengths.sum()), 1)}
        took = {name: x for name, x in rollouts.metrics(ahead.sampled).items() if name.startswith(("perf/", "time/ro"))}
        return as_drawn(scored, step, **took, **others)

    def get_state() -> dict[str, Any]:
        groups = restored
        if pending is not None:
            groups = in_groups(pending.rows, sampler.begun(pending.sampled.rollout, np.ones(size, bool)))
        return {"stream": stream.get_state(), "pending": as_json(groups)}

    def set_state(state: dict[str, Any]) -> None:
        nonlocal pending, restored
        stream.set_state(state["stream"])
        close()
        pending, restored = None, from_json(state["pending"])

    def close() -> None:
        if pending is not None:
            pending.early.give_up()

    return Source(draw, get_state, set_state, close)
