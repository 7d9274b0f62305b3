"""Search over steps: who goes on, what an ended beginning counts, and tokens as they were drawn."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tpu_rl import sampler, tokenizers
from tpu_rl.commands import config, evaluators
from tpu_rl.commands.evaluate import evaluate
from tpu_rl.commands.saved_run import load_language
from tpu_rl.errors import InputError
from tpu_rl.experience.rows import tasks
from tpu_rl.rollout.engine import Decoding, RolloutRequest, Scorer
from tpu_rl.sampler import SamplerConfig
from tpu_rl.studies import step_search
from tpu_rl.studies.step_search import StepSearch
from tpu_rl.types import Rollout

TOKENIZER = tokenizers.characters("01.!")
PROMPTS = ["0", "11", "01", "00", "10"]
LIMIT = 20
IDS = [*TOKENIZER.encode("01."), TOKENIZER.eos_ids[0]]
KEYS: list[int] = []
"""The ids of all rows that were drawn."""


class Typist(Decoding):
    """Draws characters at random, by the key of a row: 0, 1, the end of a step, of a sequence."""

    def sample(self, params, prompts, step, row_ids, *, resumed=None, limits=None, **settings):
        del params, step
        stop_at = settings["stop_at"]
        rows = []
        for row, key in enumerate(row_ids):
            prompt = prompts[row // self.config.samples_per_prompt]
            if resumed is not None:
                rows.append((prompt, resumed[row].tokens.tolist(), resumed[row].truncated))
                continue
            drawn: list[int] = []
            KEYS.append(int(key))
            random = np.random.default_rng([key, len(prompt)])
            limit = LIMIT if limits is None else limits[row]
            while len(drawn) < limit:
                drawn.append(int(random.choice(IDS, p=[0.5, 0.2, 0.28, 0.02])))
                if drawn[-1] == IDS[3] or (stop_at and stop_at(drawn)):
                    break
            is_full = len(drawn) == limit and drawn[-1] != IDS[3]
            rows.append((prompt, drawn, is_full and not (stop_at and stop_at(drawn))))
        shape = (len(rows), max(len(p) + len(d) for p, d, _ in rows))
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, (prompt, drawn, _) in enumerate(rows):
            tokens[row, : len(prompt) + len(drawn)] = [*prompt, *drawn]
            mask[row, len(prompt) : len(prompt) + len(drawn)] = True
        column = np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape)
        count = np.arange(len(rows))
        arrays: list[Any] = [np.zeros(shape, np.float32), count, 0 * count]
        birth = np.zeros((len(rows), 2), np.uint32)
        truncated = np.array([cut for _, _, cut in rows])
        place = np.where(mask, -column, 0)
        return Rollout(tokens, mask, place, place, *arrays, birth, truncated, tokens[:, 0] > 0)


def typist(num_samples, stop_strings=()):
    nobody: Any = None
    settings = SamplerConfig(
        max_new_tokens=LIMIT, samples_per_prompt=num_samples, stop_ids=TOKENIZER.eos_ids
    )
    return Typist(nobody, settings, 8, stop_strings=stop_strings)


def ones(completions, **_):
    return [float(text.count("1")) for text in completions]


SCORER = Scorer(TOKENIZER, {"ones": ones})  # pyright: ignore[reportArgumentType]
REQUEST = RolloutRequest([{"prompt": prompt} for prompt in PROMPTS], step=0)


def searched(method, num_samples=8, width=2, stop_strings=()):
    KEYS.clear()
    decoding = typist(num_samples, stop_strings)
    search = StepSearch("ones", method, width, ".")
    found = step_search.engine(decoding, SCORER, search).roll_out({}, REQUEST)
    assert len({*KEYS}) == len(KEYS) > 0
    return found


def test_who_goes_on():
    scores = np.array([1, 3, 2, 3, float("nan"), 0])
    ended = np.array([0, 0, 1, 0, 0, 0], bool)
    # Five go on; the best three, 1, 3 and 0, take their places.
    np.testing.assert_array_equal(step_search.parents("beam", scores, ended, 2), [1, 1, 2, 3, 3, 0])
    np.testing.assert_array_equal(step_search.parents("dvts", scores, ended, 2), [1, 1, 2, 3, 5, 5])


@pytest.mark.parametrize("method", ["beam", "dvts", "mcts"])
def test_completions_are_whole_and_better_than_independent_ones(method):
    found = searched(method, width=4)
    assert len(found.completions) == 8 * len(PROMPTS)
    mask = np.asarray(found.rollout.action_mask)
    # The log-prob of a token is minus its column: steps are joined without a gap.
    for row, actions in enumerate(mask):
        columns = np.flatnonzero(actions)
        np.testing.assert_array_equal(found.rollout.log_probs[row, columns], -columns)
        last = found.rollout.tokens[row, columns[-1]]
        is_full = len(columns) == LIMIT and last != TOKENIZER.eos_ids[0]
        assert found.rollout.truncated[row] == is_full
        assert is_full or last == TOKENIZER.eos_ids[0]
    alone = step_search.make_engine(typist(8), SCORER).roll_out({}, REQUEST)
    assert found.rewards.mean() > alone.rewards.mean() + {"beam": 2, "dvts": 1, "mcts": 1}[method]


def test_trees_of_a_diverse_search_do_not_mix():
    """What went on in a tree has one first step."""
    found = searched("dvts", num_samples=8, width=4)
    trees = [
        {text.split(".")[0] for text in found.completions[start : start + 4] if "." in text}
        for start in range(0, len(found.completions), 4)
    ]
    assert max(map(len, trees)) == 1
    assert len(set.union(*trees)) > 3


def test_a_tree_is_grown_where_its_values_and_few_visits_say():
    going_on, ended = step_search.EMPTY, step_search.EMPTY._replace(ended=True)
    tree = step_search.Tree()
    assert tree.leaf() == 0
    tree.expand(0, [going_on, going_on, going_on], np.array([2.0, 6.0, np.nan]))
    values, counts = tree.values()
    # Scaled to 0, 1 and, without a score, 0; the root's own counts as 0.
    np.testing.assert_allclose(values, [1 / 4, 0, 1, 0])
    np.testing.assert_array_equal(counts, [4, 1, 1, 1])
    assert tree.leaf() == 2
    tree.expand(2, [ended, going_on], np.array([6.0, 2.0]))
    # Of the second node 2/3 + sqrt(ln 6 / 3), of the others 0 + sqrt(ln 6): 1.440 and 1.339.
    assert tree.leaf() == 5
    tree.expand(5, [ended, ended], np.array([2.0, 2.0]))
    # All below the second node has ended.
    assert tree.leaf() == 1
    assert len(tree.ended) == 3
    for node in (1, 3):
        tree.expand(node, [ended], np.array([2.0]))
    assert tree.leaf() == 0


def test_a_stop_string_that_two_steps_make_together_ends_a_completion():
    found = searched("beam", stop_strings=("..",))
    assert any(text.endswith("..") for text in found.completions)
    assert all(".." not in text[:-1] for text in found.completions)


def test_a_search_without_steps_says_so(capsys):
    search = StepSearch("ones", "beam", 2, "!")
    step_search.engine(typist(8, ()), SCORER, search).roll_out({}, REQUEST)
    assert "no answer has a step that ends with '!'" in capsys.readouterr().err
    searched("beam")
    assert not capsys.readouterr().err
    flags = evaluate.Flags("", judge="ones", search="beam", step_end=r"\n\n")
    assert evaluate.search_of(config.preset("arithmetic_grpo"), flags).step_end == "\n\n"


@pytest.mark.nightly
def test_log_probs_of_a_search_are_those_of_the_whole_text():
    preset = config.preset("arithmetic_grpo")
    language, params = load_language("builtin:arithmetic", preset)
    problems = tasks.problems(tasks.evaluation_rows(preset.data, preset.algorithm.experience, 3))
    scorer = evaluators.answer_scorer(preset, language.tokenizer, problems)
    flags = evaluate.Flags(
        "builtin:arithmetic",
        samples=4,
        judge="arithmetic_well_formed",
        search="beam",
        search_width=2,
        step_end="=",
    )
    settings = evaluate.with_judge(preset, flags)
    scorer = evaluators.answer_scorer(settings, language.tokenizer, problems)
    rollout = evaluate.answer(settings, language, params, problems, scorer, flags)[
        "sampled"
    ].rollout
    mesh = evaluate.compose.make_mesh(evaluate.MeshConfig())
    role = evaluate.models.role(language.model, lambda tree: tree)
    texts = [
        np.asarray(rollout.tokens)[row, : actions.nonzero()[0][-1] + 1].tolist()
        for row, actions in enumerate(np.asarray(rollout.action_mask))
    ]
    scores = sampler.text_scorer(role, mesh)(params, texts, 1)
    for row, score in enumerate(scores):
        columns = np.flatnonzero(rollout.action_mask[row])
        np.testing.assert_allclose(
            score.log_probs[columns - 1], rollout.log_probs[row, columns], atol=2e-5
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge": ""}, "search does nothing without judge"),
        ({"search": None, "search_width": 2}, "does nothing without search"),
        ({"search": None, "step_end": "."}, "does nothing without search"),
        ({"samples": 6}, "--search-width 4"),
        ({"search_width": 1}, "search_width is 1"),
        ({"step_end": ""}, "--step-end"),
    ],
)
def test_flags_that_leave_nothing_to_choose_are_refused(changes, message):
    flags = evaluate.Flags("builtin:arithmetic", judge="ones", samples=8, search="beam")
    evaluate.check(flags)
    with pytest.raises(InputError, match=message):
        evaluate.check(dataclasses.replace(flags, **changes))
