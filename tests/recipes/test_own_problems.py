"""The rows and the verifier of the recipe in which a model writes its own problems."""

import re

import pytest

from recipes.own_problems import variants
from tpu_rl.tasks import arithmetic


def test_variants_are_parts_of_the_problem_and_all_rows_are_of_training():
    rows = variants.writer_rows()
    assert 0.9 * variants.WRITER < len(rows) <= variants.WRITER
    for row in rows:
        problem, variant = row["prompt"].removesuffix("=#"), row["completion"].removesuffix("=")
        assert arithmetic.count_terms(problem) == 5
        assert 2 <= arithmetic.count_terms(variant) <= 4
        # A part: the terms of an expression are different, so that its text tells its place.
        assert re.search(rf"(^|[-+*]){re.escape(variant)}([-+*]|$)", problem)
        assert {arithmetic.split_of(text) for text in (problem, variant)} == {"train"}


def test_the_writer_is_asked_about_problems_that_it_did_not_see():
    seen = {row["prompt"].removesuffix(variants.ASK) for row in variants.writer_rows()}
    problems = variants.problem_rows()
    assert len(problems) == variants.PROBLEMS
    assert len([row for row in problems if row["prompt"] in seen]) < 0.02 * len(problems)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3+8*4=", "35"),
        ("9-9=", "0"),
        ("3+8*2", None),
        ("3+=", None),
        ("-3+8=", None),
        ("#13", None),
        ("3=", None),
        ("3+8*2=19", None),
        ("1+2+3+4+5+6=", None),
        ("", None),
    ],
)
def test_only_expressions_have_answers(text, answer):
    if answer is not None:
        assert arithmetic.split_of(text.removesuffix("=")) == "train"
    assert variants.answers([text]) == [None if answer is None else {"answer": answer}]


def test_expressions_of_evaluation_have_none():
    texts = [f"{a}+{b}=" for a in range(1, 10) for b in range(1, 10)]
    kept = [columns is not None for columns in variants.answers(texts)]
    assert kept == [arithmetic.split_of(text[:-1]) == "train" for text in texts]
    assert not all(kept)
