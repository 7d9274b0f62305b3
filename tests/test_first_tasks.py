"""The commands of docs/first_tasks: each passes a dry run on rows with the published columns."""

import json
import re
import shlex
import shutil
import string
from pathlib import Path

import jax
import pytest
import tyro

from tests.commands.conftest import QWEN
from tests.fixtures import qwen_models
from tpu_rl import models, tokenizers
from tpu_rl.commands import run
from tpu_rl.commands.serve import serve

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "first_tasks").glob("*.md"))
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message['role'] }}\n"
    "{% if message.content is string %}{{ message['content'] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
HELLO = {"role": "user", "content": "Hello"}
ANSWERS = ({"role": "assistant", "content": "Hi"}, {"role": "assistant", "content": "No"})
SCHEMAS: dict[str, tuple[dict, set[str], set[str]]] = {
    "openai/gsm8k": (
        {"question": "What is 1+2?", "answer": "1+2=3\n#### 3"},
        {"main", "socratic"},
        {"train", "test"},
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": "Hello",
            "prompt_id": "0",
            "chosen": [HELLO, ANSWERS[0]],
            "rejected": [HELLO, ANSWERS[1]],
            "messages": [HELLO, ANSWERS[0]],
            "score_chosen": 8.0,
            "score_rejected": 3.0,
        },
        set(),
        {"train_prefs", "train_sft", "train_gen", "test_prefs", "test_sft", "test_gen"},
    ),
    "HuggingFaceTB/smoltalk": (
        {"full_topic": "Greetings", "messages": [HELLO, ANSWERS[0], HELLO, ANSWERS[1]]},
        {"all", "everyday-conversations"},
        {"train", "test"},
    ),
    "trl-lib/tldr": (
        {"prompt": "POST: a story\n\nTL;DR:", "completion": " A story."},
        set(),
        {"train", "validation", "test"},
    ),
    "trl-lib/DeepMath-103K": (
        {"prompt": [{"role": "user", "content": "What is 1+2?"}], "solution": "$3$"},
        set(),
        {"train", "test"},
    ),
    "hiyouga/geometry3k": (
        {"images": ["picture.png"], "problem": "<image>What is 1+2?", "answer": "3"},
        set(),
        {"train", "validation", "test"},
    ),
}
"""Public dataset -> a row with its columns, its configurations, and its splits."""
HUB = re.compile(r"(?:Qwen|meta-llama|HuggingFaceTB)/(?!smoltalk)[\w.-]+")


def commands(page: Path, verb: str) -> list[list[str]]:
    """Read the commands `tpu-rl VERB` of a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(rf"^tpu-rl {verb} (.*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


def programs(page: Path) -> dict[str, str]:
    """Read the files that a page shows: each begins with its name."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    return dict(blocks)


RUNS = [
    pytest.param(page, argv, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, argv in enumerate(commands(page, "run"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a stand-in for the models, rows of every dataset, and the recipes."""
    place = tmp_path_factory.mktemp("first_tasks")
    model = models.from_config(QWEN | {"max_position_embeddings": 8192})
    tokenizer = tokenizers.characters(string.printable, chat_template=TEMPLATE)
    models.save(str(place / "text"), model, model.init(jax.random.key(0)), tokenizer)
    (place / "vision").mkdir()
    qwen_models.write_inputs(place / "vision", "qwen2_5_vl")
    shutil.copy(place / "vision" / "1_0.png", place / "picture.png")
    (place / "recipes").symlink_to(ROOT / "recipes")
    return place


def stand_in(argv: list[str], folder: Path) -> list[str]:
    """Put a local model and local rows in the place of public ones."""
    words = iter(argv)
    local = []
    dataset = None
    for word in words:
        if word in ("--data.config", "--data.split", "--data.evaluation-split"):
            assert dataset is not None
            value = next(words)
            assert value in SCHEMAS[dataset][1 if word == "--data.config" else 2]
        elif word in SCHEMAS:
            dataset = word
            rows = folder / "rows.jsonl"
            rows.write_text("".join(json.dumps(SCHEMAS[word][0]) + "\n" for _ in range(400)))
            local.append(str(rows))
        elif word.startswith("gs://"):
            local.append(str(folder / "run"))
        elif HUB.fullmatch(word) or word == "runs/shell_sft/model":
            local.append(str(folder / ("vision" if "VL" in word else "text")))
        else:
            local.append(word)
    return [*local, *(("--model.random-init",) if str(folder / "vision") in local else ())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_leads_with_what_to_run(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert any(line.startswith("```") for line in lines[:4])
    assert page.stem == "README" or "## The same offline" in lines


@pytest.mark.parametrize("argv", [argv for page in PAGES for argv in commands(page, "serve")])
def test_the_flags_of_servers_parse(argv):
    tyro.cli(serve.Flags, args=argv)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "argv"), RUNS)
def test_a_dry_run_accepts_the_command(page, argv, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    if page.stem == "langgraph" and "graph_agent.py:run" in argv:
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    if page.stem in ("distill", "images"):
        # Their datasets hold LaTeX answers.
        pytest.importorskip("math_verify")
    for name, text in programs(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    assert run.main([*stand_in(argv, folder), "--dry-run"]) == 0
