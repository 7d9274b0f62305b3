"""The pages of methods and rewards, made from the code: `python docs/method_pages.py` writes them.

The page of a method has the head of the algorithm's file, its presets, its flags with their help,
and where its learning was measured. The page of rewards has the rows of `wings.VERIFIERS`. The site
is built without jax, so the pages are files; a test says when they are out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any, Literal

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from tpu_rl import rewards, wings
from tpu_rl.algos import ALGORITHMS, NAMES
from tpu_rl.commands import config
from tpu_rl.commands.presets import presets
from tpu_rl.commands.tools import model_card
from tpu_rl.rewards import scoring

FOLDER = DOCS / "methods"
REWARDS_PAGE = DOCS / "reference" / "rewards.md"
MEASURED = {
    "cispo": ("every_method", "Methods"),
    "mixed": ("every_method", "Methods"),
    "prime": ("every_method", "Methods"),
    "scored_completions": ("every_method", "Methods"),
    "surrogates": ("every_method", "Methods"),
    "a_star_po": (
        "learning",
        "REINFORCE++, ReMax, A*-PO, and reward models per step and per sentence",
    ),
    "distill": ("distillation", "GKD, sequence level, MiniLLM"),
    "dpo": ("preferences", "DPO and its relatives"),
    "grpo": ("learning", "The default run and its controls"),
    "kto": ("preferences", "Unpaired answers: BCO"),
    "mini_llm": ("distillation", "GKD, sequence level, MiniLLM"),
    "ppo": ("learning", "PPO with a critic, VC-PPO, VAPO"),
    "process_reward": ("reward_models", "Step labels"),
    "q_sharp": ("q_sharp", "Accuracy and KL over coefficients"),
    "reinforce": (
        "learning",
        "REINFORCE++, ReMax, A*-PO, and reward models per step and per sentence",
    ),
    "reward_model": ("reward_models", "Ranking held-out pairs"),
    "rft": ("learning", "Rejection-sampling fine-tuning and expert iteration"),
    "sentence_reward": ("reward_models", "Ranking held-out pairs"),
    "sft": ("learning", "The shipped model"),
    "unlearn": ("learning", "Unlearning"),
    "value_pretraining": ("learning", "PPO with a critic, VC-PPO, VAPO"),
}
"""Module of an algorithm -> the page of docs/benchmarks that measures it, and the section. Of a
module that is not here, a section whose heading names it is found."""


def pages() -> dict[str, str]:
    """Return file name -> text of every page of the folder."""
    methods = [ALGORITHMS[name].config for name in sorted(NAMES)]
    texts = {f"{module_name(method)}.md": page(method) for method in methods}
    return {"README.md": index(methods), **texts}


def index(methods: list[type]) -> str:
    """Return the page that lists all methods."""
    lines = [
        "# Methods",
        "",
        "One page for each file of `tpu_rl/algos/`: the formula, the paper, deviations from it,",
        "presets, flags and measurements. `python launch/run.py PRESET` runs a preset.",
        "",
        "The pages share some terms. The *policy* is the model that trains. The *reference* is the",
        "model that the run began with, frozen unless a page says otherwise. A *group* is all",
        "completions of one prompt. A *return* is the sum of the rewards from a token on. The",
        "*weights* w of tokens or pairs are normalized over one optimizer step.",
        "",
        "These pages are generated: edit the docstrings, then run `python docs/method_pages.py`.",
        "",
        "| method | in one sentence | presets |",
        "|---|---|---|",
    ]
    for method in methods:
        name = module_name(method)
        presets = ", ".join(f"`{preset}`" for preset in presets_of(method)) or "a phase of others"
        lines.append(f"| [{title(method)}]({name}.md) | {summary(method)} | {presets} |")
    return "\n".join(lines) + "\n"


def is_package(method: type) -> bool:
    """Say whether a method is a folder of `tpu_rl/algos/`."""
    return hasattr(sys.modules[method.__module__], "__path__")


def page(method: type) -> str:
    """Return the page of a method."""
    name = module_name(method)
    presets = presets_of(method)
    parts = [
        # Without the backslash, the site takes the last # of "Q#" for the end of the heading.
        "# " + title(method).replace("#", "\\#"),
        f"`tpu_rl/algos/{name}{'/' if is_package(method) else '.py'}`",
        markdown(head(method)),
    ]
    papers = sorted(set(re.findall(r"\b\d{4}\.\d{5}\b", head(method))))
    if papers:
        links = ", ".join(f"[arXiv {paper}](https://arxiv.org/abs/{paper})" for paper in papers)
        parts.append(f"Papers: {links}.")
    if name in presets:
        parts += ["## On your own data", markdown(description_of(name))]
    parts += ["## Presets", preset_table(presets), "## Flags", flag_table(method)]
    parts += ["## Measured", measured(name, presets)]
    return "\n\n".join(parts) + "\n"


# --- what the code says ---


def module_name(method: type) -> str:
    """Return the name of the module of a configuration."""
    return method.__module__.rpartition(".")[2]


def title(method: type) -> str:
    """Return what papers call a method."""
    name = method.__name__.removesuffix("Config")
    name = model_card.NAMES.get(name, name)
    return name[0].upper() + name[1:]


def head(method: type) -> str:
    """Return the docstring of a method's file."""
    return inspect.getdoc(sys.modules[method.__module__]) or ""


