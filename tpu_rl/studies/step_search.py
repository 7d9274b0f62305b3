"""Search over the steps of an answer by a judge: beams, diverse verifier trees, tree search.

Each problem has N places for completions. In each round every completion that has not ended goes on
by one step, the judge scores the results, and of R beginnings that have not ended the best R / M
are kept, which take the R places again, M each: M is the width. In a beam search all places of a
problem compete. In a diverse verifier tree search (DVTS) there are N / M trees of M places, and
beginnings compete in their tree. A completion that has ended keeps its place; the judge chooses
among the N as it does without a search.

A Monte-Carlo tree search (MCTS) has one tree for each problem. In each round it goes from the root
to a leaf by upper confidence bounds of the judge's mean score below each node, and expands the leaf
by M steps, until N completions have ended. There are no rollouts: the judge is the value.

Sources: Snell et al. 2024, arXiv 2408.03314, section 5.2 (beam search); Beeching, Tunstall and
Rush 2024, "Scaling test-time compute with open models" (DVTS), which also sets aside what has
ended; Chen et al. 2024, arXiv 2405.03553 (a tree search over steps by a value, whose policy prior
is left out here). Their judges are process reward models or values; any reward that means something
on the beginning of an answer is one here.
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
    method: Literal["beam", "dvts", "mcts"] = "beam"
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


EXPLORATION = 1.0
"""Weight of the exploration in a tree search, whose values are from 0 to 1."""


class Tree:
    """The beginnings of one problem as nodes of a tree. Node 0 is the empty beginning."""

    def __init__(self) -> None:
        self.beginnings = [EMPTY]
        self.parents = [-1]
        self.scores = [np.nan]
        """The judge's score of each node; NaN where it has none."""
        self.is_closed = [False]
        """True for a node that has ended, or all of whose children are closed."""

    @property
    def ended(self) -> list[PartialCompletion]:
        """Completions that have ended, the oldest first."""
        return [beginning for beginning in self.beginnings if beginning.ended]

    def leaf(self) -> int:
        """Select the node to expand: a node without an open child, by upper confidence bounds.

        The path goes from the root to the open child with the largest
        value + EXPLORATION sqrt(ln n / n_child), where n counts the nodes of a subtree.
        """
        values, counts = self.values()
        node = 0
        while True:
            children = [
                child
                for child, parent in enumerate(self.parents)
                if parent == node and not self.is_closed[child]
            ]
            if not children:
                return node
            bonus = np.sqrt(np.log(counts[node]) / counts[children])
            node = children[int(np.argmax(values[children] + EXPLORATION * bonus))]

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute the mean score of each node's subtree, [nodes], and its size, [nodes].

        Scores are scaled so that the tree's smallest is 0 and its largest 1. A node without a
        score counts as the smallest.
        """
        scores = np.array(self.scores)
        finite = scores[np.isfinite(scores)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
        totals = (np.where(np.isfinite(scores), scores, low) - low) / max(high - low, 1e-9)
        counts = np.ones(len(scores))
        # A child is younger than its parent.
        for node in range(len(scores) - 1, 0, -1):
            totals[self.parents[node]] += totals[node]
            counts[self.parents[node]] += counts[node]
        return totals / counts, counts

    def expand(self, node: int, children: Sequence[PartialCompletion], scores: np.ndarray) -> None:
        """Add children to a node, with their scores [children]."""
        for child, score in zip(children, scores, strict=True):
            self.beginnings.append(child)
            self.parents.append(node)
            self.scores.append(float(score))
            self.is_closed.append(child.ended)
        # The root stays open: there it samples anew when everything has ended.
        while node > 0 and all(
            closed
            for parent, closed in zip(self.parents, self.is_closed, strict=True)
            if parent == node
        ):
            self.is_closed[node] = True
            node = self.parents[node]


class _Steps:
    """One more step of beginnings, and their judge."""

    def __init__(self, decoding: Decoding, scorer: Scorer, search: StepSearch, samples: int):
        """`samples` is the number of beginnings of a problem in each round."""
        self.samples = samples
        self.judge = search.judge
        function = {search.judge: scorer.reward_functions[search.judge]}
        several = replace(decoding, config=replace(decoding.config, samples_per_prompt=samples))
        self.judging = make_engine(several, scorer._replace(reward_functions=function, terms=()))
        self.decoding = replace(decoding, config=replace(decoding.config, samples_per_prompt=1))
        self.stop_at = prompts.stop_at(scorer.tokenizer, (search.step_end, *decoding.stop_strings))
        self.join = _joiner(decoding, scorer)

    def extend(
        self,
        params: Params,
        request: RolloutRequest,
        contexts: Sequence[list[int]],
        beginnings: Sequence[PartialCompletion],
        first_row_id: int,
    ) -> list[PartialCompletion]:
        """Continue beginnings [problems * samples], those that go on, by one step."""
        rows = [row for row, beginning in enumerate(beginnings) if not beginning.ended]
        limit = self.decoding.config.max_new_tokens
        rollout = self.decoding.sample(
            params,
            [contexts[row // self.samples] + beginnings[row].tokens.tolist() for row in rows],
            request.step,
            first_row_id + np.asarray(rows),
            policy_step=request.policy_step,
            limits=np.array([limit - len(beginnings[row].tokens) for row in rows]),
            stop_at=self.stop_at,
        )
        steps = partial_completions(rollout, np.zeros(len(rows), bool))
        extended = list(beginnings)
        for row, step in zip(rows, steps, strict=True):
            extended[row] = self.join(beginnings[row], step)
        return extended

    def scores(
        self, params: Params, request: RolloutRequest, beginnings: Sequence[PartialCompletion]
    ) -> np.ndarray:
        """Score beginnings as if they were entire, [problems, samples]."""
        entire = [beginning._replace(ended=True) for beginning in beginnings]
        scored = self.judging.roll_out(params, replace(request, resumed=entire))
        return scored.parts[self.judge].reshape(-1, self.samples)


def engine(decoding: Decoding, scorer: Scorer, search: StepSearch) -> Engine:
    """Make the engine whose completions are found by a search.

    Args:
        decoding: `config.samples_per_prompt` is N. There is no environment, and no limit of
            thoughts.
        scorer: its rewards judge the completions; the one named `search.judge` also judges their
            beginnings.
    """
    whole = make_engine(decoding, scorer)
    num_samples = decoding.config.samples_per_prompt
    samples = search.width if search.method == "mcts" else num_samples
    steps = _Steps(decoding, scorer, search, samples)
    find = _by_trees if search.method == "mcts" else _by_rounds

    def generate(params: Params, request: RolloutRequest) -> Sampled:
        contexts = prompts.encode(request.rows, scorer.tokenizer, decoding.max_prompt_tokens)
        completions = find(steps, search, num_samples, params, request, contexts)
        return whole.generate(params, replace(request, resumed=completions))

    return Engine(generate, scorer)


def _by_rounds(
    steps: _Steps,
    search: StepSearch,
    num_samples: int,
    params: Params,
    request: RolloutRequest,
    contexts: Sequence[list[int]],
) -> list[PartialCompletion]:
    """Find the completions [problems * N] of a beam search or of diverse trees."""
    beginnings = [EMPTY] * (len(contexts) * num_samples)
    for round_number in itertools.count():
        # Ids of its own in each round: no random key is used twice.
        first_row_id = request.first_row_id + round_number * len(beginnings)
        beginnings = steps.extend(params, request, contexts, beginnings, first_row_id)
        ended = np.array([beginning.ended for beginning in beginnings])
        if ended.all():
            if round_number == 0:
                _say_that_nothing_was_searched(search)
            return beginnings
        scores = steps.scores(params, request, beginnings)
        beginnings = [
            beginnings[problem * num_samples + place]
            for problem, of_problem in enumerate(ended.reshape(scores.shape))
            for place in parents(search.method, scores[problem], of_problem, search.width)
        ]
    raise AssertionError("a completion ends at its limit at the latest")


def _by_trees(
    steps: _Steps,
    search: StepSearch,
    num_samples: int,
    params: Params,
    request: RolloutRequest,
    contexts: Sequence[list[int]],
) -> list[PartialCompletion]:
    """Find the completions [problems * N] of a tree search for each problem."""
    trees = [Tree() for _ in contexts]
    growing = list(range(len(trees)))
    for round_number in itertools.count():
        unfinished = [n for n in growing if len(trees[n].ended) < num_samples]
        if not unfinished:
            break
        # Each number of rows is a program of its own: finished trees leave by halves.
        if len(unfinished) <= len(growing) // 2:
            growing = unfinished
        leaves = [trees[n].leaf() for n in growing]
        beginnings = [
            trees[n].beginnings[leaf]
            for n, leaf in zip(growing, leaves, strict=True)
            for _ in range(search.width)
        ]
        part = replace(request, rows=[request.rows[n] for n in growing])
        first_row_id = request.first_row_id + round_number * len(contexts) * search.width
        children = steps.extend(
            params, part, [contexts[n] for n in growing], beginnings, first_row_id
        )
        if round_number == 0 and all(child.ended for child in children):
            _say_that_nothing_was_searched(search)
        scores = steps.scores(params, part, children)
        for place, (n, leaf) in enumerate(zip(growing, leaves, strict=True)):
            of_leaf = children[place * search.width : (place + 1) * search.width]
            trees[n].expand(leaf, of_leaf, scores[place])
    return [ended for tree in trees for ended in tree.ended[:num_samples]]


def _say_that_nothing_was_searched(search: StepSearch) -> None:
    print(
        f"note: no answer has a step that ends with {search.step_end!r}, so there was nothing to "
        "search; see --step-end",
        file=sys.stderr,
    )


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
