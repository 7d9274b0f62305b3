"""Imports point down, by the syntax tree: those inside functions count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpu_rl

PACKAGE = Path(tpu_rl.__file__).parent

# What each module of tpu_rl, by its first name, may import of tpu_rl. A module that is not here is placed by adding it.
MATHEMATICS = {"types", "needs", "masked", "log_probs", "divergences", "advantages", "policy_gradients", "critics"}
MATHEMATICS |= {"preferences", "teachers", "scores", "guidance", "packing", "errors"}
STATE = {"types", "sharding", "errors"}
ALLOWED = {
    "redaction": set(),
    "errors": {"redaction"},
    "model_files": {"errors"},
    "types": set(),
    "needs": {"types"},
    "masked": {"types"},
    "log_probs": {"types", "masked", "sharding", "packing"},
    "divergences": {"types"},
    "teachers": {"types", "divergences", "log_probs"},
    "advantages": {"types", "masked"},
    "policy_gradients": {"types", "masked", "log_probs"},
    "preferences": {"types", "masked", "log_probs"},
    "scores": {"types", "masked"},
    "guidance": {"types", "errors"},
    "critics": {"types", "needs", "masked", "log_probs", "errors"},
    "sharding": {"types", "errors"},
    "packing": STATE,
    "training": STATE,
    "not_finite": set(),
    "optimizers": STATE,
    "processes": set(),
    "manifests": set(),
    "run_lock": {"errors"},
    "digests": set(),
    "compiled": {"compiled"},
    "stores": {"errors"},
    "store_lock": {"stores", "errors"},
    "step_folders": {"processes", "manifests"},
    "step_objects": {"processes", "stores", "errors"},
    "checkpoint": STATE | {"processes", "digests", "stores", "step_folders", "step_objects"},
    "data": STATE | {"row_files"},
    "row_files": {"errors"},
    "sampler": STATE | {"sampler"},
    "models": STATE | {"models", "model_files"},
    "algos": MATHEMATICS,
    "chat_templates": {"errors"},
    "tokenizers": {"tokenizers", "types", "chat_templates", "model_files", "errors"},
    "environments": {"types", "errors", "environments"},
    "reward_process": {"errors"},
    "reward_workers": {"reward_process", "errors"},
    "math_verdicts": set(),
    "sandbox_child": set(),
    "sandbox": {"errors"},
    "program_tests": {"sandbox"},
    "rewards": {"environments", "reward_process", "reward_workers", "sandbox", "program_tests", "types", "errors"},
    "reward_models": STATE | {"models", "scores", "masked", "data", "tokenizers"},
    "early_rewards": {"rewards"},
    "rollouts": {"sampler", "environments", "rewards", "tokenizers", "packing", "types", "redaction", "errors"}
    | {"processes", "early_rewards"},
    "comparisons": {"rollouts", "types"},
    "evaluation": {"rollouts", "sampler", "environments", "rewards", "tokenizers", "types", "errors"},
    "metrics": {"redaction", "errors"},
    "charts": set(),
    "report_charts": set(),
    "report": {"report_charts", "charts", "metrics", "report_page", "errors"},
    "report_page": {"charts"},
}

TRANSFORMERS = {"tokenizers/hugging_face.py", "models/hf_weights.py"}
# Slow to import, or missing on some machines: imported in the function that needs them.
LAZY = {"transformers", "orbax", "grain", "tensorboardX", "matplotlib", "tensorstore", "pyarrow"}

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of the modules, or of the names in them, that a syntax tree imports; `package` holds the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) + 1 - node.level] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def imports_of(file: str) -> set[str]:
    path = PACKAGE / file
    package = ".".join(("tpu_rl", *Path(file).parts[:-1]))
    return {*imported(ast.parse(path.read_text()), package)}


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_point_down(file):
    module = file.removesuffix(".py").split("/")[0]
    assert module in ALLOWED, f"tpu_rl/{file}: say in tests/test_layers.py what {module} may import"
    allowed = ALLOWED[module] | ({module} if file == f"{module}/__init__.py" else set())
    for name in imports_of(file):
        assert not name.startswith("launch"), f"tpu_rl/{file} imports {name}: nothing in tpu_rl imports launch"
        if name.split(".")[0] == "tpu_rl":
            target = (name.split(".") + [""])[1]
            assert target in allowed, f"tpu_rl/{file} imports tpu_rl.{target}: it may import {sorted(allowed)} only"


@pytest.mark.parametrize("file", FILES)
def test_transformers_stay_behind_two_doors(file):
    if file not in TRANSFORMERS:
        uses = {name for name in imports_of(file) if name.split(".")[0] == "transformers"}
        assert not uses, f"tpu_rl/{file} imports {uses}: only {sorted(TRANSFORMERS)} may import transformers"


@pytest.mark.parametrize("file", FILES)
def test_slow_packages_are_imported_where_they_are_needed(file):
    tree = ast.parse((PACKAGE / file).read_text())
    inside = {id(child) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for child in ast.walk(node)}
    type_checking = {
        id(child)
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside | type_checking:
            slow = {name.split(".")[0] for name in imported(node, "tpu_rl")} & LAZY
            assert not slow, f"tpu_rl/{file}:{node.lineno} imports {slow} with the module: move it into the function"


def test_no_two_modules_may_import_each_other():
    above = {(module, target) for module, targets in ALLOWED.items() for target in targets if target != module}
    assert not {(module, target) for module, target in above if (target, module) in above}
    assert {target for _, target in above} <= ALLOWED.keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tpu_rl.sampler", {"tpu_rl.sampler"}),
        ("from tpu_rl import masked, packing", {"tpu_rl.masked", "tpu_rl.packing"}),
        ("def f():\n    from tpu_rl.models import lora", {"tpu_rl.models.lora"}),
        ("from . import x\nfrom ..types import Array", {"tpu_rl.models.x", "tpu_rl.types.Array"}),
    ],
)
def test_imports_are_found_in_every_form(source, expected):
    assert {*imported(ast.parse(source), "tpu_rl.models")} == expected