def summary(method: type) -> str:
    """Return the first sentence of a file, without its papers, for a table."""
    first = " ".join(head(method).split("\n\n")[0].split())
    first = re.sub(r" \([^()]*(?:arXiv|Biometrika)[^()]*\)", "", first)
    return escape(re.split(r"(?<=[a-z)\d])\. ", first)[0].rstrip(".:")).replace("|", "\\|")


def description_of(name: str) -> str:
    """Return the description of a preset."""
    return presets()[name]["about"].removesuffix("\n")


def presets_of(method: type) -> list[str]:
    """Return the presets that end with a method, the neutral one first."""
    names = [
        name
        for name in config.preset_names()
        if any(type(stage.algorithm) is method for stage in config.preset(name).stages)
    ]
    return sorted(names, key=lambda name: (name != module_name(method), name))


def preset_table(presets: list[str]) -> str:
    """Return a table of presets with the first sentence of each."""
    lines = ["| preset | what it trains |", "|---|---|"]
    for name in presets:
        text = " ".join(description_of(name).split("\n\n")[0].split())
        lines.append(f"| `{name}` | {escape(text).rstrip(':').replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def flag_table(method: type) -> str:
    """Return a table of the flags --algorithm.* of a method.

    Those that GRPO has with the same default and help stand on its page, and are named below.
    """
    rows = flags_of(method, "--algorithm.")
    if not rows:
        return "It has none of its own."
    grpo = ALGORITHMS["grpo"].config
    shared = set() if method is grpo else {*flags_of(grpo, "--algorithm.")} & {*rows}
    own = [row for row in rows if row not in shared]
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows if row in shared]
    parts = ["\n".join(["| flag | default | meaning |", "|---|---|---|", *own])] if own else []
    if names:
        parts.append(f"As in [GRPO](grpo.md#flags), with its defaults: {', '.join(names)}.")
    return "\n\n".join(parts)


def flags_of(settings: type, prefix: str) -> list[str]:
    """Return the rows of a table of flags, those of nested settings too."""
    helps = help_of(settings)
    types = typing.get_type_hints(settings)
    rows = []
    for field in dataclasses.fields(settings):
        flag = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(types[field.name]):
            rows += flags_of(types[field.name], f"{flag}.")
            continue
        text = escape(" ".join(helps.get(field.name, "").split()))
        choices = choices_of(types[field.name])
        if choices and not all(choice in text for choice in choices):
            text = f"{', '.join(f'`{choice}`' for choice in choices)}. {text}".strip()
        cell = text.replace("|", "\\|")
        rows.append(f"| `{flag}` | {default_of(field)} | {cell} |")
    return rows


