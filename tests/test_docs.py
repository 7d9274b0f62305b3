"""The documentation names only files, sections, flags, presets and tests that exist."""

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from launch import config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "tests|tpu_rl|launch|bench|docs"

# Flags in the documentation that are not settings of launch/run.py: those of other commands of this
# repository, of pytest, of SLURM and of gcloud.
OTHER_FLAGS = {
    "adapter",
    "arms",
    "axes",
    "baseline",
    "cases",
    "coefficients",
    "command",
    "coordinator-address",
    "dist",
    "engines",
    "flips",
    "gpus-per-node",
    "gpus-per-task",
    "gsm8k",
    "guide",
    "help",
    "json",
    "kl-coef",
    "nodes",
    "ntasks-per-node",
    "num-processes",
    "only",
    "policy",
    "presets",
    "problems",
    "process-id",
    "processes",
    "requeue",
    "role",
    "rounds",
    "rows",
    "samples",
    "search",
    "signal",
    "speed",
    "to",
    "topology",
    "warmup",
    "worker",
    "xla_gpu_exclude_nondeterministic_ops",
    "zone",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def settings(value: Any, prefix: str = "") -> set[str]:
    """Return the flags, without dashes, that set the fields of a configuration."""
    names = set()
    for field in dataclasses.fields(value):
        name = f"{prefix}{field.name}".replace("_", "-")
        part = getattr(value, field.name)
        names |= {name, *(settings(part, f"{name}.") if dataclasses.is_dataclass(part) else ())}
    return names


def names_of_tests(path: Path) -> list[str]:
    """Return the names of a module's tests, each with its decorators, which hold case names."""
    source = path.read_text(encoding="utf-8")
    return [
        " ".join([node.name, *(ast.unparse(one) for one in node.decorator_list)]).lower()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8").replace("\n", " ")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, section = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in map(anchor, headings), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.\-]+\.(?:py|md|png|ipynb))", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """The flags of every preset."""
    return {flag for name in config.preset_names() for flag in settings(config.preset(name))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_exist(page, flags):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*(?:\.[a-z][\w-]*)*)", text))
    unknown = {flag for flag in named if re.sub(r"(^|\.)no-", r"\1", flag) not in flags}
    assert unknown - OTHER_FLAGS == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_presets_exist(page):
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"launch/(?:run|plan)\.py ([a-z]\w+)", text)
    assert set(commands) <= set(config.preset_names())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_selected_tests_exist(page):
    """Each word that a documented `pytest FILE -k` selects by occurs in a test's name."""
    text = page.read_text(encoding="utf-8").replace("\n", " ")
    for command in re.findall(r"`[^`]*pytest ([^`]*)`", text):
        files = re.findall(r"tests/[\w/]+\.py", command)
        selection = re.search(r'-k (?:"([^"]+)"|(\w+))', command)
        if not files or not selection:
            continue
        # pytest selects by names of files, too.
        names = [Path(file).stem for file in files]
        names += [name for file in files for name in names_of_tests(ROOT / file)]
        words = set(re.findall(r"\w+", selection[1] or selection[2])) - {"and", "or", "not"}
        assert {word for word in words if not any(word in name for name in names)} == set(), command
