"""Tasks: right answers, splits that share nothing, and rows that depend on their place alone."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

import tpu_rl
from tpu_rl import tokenizers, wings
from tpu_rl.environments import contract, named, task_of
from tpu_rl.errors import InputError
from tpu_rl.experience.config import FileData
from tpu_rl.tasks import arithmetic, reverse
from tpu_rl.tasks.arithmetic import ALPHABET, Arithmetic, ArithmeticDemonstrations, ArithmeticSource
from tpu_rl.tasks.made_rows import EVALUATION_SHARE
from tpu_rl.tasks.reverse import ReverseData
from tpu_rl.tasks.star_graph import StarGraph, StarGraphSource, parse_path
from tpu_rl.wings import TASKS

WIDE = Arithmetic(min_terms=2, max_terms=6, max_value=20, operators="+-*")


@pytest.mark.parametrize(
    ("expression", "solution"),
    [
        ("3+8-4+6", "3+8=11;11-4=7;7+6=13;#13"),
        ("3-8+4", "3-8=-5;-5+4=-1;#-1"),
        ("3-8-4", "3-8=-5;-5-4=-9;#-9"),
        ("3+4*2-1", "4*2=8;3+8=11;11-1=10;#10"),
        ("2-3*4*5", "3*4=12;12*5=60;2-60=-58;#-58"),
        ("12+30", "12+30=42;#42"),
    ],
)
def test_worked_solutions_do_one_operation_at_a_time(expression, solution):
    assert arithmetic.worked_solution(expression) == solution
    assert arithmetic.bare_answer(expression) == solution[solution.index("#") :]


@pytest.mark.parametrize("text", ["", "7", "3+", "+3", "3--4", "3 + 4", "3/4", "3+4="])
def test_evaluate_refuses_texts_that_are_not_expressions(text):
    with pytest.raises(ValueError, match="not an expression"):
        arithmetic.evaluate(text)


def test_answers_agree_with_python():
    source = ArithmeticSource(WIDE)
    for i in range(500):
        row = source[i]
        answer = eval(row["prompt"].removesuffix("="))
        assert row["answer"] == str(answer)
        assert arithmetic.parse_answer(row["solution"]) == answer
        for step in row["solution"].split(";")[:-1]:
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
        assert set(row["prompt"] + row["solution"]) <= set(ALPHABET)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#13", 13),
        ("3+8=11;#-11", -11),
        ("#0", 0),
        ("nonsense #7", 7),
        ("13", None),
        ("#", None),
        ("#13 ", None),
        ("#13\n", None),
        ("#13;", None),
        ("#1#13", None),
        ("##13", None),
        ("#+13", None),
        ("#1.0", None),
        ("#١", None),
        ("#" + "9" * 5000, None),
        ("", None),
    ],
)
def test_parse_answer_takes_only_a_final_integer(completion, answer):
    assert arithmetic.parse_answer(completion) == answer


def test_splits_share_no_expression_and_evaluation_is_an_eighth():
    train, held_out = (
        {
            ArithmeticSource(Arithmetic(2, 3), split, seed)[i]["prompt"]
            for seed in (0, 1)
            for i in range(2000)
        }
        for split in ("train", "eval")
    )
    learned = {ArithmeticDemonstrations(Arithmetic(2, 3))[i]["prompt"] for i in range(2000)}
    assert not train & held_out
    assert not learned & held_out
    every = [
        f"{a}{x}{b}{y}{c}"
        for a in range(1, 10)
        for b in range(1, 10)
        for c in range(1, 10)
        for x in "+-"
        for y in "+-"
    ]
    share = sum(arithmetic.split_of(expression) == "eval" for expression in every) / len(every)
    assert share == pytest.approx(1 / EVALUATION_SHARE, abs=0.02)


def test_rows_depend_on_seed_split_and_index_only():
    rows = [ArithmeticSource(WIDE, "train", 3)[i] for i in range(50)]
    again = ArithmeticSource(WIDE, "train", 3)
    assert [again[i] for i in reversed(range(50))] == rows[::-1]
    assert [ArithmeticSource(WIDE, "train", 4)[i] for i in range(50)] != rows
    # Written down from a first run: the task must stay the same from release to release.
    assert ArithmeticSource(Arithmetic(), "train", 0)[0]["prompt"] == "4+7="
    assert ArithmeticSource(Arithmetic(), "eval", 0)[0]["prompt"] == "5+4+3="
    assert len({row["prompt"] for row in rows}) > 45


def test_no_term_comes_twice():
    source = ArithmeticSource(Arithmetic(min_terms=2, max_terms=6, max_value=6))
    for i in range(200):
        terms = source[i]["prompt"].removesuffix("=").replace("-", "+").split("+")
        assert len(set(terms)) == len(terms)


def test_a_source_refuses_rows_beyond_its_end():
    source = ArithmeticSource()
    assert source[len(source) - 1]["prompt"]
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]


def test_lengths_and_worked_solutions_have_their_shares():
    config = Arithmetic(min_terms=2, max_terms=4, length_shares=(1, 0, 3))
    rows = [ArithmeticDemonstrations(config, 0, (0.0, 0.5, 1.0))[i] for i in range(2000)]
    terms = Counter(1 + row["prompt"].count("+") + row["prompt"].count("-") for row in rows)
    assert set(terms) == {2, 4}
    assert terms[4] / len(rows) == pytest.approx(0.75, abs=0.04)
    for row in rows:
        is_long = len(row["prompt"]) == 8
        assert ("=" in row["completion"]) == is_long
    mixed = [
        ArithmeticDemonstrations(Arithmetic(), 0, (0.3,))[i]["completion"] for i in range(2000)
    ]
    assert sum("=" in text for text in mixed) / len(mixed) == pytest.approx(0.3, abs=0.04)


@pytest.mark.parametrize(
    "change",
    [
        {"min_terms": 1},
        {"min_terms": 5},
        {"max_value": 1},
        {"operators": ""},
        {"operators": "+/"},
        {"length_shares": (1.0,)},
        {"length_shares": (1.0, -1.0, 1.0)},
        {"length_shares": (0.0, 0.0, 0.0)},
    ],
)
def test_impossible_configurations_are_refused(change):
    with pytest.raises(InputError):
        dataclasses.replace(Arithmetic(), **change)


@pytest.mark.parametrize("share", [(1.5,), (-0.1,), (0.5, 0.5), (0.5, 0.5, 2.0)])
def test_impossible_written_shares_are_refused(share):
    with pytest.raises(InputError):
        ArithmeticDemonstrations(written_share=share)


def test_a_split_without_expressions_is_an_input_error():
    with pytest.raises(InputError, match="found no eval expression of 2 terms"):
        ArithmeticSource(Arithmetic(2, 2, 2, "-"), "eval")[0]


# --- star graphs ---


@pytest.mark.parametrize("graph", [StarGraph(2, 5, 50), StarGraph(5, 3, 11), StarGraph(3, 2, 40)])
def test_a_star_graph_has_one_path_to_its_goal(graph):
    goals = Counter()
    for row in (StarGraphSource(graph, "train", 200)[i] for i in range(200)):
        listed, _, question = row["prompt"].partition("/")
        edges = [tuple(map(int, edge.split(","))) for edge in listed.split("|")]
        center, goal = map(int, question.removesuffix("=").split(","))
        assert len(edges) == graph.degree * (graph.length - 1)
        assert len({node for edge in edges for node in edge}) == len(edges) + 1
        assert Counter(a for a, _ in edges)[center] == graph.degree
        # Backwards from the goal there is one way, and it is the answer.
        came_from, path = {b: a for a, b in edges}, [goal]
        while path[0] != center:
            path.insert(0, came_from[path[0]])
        assert parse_path(row["answer"]) == tuple(path)
        assert row["completion"] == row["answer"]
        goals[
            edges.index((path[-2], goal)) if graph.length > 2 else edges.index((center, goal))
        ] += 1
    assert len(goals) > 0.5 * len(edges)  # the goal's edge stands anywhere in the list


def test_star_graphs_differ_by_split_seed_and_row():
    sources = [
        StarGraphSource(split="train"),
        StarGraphSource(split="post"),
        StarGraphSource(split="eval"),
        StarGraphSource(seed=1),
    ]
    prompts = [source[i]["prompt"] for source in sources for i in range(50)]
    assert len(set(prompts)) == len(prompts)
    assert StarGraphSource()[3] == StarGraphSource()[3]
    with pytest.raises(IndexError):
        StarGraphSource(rows=10)[10]


@pytest.mark.parametrize("change", [{"degree": 1}, {"length": 1}, {"nodes": 8}])
def test_impossible_star_graphs_are_refused(change):
    with pytest.raises(InputError):
        dataclasses.replace(StarGraph(), **change)


def test_the_star_graph_tokenizer_has_a_token_for_each_node():
    tokenizer = tokenizers.load(Path(tpu_rl.__file__).parent / "pretrained" / "star_graph")
    row = StarGraphSource()[0]
    assert len(tokenizer.encode_prompt(row["prompt"])) == 3 * 8 + 3
    ids = tokenizer.encode(row["completion"])
    assert len(ids) == 5
    assert parse_path(tokenizer.decode(ids)) == parse_path(row["answer"])


@pytest.mark.parametrize(
    ("completion", "labels"),
    [
        ("4*2=8;3+8=11;#11", [True, True, True]),
        ("4*2=8;3+8=12;#12", [True, False, False]),
        # Right by itself, but not what comes next here.
        ("3+4=7;7*2=14;#14", [False, False, False]),
        ("4*2=8;3+8=11;11+1=12;#12", [True, True, False, False]),
        ("#11", [True]),
        ("#14", [False]),
        # Cut off.
        ("4*2=8;3+", [True, False]),
        ("", []),
    ],
)
def test_steps_are_right_where_the_worked_solution_has_them(completion, labels):
    steps = arithmetic.label_steps("3+4*2=", completion)
    assert [right for _, right in steps] == labels
    assert "".join(text for text, _ in steps) == completion


# --- reverse ---

DIGITS = ReverseData("0123456789", 2, 4)


def test_reverse_answers_are_the_reversed_strings():
    source = reverse.ReverseSource()
    lengths = Counter()
    for index in range(500):
        row = source[index]
        text = row["prompt"].removesuffix("=")
        assert row["answer"] == "".join(reversed(text))
        assert row["completion"] == f"#{row['answer']}"
        assert text.isalnum()
        lengths[len(text)] += 1
    assert set(lengths) == set(range(2, 9))


def test_reverse_splits_share_no_string():
    prompts = {
        split: {
            reverse.ReverseSource(DIGITS, split, seed)[i]["prompt"]
            for seed in (0, 1)
            for i in range(1000)
        }
        for split in ("train", "eval")
    }
    assert not prompts["train"] & prompts["eval"]
    share = sum(reverse.split_of(f"{i:04}") == "eval" for i in range(10_000)) / 10_000
    assert share == pytest.approx(1 / EVALUATION_SHARE, abs=0.02)


def test_reverse_rows_depend_on_seed_split_and_index_only():
    source = reverse.ReverseSource(DIGITS, "train", 3)
    rows = [source[i] for i in range(50)]
    assert [reverse.ReverseSource(DIGITS, "train", 3)[i] for i in reversed(range(50))] == rows[::-1]
    assert [reverse.ReverseSource(DIGITS, "train", 4)[i] for i in range(50)] != rows
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]


@pytest.mark.parametrize(
    ("completion", "exact", "share"),
    [
        ("#321", 1, 1),
        ("321", 0, 0),
        ("#32", 0, 2 / 3),
        ("#329", 0, 2 / 3),
        ("#3211", 0, 3 / 4),
        ("#123", 0, 1 / 3),
        ("#", 0, 0),
        ("", 0, 0),
        ([{"role": "assistant", "content": "#321"}], 1, 1),
    ],
)
def test_reverse_rewards(completion, exact, share):
    columns = {"prompts": ["123="], "completions": [completion], "answer": ["321"]}
    assert wings.VERIFIERS["reverse"].score(**columns) == [exact]
    assert wings.VERIFIERS["reverse_characters"].score(**columns) == [pytest.approx(share)]


@pytest.mark.parametrize(
    "change",
    [
        {"alphabet": ""},
        {"alphabet": "a"},
        {"alphabet": "aab"},
        {"alphabet": "ab="},
        {"min_length": 1},
        {"min_length": 9},
    ],
)
def test_impossible_reverse_settings_are_refused(change):
    with pytest.raises(InputError):
        dataclasses.replace(ReverseData(), **change)


def test_a_split_without_strings_is_an_input_error():
    tiny = ReverseData("01", 2, 2)
    empty = (
        "eval" if all(reverse.split_of(t) == "train" for t in ("00", "01", "10", "11")) else "train"
    )
    with pytest.raises(InputError, match=f"no {empty} string of length 2 exists"):
        reverse.ReverseSource(tiny, empty)[0]


# --- the table of tasks ---


JUDGED = {"completions": "completion", "answer": "answer"}
"""Argument of a reward -> column of a demonstration."""


@pytest.mark.parametrize("name", TASKS)
def test_every_task_makes_rows_that_its_rewards_judge(name):
    task = TASKS[name]
    settings = task.settings()
    assert task_of(settings) is task
    row = wings.VERIFIERS.get(name)
    if row is not None and name not in wings.ENVIRONMENTS:  # Otherwise an environment judges.
        demonstration = task.demonstrations(settings, 3)[0]
        answers = {name: [demonstration[column]] for name, column in JUDGED.items()}
        assert row.score([demonstration["prompt"]], **answers) == [1.0]
        read_answer = row.readers.read_answer
        assert read_answer is None or read_answer(demonstration["completion"]) is not None
    assert task.train_rows(settings, 3)[0] != task.train_rows(settings, 4)[0]
    held_out = task.evaluation_rows(settings, 20)
    assert len(held_out) >= 20
    assert "prompt" in held_out[19]
    assert len(task.slices_of(held_out[0])) <= 1


def test_files_are_no_task():
    assert task_of(FileData()) is None


FILES = {"bin/fig": "red"}


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        ("calculator", {"answer": "13"}, ["<<16-3", "#### 13"]),
        ("multi_attempt", {"prompt": "2 and 3?", "answer": "5"}, ["#### 4", "#### 5"]),
        ("self_verify", {"prompt": "3+4=", "answer": "7"}, ["#7", "#1"]),
        (
            "mini_shell",
            {"directories": ["bin"], "files": FILES, "goal": {"fig": "red"}},
            ["cd bin", "mv fig /", "exit"],
        ),
        ("search", {"base": 0}, ["search: fig", "search: jam", "done"]),
        ("search_random", {"base": 0}, ["search: fig", "search: jam", "done"]),
    ],
)
def test_built_in_games_go_on_in_another_process(name, row, turns):
    if name.startswith("search"):
        pytest.importorskip("bm25s")
    factory = named.load(name)[None]
    game = contract.make(factory, name)
    assert contract.describe(game, name).is_resumable
    first = contract.reset(game, row, seed=3, max_turns=4, is_evaluation=True)
    assert first == contract.reset(contract.make(factory, name), row, 3, 4, True)
    for turn in turns:
        restored = contract.make(factory, name)
        restored.__setstate__(contract.saved_state(game))
        assert contract.step(restored, turn) == contract.step(game, turn)
        assert contract.reward(restored) == contract.reward(game)
        assert contract.state_of(restored) == contract.state_of(game)
        game = restored


def test_every_built_in_environment_but_that_of_pictures_goes_on():
    kept = {name for name in wings.ENVIRONMENTS if "__setstate__" in dir(named.load(name)[None])}
    assert set(wings.ENVIRONMENTS) - kept == {"picture_look"}