def help_of(settings: type) -> dict[str, str]:
    """Return field -> the text below it, of a dataclass and of those that it inherits from."""
    texts: dict[str, str] = {}
    for owner in reversed(settings.__mro__[:-1]):
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and is_text:
                texts[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return texts


def choices_of(kind: Any) -> list[str]:
    """Return the words that a setting may be; none if it may be others."""
    if typing.get_origin(kind) is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    return [choice for part in typing.get_args(kind) for choice in choices_of(part)]


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a setting."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None or value == "" or value == ():
        return "none"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    line = str(value).replace("\n", "\\n")
    return f"`{line}`"


# --- rewards ---


def rewards_page() -> str:
    """Return the page of the built-in rewards."""
    lines = [
        "# Built-in rewards",
        "",
        "`--reward NAME` takes these names, functions of your own and reward models; see",
        "[reward functions](../how-to/your_own_data.md#reward-functions). The data must have the",
        "columns that a reward needs. A reward with *votes* can read final answers, so that",
        "`launch/evaluate.py --samples N` prints the accuracy of majority votes, maj@N. A reward",
        "that runs *during sampling* computes in other processes, while other completions are",
        "decoded; all others run in the process of the run, once per batch.",
        "",
        "A reward with *settings* takes them in parentheses: `repetition(size=4)`. A setting `of`",
        "is another reward, also one with settings: `cosine_length(of=gsm8k, max_tokens=2048)`.",
        "",
        "This page is generated: edit `tpu_rl/wings.py` or the docstrings, then run",
        "`python docs/method_pages.py`.",
        "",
        "| name | it gives | columns | votes | runs |",
        "|---|---|---|---|---|",
    ]
    details = []
    for name, row in sorted(wings.VERIFIERS.items()):
        paragraphs = (
            (inspect.getdoc(row.make or row.score) or "").partition("\n\nRaises:")[0].split("\n\n")
        )
        gives = escape(" ".join(paragraphs[0].split()).removeprefix("Return ").rstrip("."))
        columns = ", ".join(f"`{column}`" for column in required_columns(row)) or "none"
        votes = "yes" if any(row.readers) else "no"
        lines.append(f"| `{name}` | {gives} | {columns} | {votes} | {place_of(row)} |")
        if paragraphs[1:] or row.make:
            details += [f"## {name}", *map(markdown, paragraphs[1:]), *settings_of(row)]
    return "\n\n".join(["\n".join(lines), *details]) + "\n"


def required_columns(row: rewards.Verifier) -> list[str]:
    """Return the columns of the data that a built-in reward needs."""
    return [
        parameter.name
        for parameter in scoring.parameters(row.score) or ()
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.default is parameter.empty
        and parameter.name not in rewards.ROLLOUT_COLUMNS
    ]


def settings_of(row: rewards.Verifier) -> list[str]:
    """Return the paragraph of a reward's settings, if it has any."""
    if row.make is None:
        return []
    defaults = [
        f"`{name}={shown(p.default)}`" for name, p in inspect.signature(row.make).parameters.items()
    ]
    return [f"Settings: {', '.join(defaults)}."] if defaults else []


def shown(value: object) -> str:
    """Return a setting's value as users write it; a reward's name for a reward."""
    if callable(value):
        return next(name for name, row in wings.VERIFIERS.items() if row.score is value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def place_of(row: rewards.Verifier) -> str:
    """Return when and where a built-in reward runs."""
    time = "during sampling" if row.in_workers else "after sampling"
    return f"{time}, in the sandbox" if row.needs_sandbox else time


# --- measurements ---


def measured(name: str, presets: list[str]) -> str:
    """Return the links to the measurements of a method."""
    section = MEASURED.get(name) or section_about(name)
    lines = []
    if section is not None:
        lines.append(f"[{section[1]}](../benchmarks/{section[0]}.md#{anchor(section[1])}).")
    curves = [name] if (DOCS / "curves" / f"{name}.svg").exists() else []
    lines += [f"![Sampled accuracy over steps](../curves/{curve}.svg)" for curve in curves]
    if not lines:
        preset = next((other for other in presets if other.startswith("arithmetic_")), None)
        command = f" To make one: `python launch/run.py {preset}`." if preset else ""
        lines = [f"No learning curve is published yet.{command}"]
    return "\n\n".join(lines)


def section_about(name: str) -> tuple[str, str] | None:
    """Return the page and the heading of the first section of docs/benchmarks about a method."""
    words = re.compile(rf"\b{name.replace('_', '[ -]?')}\b", re.IGNORECASE)
    for path in sorted((DOCS / "benchmarks").glob("*.md")):
        for heading in re.findall(r"^##+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            if words.search(heading):
                return path.stem, heading
    return None


# --- Markdown ---


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def markdown(text: str) -> str:
    """Return a docstring as Markdown: indented blocks are literal, also with empty lines inside."""
    blocks: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            block = textwrap.dedent(block)
            is_continued = bool(blocks) and blocks[-1].endswith("\n```")
            if is_continued:
                blocks[-1] = f"{blocks[-1].removesuffix('```')}\n{block}\n```"
            else:
                blocks.append(f"```text\n{block}\n```")
        else:
            blocks.append(escape(block))
    return "\n\n".join(blocks)


def escape(text: str) -> str:
    """Return text in which only `code` is marked."""
    parts = re.split(r"(`[^`]*`)", text)
    # Flags stand as code.
    parts[::2] = [re.sub(r"(?<![\w-])(--[a-z][\w.-]*\w)", r"`\1`", part) for part in parts[::2]]
    parts = re.split(r"(`[^`]*`)", "".join(parts))
    parts[::2] = [re.sub(r"([*\[\]<_])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    REWARDS_PAGE.write_text(rewards_page(), encoding="utf-8")
    print(f"wrote {len(texts)} pages of methods and {REWARDS_PAGE.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
