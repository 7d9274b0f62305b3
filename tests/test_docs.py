"""The documentation names only files, sections, flags, presets and tests that exist."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import tpu_rl
from tests.fixtures.import_graph import tree_of
from tpu_rl.commands import config

ROOT = Path(__file__).resolve().parents[1]
FOR_AGENTS = (ROOT / "AGENTS.md", ROOT / "skills" / "tpu-rl" / "SKILL.md")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *FOR_AGENTS,
    ROOT / "recipes" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TABLES = sorted((ROOT / "docs").rglob("*.tsv"))
FOLDERS = "tests|tpu_rl|launch|bench|research|docs|recipes"

PROGRAMS = (
    *("tpu_rl/commands", "tpu_rl/algos", "tpu_rl/losses"),
    *("bench", "research", "recipes", "tests/frozen"),
)
"""Folders whose dataclasses and argument parsers declare flags."""

FOREIGN_FLAGS = {
    "the parser's and the cluster's": {"help", "help-all"}
    | {"coordinator-address", "num-processes", "process-id"},
    "pytest, ruff, mkdocs": {"dist", "check", "strict"},
    "claude, codex": {"bare", "tools", "allowedTools", "system-prompt", "effort"}
    | {"sandbox", "skip-git-repo-check"},
    "gcloud": {"zone", "worker", "command"},
    "SLURM": {"nodes", "gpus-per-node", "gpus-per-task", "ntasks-per-node", "requeue"},
    "XPK": {"cluster", "workload", "tpu-type", "docker-image"}
    | {"max-restarts", "restart-on-exit-codes"},
    "TRL": {"dataset_name", "model_name_or_path"},
    "BFCL, tau2": {"test-category", "run-ids", "partial-eval", "skip-server-setup"}
    | {"local-model-path", "domain", "agent-llm", "user-llm", "agent-llm-args", "user-llm-args"}
    | {"max-steps", "results-dir"},
    "bench/noisy_grpo.py": {"algorithm.noise"},
    "XLA": {"xla_cpu_experimental_ynn_fusion_type", "xla_gpu_exclude_nondeterministic_ops"},
}
"""Flags in the documentation that no program of this repository declares."""


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


def test_pages_for_coding_agents_are_short():
    texts = [page.read_text(encoding="utf-8") for page in FOR_AGENTS]
    assert sum(len(text.splitlines()) for text in texts) <= 120
    _, head, _ = texts[1].split("---\n", 2)
    assert set(yaml.safe_load(head)) == {"name", "description"}


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


def declared_flags(path: Path) -> set[str]:
    """Return the names of all fields of classes, and of arguments, in a Python file."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            names |= {field.id.replace("_", "-") for field in fields if isinstance(field, ast.Name)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            constants = [value for value in node.args if isinstance(value, ast.Constant)]
            names |= {str(constant.value).lstrip("-") for constant in constants}
    return names


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """The flags of every preset and program, and of others that the documents name."""
    presets = [settings(config.preset(name)) for name in config.preset_names()]
    files = [path for folder in PROGRAMS for path in (ROOT / folder).rglob("*.py")]
    of_configuration = {flag.removeprefix("--") for flag in config.EXAMPLES}
    declared = map(declared_flags, files)
    return of_configuration.union(*presets, *declared, *FOREIGN_FLAGS.values())


def unknown_flags(page: Path, flags: set[str]) -> set[str]:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*(?:\.[a-z][\w-]*)*)", text))
    return {flag for flag in named if re.sub(r"(^|\.)no-", r"\1", flag) not in flags}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_exist(page, flags):
    assert unknown_flags(page, flags) == set()


def test_flags_of_tables_exist(flags):
    assert set().union(*(unknown_flags(table, flags) for table in TABLES)) == set()


