"""Search over the steps of an answer by a judge: beam search, and diverse verifier trees.

Each problem has N places for completions. In each round every completion that has not ended goes on
by one step, the judge scores the results, and of R beginnings that have not ended the best R / M
are kept, which take the R places again, M each: M is the width. In a beam search all places of a
problem compete. In a diverse verifier tree search (DVTS) there are N / M trees of M places, and
beginnings compete in their tree. A completion that has ended keeps its place; the judge chooses
among the N as it does without a search.

Sources: Snell et al. 2024, arXiv 2408.03314, section 5.2 (beam search); Beeching, Tunstall and
Rush 2024, "Scaling test-time compute with open models" (DVTS), which also sets aside what has
ended. Their judges are process reward models; any reward that means something on the beginning of
an answer is one here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from tpu_rl.rollout import prompts
from tpu_rl.rollout.engine import Decoding, Engine, RolloutRequest, Scorer, make_engine
from tpu_rl.rollout.scoring import Sampled
from tpu_rl.sampler import PartialCompletion
from tpu_rl.sampler.partial import partial_completions
from tpu_rl.types import Params


class StepSearch(NamedTuple):
    """The rule by which beginnings are continued and chosen."""

    judge: str
    """The name of a reward function of the scorer."""
    method: Literal["beam", "dvts"] = "beam"
    width: int = 4
    """M, the continuations of a beginning. It divides the number of completions."""
    step_end: str = "\n"
    """The text that ends a step."""


EMPTY = PartialCompletion(
    np.zeros(0, np.int32),
    np.zeros(0, np.float32),
    np.zeros(0, np.float32),
    np.zeros(2, np.uint32),
    policy_step=0,
    ended=False,
    truncated=False,
)
"""The beginning of every completion."""


def parents(method: str, scores: np.ndarray, ended: np.ndarray, width: int) -> np.ndarray:
    """Return [N] int: the place whose beginning each place goes on with.

    Args:
        method: "beam" or "dvts".
        scores: [N] of the judge; NaN where it has none.
        ended: [N] bool. A place that has ended keeps what it has.
        width: M.
    """
    scores = np.nan_to_num(scores, nan=-np.inf)
    parent = np.arange(len(scores))
    num_trees = 1 if method == "beam" else len(scores) // width
    for tree in np.split(parent.copy(), num_trees):
        going_on = tree[~ended[tree]]
        best = going_on[np.argsort(-scores[going_on], kind="stable")]
        parent[going_on] = best[np.arange(len(best)) // width]
    return parent


def engine(decoding: Decoding, scorer: Scorer, search: StepSearch) -> Engine:
    """Return the engine whose completions are found by a search.

    Args:
        decoding: `config.samples_per_prompt` is N. There is no environment, and no limit of
            thoughts.
        scorer: its rewards judge the completions; the one named `search.judge` also judges their
            beginnings.
        search: the method.
    """
    whole = make_engine(decoding, scorer)
    function = {search.judge: scorer.reward_functions[search.judge]}
    judge = make_engine(decoding, scorer._replace(reward_functions=function, terms=()))
    num_samples = decoding.config.samples_per_prompt
    max_new_tokens = decoding.config.max_new_tokens
    single = replace(decoding, config=replace(decoding.config, samples_per_prompt=1))
    at_step_end = prompts.stop_at(scorer.tokenizer, (search.step_end, *decoding.stop_strings))
    join = _joiner(decoding, scorer)

    def one_step(
        params: Params,
        request: RolloutRequest,
        contexts: Sequence[list[int]],
        beginnings: Sequence[PartialCompletion],
        first_row_id: int,
    ) -> list[PartialCompletion]:
        """Return all beginnings [problems * N] after one more step of those that go on."""
        rows = [row for row, beginning in enumerate(beginnings) if not beginning.ended]
        rollout = single.sample(
            params,
            [contexts[row // num_samples] + beginnings[row].tokens.tolist() for row in rows],
            request.step,
            first_row_id + np.asarray(rows),
            policy_step=request.policy_step,
            limits=np.array([max_new_tokens - len(beginnings[row].tokens) for row in rows]),
            stop_at=at_step_end,
        )
        steps = partial_completions(rollout, np.zeros(len(rows), bool))
        extended = list(beginnings)
        for row, step in zip(rows, steps, strict=True):
            extended[row] = join(beginnings[row], step)
        return extended

    def judged(
        params: Params, request: RolloutRequest, beginnings: Sequence[PartialCompletion]
    ) -> np.ndarray:
        """Return the judge's scores [problems, N] of beginnings, as if they were entire."""
        entire = [beginning._replace(ended=True) for beginning in beginnings]
        scored = judge.roll_out(params, replace(request, resumed=entire))
        return scored.parts[search.judge].reshape(-1, num_samples)

    def generate(params: Params, request: RolloutRequest) -> Sampled:
        contexts = prompts.encode(request.rows, scorer.tokenizer, decoding.max_prompt_tokens)
        beginnings = [EMPTY] * (len(contexts) * num_samples)
        for round_number in itertools.count():
            # Ids of its own in each round: no random key is used twice.
            first_row_id = request.first_row_id + round_number * len(beginnings)
            beginnings = one_step(params, request, contexts, beginnings, first_row_id)
            ended = np.array([beginning.ended for beginning in beginnings])
            if ended.all():
                if round_number == 0:
                    print(
                        f"note: no answer has a step that ends with {search.step_end!r}, so there "
                        "was nothing to search; see --step-end",
                        file=sys.stderr,
                    )
                return whole.generate(params, replace(request, resumed=beginnings))
            scores = judged(params, request, beginnings)
            beginnings = [
                beginnings[problem * num_samples + place]
                for problem, of_problem in enumerate(ended.reshape(scores.shape))
                for place in parents(search.method, scores[problem], of_problem, search.width)
            ]
        raise AssertionError("a completion ends at its limit at the latest")

    return Engine(generate, scorer)


def _joiner(
    decoding: Decoding, scorer: Scorer
) -> Callable[[PartialCompletion, PartialCompletion], PartialCompletion]:
    """Return a function that adds a step to a beginning and marks the whole if it has ended."""
    at_stop_string = prompts.stop_at(scorer.tokenizer, decoding.stop_strings)

    def join(before: PartialCompletion, step: PartialCompletion) -> PartialCompletion:
        tokens = np.concatenate([before.tokens, step.tokens])
        # A stop string may begin in one step and end in the next.
        stop = None if at_stop_string is None else at_stop_string(tokens.tolist())
        is_stopped = stop is not None or int(tokens[-1]) in decoding.config.stop_ids
        is_full = not is_stopped and len(tokens) == decoding.config.max_new_tokens
        behaviour = np.concatenate([before.behaviour_log_probs, step.behaviour_log_probs])
        return step._replace(
            tokens=tokens[:stop],
            log_probs=np.concatenate([before.log_probs, step.log_probs])[:stop],
            behaviour_log_probs=behaviour[:stop],
            ended=is_stopped or is_full,
            truncated=is_full,
        )

    return join
