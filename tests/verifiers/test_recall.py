"""Recall of queries among documents: the tiers of DeepRetrieval, and real files."""

import json

import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.errors import InputError
from tpu_rl.rewards import registry
from tpu_rl.verifiers import recall


@pytest.mark.parametrize(
    ("share", "reward"),
    [
        *((1.0, 5), (0.7, 5), (0.69, 4), (0.5, 4), (0.49, 3), (0.4, 3), (0.39, 1), (0.3, 1)),
        *((0.29, 0.5), (0.1, 0.5), (0.09, 0.1), (0.05, 0.1), (0.049, -3.5), (0.0, -3.5)),
    ],
)
def test_the_tiers(share, reward):
    assert recall.tier(share) == reward


@pytest.fixture
def documents(tmp_path):
    pytest.importorskip("bm25s")
    file = tmp_path / "documents.jsonl"
    texts = ["red apples grow", "green apples", "a river of wine", "the Rhine is a river", "salt"]
    rows = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
    rows.append({"id": 6, "title": "Elbe", "contents": "another river"})
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return file


def test_recall_of_queries(documents):
    gold = ["d2", "d3", 6]
    texts = {
        "<think>rivers</think><answer>river</answer>": 1 + 5,
        '<answer>{"query": "River Rhine wine"}</answer>': 1 + 5,
        "<answer>wine</answer>": 1 + 1,
        "<answer>apples</answer>": 1 - 3.5,
        "<answer>unknown words</answer>": 1 - 3.5,
        "<answer> </answer>": -4,
        '<answer>{"question": "river"}</answer>': -4,
        "river": -4,
        "": -4,
    }
    name = f"recall(documents={documents})"
    columns = {"answer": [gold] * len(texts)}
    assert score(name, list(texts), **columns) == pytest.approx(list(texts.values()))
    answers = ["d4", '["d4", "d0"]']
    assert score(name, ["<answer>salt</answer>"] * 2, answer=answers) == [6, 5]
    first = f"recall(documents={documents}, k=1)"
    assert score(first, ["<answer>river rhine</answer>"], answer=[gold]) == [1 + 1]


@pytest.mark.parametrize("gold", [["d9"], "d9", [], None])
def test_unknown_documents_are_input_errors(documents, gold):
    with pytest.raises(InputError, match="column 'answer' of the data"):
        score(f"recall(documents={documents})", ["<answer>a</answer>"], answer=[gold])


@pytest.mark.parametrize("line", ["{", '{"id": 1}', '{"text": "a"}', '{"id": "d0", "text": "a"}'])
def test_lines_that_are_no_documents_are_refused_before_a_run(documents, line):
    documents.write_text(documents.read_text() + line + "\n")
    with pytest.raises(InputError, match="not a document") as error:
        registry.resolve(f"recall(documents={documents})")
    assert error.value.where == f"{documents}, line 7"


def test_documents_must_be_there():
    with pytest.raises(InputError, match="no such documents"):
        registry.resolve("recall(documents=absent.jsonl)")
    with pytest.raises(InputError) as error:
        registry.resolve("recall")
    assert error.value.why == "it needs documents="