def commands_of_conventions() -> list[str]:
    """Return the commands of the page that reproduces the peers' defaults, each on one line."""
    page = (ROOT / "docs" / "reference" / "conventions.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    lines = "".join(blocks).replace("\n    ", " ").splitlines()
    assert all(line.startswith("python launch/run.py ") for line in lines)
    return [line.removeprefix("python launch/run.py ") for line in lines]


@pytest.mark.parametrize("command", commands_of_conventions())
def test_the_flags_that_reproduce_the_peers_are_accepted(command):
    config.require_trainable(config.parse(command.split()))


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


HOW_TO = [
    page
    for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
    if page.name != "off_policy_rollouts.md"
]


@pytest.mark.parametrize("page", HOW_TO, ids=name_of)
def test_a_how_to_page_is_short_and_leads_with_a_command(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert any(line.startswith(("```", "    gcloud")) for line in lines[:20])


# --- troubleshooting ---


@functools.cache
def message_parts() -> list[list[str]]:
    """Return the constant parts of every string in the source, in order, without placeholders.

    What precedes a message ("warning: ") is left out.
    """
    parts = []
    for path in (ROOT / "tpu_rl").rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                values = [part for part in node.values if isinstance(part, ast.Constant)]
                parts.append([str(part.value) for part in values])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append([node.value])
    return [
        [re.sub(r"^(warning|note): (step )?", "", strings[0]), *strings[1:]]
        for strings in parts
        if strings
    ]


def quotes(text: str, parts: list[str]) -> bool:
    """Return True if a text is the beginning of a message, with something between its parts."""
    place = 0
    matched = 0
    for part in parts:
        start = text.find(part, place)
        if start < 0:
            # The text may end inside of this part.
            longest = min(len(part) - 1, len(text))
            ends = (n for n in range(longest, 0, -1) if text.endswith(part[:n]))
            matched += next(ends, 0)
            break
        matched += len(part)
        place = start + len(part)
    return matched >= 0.6 * len(text)


def quoted_messages() -> list[str]:
    """Return the messages that docs/troubleshooting.md quotes, without "warning" and the step."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    page = re.sub(r"^```$.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    spans = [
        double.strip() or single
        for double, single in re.findall(r"``([^\n]+?)``|`([^`\n]+)`", page)
    ]
    commands = ("-", "python ", "jq ", "iconv ", "export.py ", "pip ")
    messages = [span for span in spans if " " in span and not span.startswith(commands)]
    return [re.sub(r"^(warning|note): (step \d+: )?", "", message) for message in messages]


def test_troubleshooting_quotes_messages_that_exist():
    messages = quoted_messages()
    assert len(messages) > 25
    sources = message_parts()
    unknown = [text for text in messages if not any(quotes(text, parts) for parts in sources)]
    assert unknown == []


def test_a_message_that_does_not_exist_is_noticed():
    sources = message_parts()
    assert any(quotes("3 training rows are fewer than a batch of 8", parts) for parts in sources)
    assert not any(quotes("3 training rows are less than a batch of 8", part) for part in sources)


# --- the site ---


def test_the_reference_lists_modules_that_exist_and_every_algorithm():
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    modules = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    assert len(modules) == len(set(modules)) > 30
    for name in modules:
        assert importlib.import_module(name).__doc__, name
    files = (ROOT / "tpu_rl" / "algos").glob("*.py")
    algorithms = {f"tpu_rl.algos.{path.stem}" for path in files if path.stem != "__init__"}
    assert algorithms <= set(modules)


def load(name: str) -> ModuleType:
    """Return a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site_hooks() -> ModuleType:
    return load("site_hooks")


@pytest.mark.slow
def test_the_pages_of_methods_are_those_of_the_code():
    folder = ROOT / "docs" / "methods"
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert written == load("method_pages").pages(), "run: python docs/method_pages.py"


def test_the_page_of_rewards_is_that_of_the_code():
    written = (ROOT / "docs" / "reference" / "rewards.md").read_text(encoding="utf-8")
    assert written == load("method_pages").rewards_page(), "run: python docs/method_pages.py"


def test_every_flag_of_a_method_has_its_help():
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        assert not re.findall(r"^\| `--.*\|  \|$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("link", "source", "page", "expected"),
    [
        (
            "../README.md#algorithms",
            "docs/quickstart.md",
            "quickstart.md",
            "overview.md#algorithms",
        ),
        ("../../README.md", "docs/how-to/lora.md", "how-to/lora.md", "../overview.md"),
        ("docs/how-to/lora.md", "README.md", "overview.md", "how-to/lora.md"),
        ("docs/curve.png", "README.md", "overview.md", "curve.png"),
        ("CHANGELOG.md", "README.md", "overview.md", "changelog.md"),
        ("LICENSE", "CONTRIBUTING.md", "contributing.md", "license.md"),
        ("../concepts.md#keys", "docs/how-to/lora.md", "how-to/lora.md", "../concepts.md#keys"),
        ("#install", "README.md", "overview.md", "#install"),
        ("https://a.b/c.md", "README.md", "overview.md", "https://a.b/c.md"),
    ],
)
def test_links_for_github_become_links_of_the_site(site_hooks, link, source, page, expected):
    assert site_hooks.translate(f"see [x]({link}).", source, page) == f"see [x]({expected})."


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose settings may name Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *arguments: None)


def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site_hooks):
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def pages_in(nav: Any) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [
            page
            for part in (nav.values() if isinstance(nav, dict) else nav)
            for page in pages_in(part)
        ]

    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages_in(settings["nav"])) == sorted(pages | set(site_hooks.PAGES.values()))
    assert settings["theme"]["font"] is False
    assert "extra_javascript" not in settings
    assert settings["extra_css"] == ["site.css"]
    assert "url(" not in (ROOT / "docs/site.css").read_text()


# --- versions ---


def test_one_version_everywhere():
    version = tpu_rl.__version__
    assert f'version="{version}"' in (ROOT / "setup.py").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert citation["license"] == "Apache-2.0"
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version


def test_the_address_of_the_repository_has_one_place(site_hooks, tmp_path, monkeypatch):
    assert site_hooks.on_config({})["repo_url"] is None
    (tmp_path / "CITATION.cff").write_text("version: 1\nrepository-code: https://a.b/c\n")
    monkeypatch.setattr(site_hooks, "ROOT", tmp_path)
    assert site_hooks.on_config({})["repo_url"] == "https://a.b/c"


def test_the_site_needs_the_same_packages_everywhere():
    """The extra [docs], CI and CONTRIBUTING.md install them."""
    setup = (ROOT / "setup.py").read_text()
    [line] = re.findall(r'"docs": \[(.*)\]', setup)
    packages = re.findall(r'"([^"]+)"', line)
    assert len(packages) == 2
    for name in ("CONTRIBUTING.md", ".ci/run"):
        text = (ROOT / name).read_text()
        assert all(f'"{package}"' in text for package in packages), name


def test_nightly_names_tests_that_exist():
    lines = (ROOT / "tests" / "nightly.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        if line and not line.startswith("#"):
            path, _, name = line.partition("::")
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert f"def {name.split('[')[0]}(" in text, line
