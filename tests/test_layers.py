"""Imports point down: which folder may import which, read from the syntax tree.

Imports inside functions count, too. Imports for type checkers only do not.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import tpu_rl
from tests.fixtures import import_graph
from tests.fixtures.import_graph import imported, package_of, tree_of

LIBRARY = Path(tpu_rl.__file__).parent
TESTS = Path(__file__).parent

WINGS = {
    "tasks": "built-in tasks and environments, and adapters to environments of other packages",
    "verifiers": "built-in rewards",
    "sandbox": "the judge of programs",
    "rollout.conversations": "conversations with environments",
    "serving": "the HTTP server of a policy, and agents that talk to it",
    "tinker": "the Tinker API",
    "report": "report.html",
    "planner": "whether compiled programs fit their devices, and how fast they can be",
    "cost_model": "what a compiled program costs",
    "studies": "measurements beyond those that a run makes of itself",
    "proofs": "the battery of proofs for algorithms",
    "commands.presets": "the presets",
    "commands.evaluate": "evaluate, compare, check-reward, test-time",
    "commands.plan": "plan, and choices by estimates",
    "commands.recipe": "chains of runs",
    "commands.serve": "serve, chat",
    "commands.tools": "check, combine, doctor, export, report, translate, verify, watch",
}
"""Folder of tpu_rl -> what it holds. All others are the core: it reaches a wing by a table of
`tpu_rl.wings` only."""

BASICS = {"types", "errors", "sums", "ranges", "plain_values", "lazy", "jax_versions"}
STATE = BASICS | {"train.sharding"}
MODEL_CODE = STATE | {"losses", "models", "tokenizers", "data", "algorithm_spec"}
WORKERS = {"runtime.workers", "runtime.worker_child", "runtime.verl_rewards", "runtime.segments"}
ALLOWED: dict[str, set[str]] = {
    # Modules of tpu_rl itself.
    "types": set(),
    "sums": {"types"},
    "redaction": set(),
    "errors": {"redaction"},
    "lazy": set(),
    "jax_versions": set(),
    "wings": {"lazy"},
    "ranges": {"errors", "plain_values"},
    "run_files": {"errors"},
    "metrics": {"redaction", "errors", "run_files"},
    "untrusted_files": {"errors"},
    "algorithm_spec": {"types"},
    "plain_values": {"errors"},
    "user_code": {"errors"},
    # Mathematics.
    "train": BASICS,
    "losses": STATE | {"train.packing", "algorithm_spec"},
    "algos": BASICS | {"user_code", "losses", "train.packing", "algorithm_spec"},
    "proofs": BASICS | {"train", "algorithm_spec"},
    "models": STATE | {"runtime.processes", "untrusted_files", "storage"},
    "sampler": STATE | {"losses"},
    "storage": {"errors"},
    "cost_model": {"errors", "lazy"},
    "planner": STATE | {"train.update_step", "cost_model", "models", "sampler"},
    # Text, files and processes.
    "tokenizers": BASICS | {"untrusted_files"},
    "data": STATE | {"storage", "user_code"},
    "runtime": STATE | {"redaction", "storage", "user_code"},
    "checkpoint": STATE | {"runtime", "metrics", "run_files", "storage"},
    "report": {"errors", "metrics", "redaction", "run_files", "evaluation.intervals"},
    # Experience.
    "sandbox": {"errors"},
    "environments": BASICS | {"user_code", "wings", "data.images", "data.messages"} | WORKERS,
    "rewards": MODEL_CODE | {"user_code", "environments", "wings"} | WORKERS,
    "tasks": BASICS | {"environments", "rewards.verifier", "sandbox"} | WORKERS,
    "verifiers": MODEL_CODE
    | {"environments", "rewards", "sandbox", "tasks.adapters", "runtime.worker_child"}
    | {"wings", "sampler"},
    "rollout": STATE
    | {
        "wings",
        "losses.return_distributions",
        "sampler",
        "environments",
        "rewards",
        "tokenizers",
        "data",
        "models",
    }
    | {"runtime", "redaction"},
    "serving": BASICS
    | WORKERS
    | {"user_code", "environments", "sampler", "tokenizers", "data", "rollout", "rewards"}
    | {"runtime"},
    "tinker": MODEL_CODE
    | {
        "serving",
        "sampler",
        "rollout.prompts",
        "checkpoint.manifests",
        "run_files",
        "algos",
        "train",
    },
    "diagnosis": MODEL_CODE
    | {"untrusted_files", "wings"}
    | {"runtime", "checkpoint", "metrics", "redaction", "experience", "run_files"}
    | {"storage", "train"},
    "experience": MODEL_CODE
    | {"run_files", "wings"}
    | {"rollout", "sampler", "environments", "rewards", "runtime", "train"},
    "evaluation": MODEL_CODE
    | {"experience", "rollout", "sampler", "environments", "rewards", "runtime", "train"},
    "studies": MODEL_CODE
    | {"experience", "rollout", "sampler", "environments", "rewards", "runtime", "train"}
    | {"evaluation", "run_files"},
}
"""Folder or module directly in tpu_rl -> what it may import of tpu_rl besides itself.

"train" stands for the whole folder, "train.packing" for one module of it. Whatever is not here is
placed by adding it.
"""

ALLOWED_IN_COMMANDS: dict[str, set[str]] = {
    "config": {"checks.config_checks", "flags"},
    "flags": {"config"},
    "presets": {"config"},
    "roles": {"config"},
    "stages": {"config"},
    "expert_axis": set(),
    "compose": {"config", "expert_axis", "roles"},
    "sources": {"compose", "config", "roles"},
    "micro_batches": {"compose", "config", "roles"},
    "python_run": {"from_python"},
    "from_python": {"config", "flags", "run"},
    "cli": {"flags", "presets"},
}
"""Module or folder of tpu_rl.commands -> what it may import of that folder. The others may import
all but `run`, of which there is one for `from_python` and recipes, and the wings."""

TRANSFORMERS = ("tokenizers", "models.hf")
"""The folders that may import transformers."""

LAZY = {"transformers", "orbax", "grain", "tensorboardX", "tensorstore", "pyarrow"}
"""Packages that are slow to import or missing on some machines: functions import them."""


MODULES = import_graph.modules_of(LIBRARY)


def imports_of(module: str) -> list[tuple[int, str]]:
    """Return (line, module of this project) of each import."""
    return import_graph.imports_of(module, MODULES)


def unit_of(module: str, top: str) -> str:
    """Return the name of the folder or module directly under a package; "" outside of it."""
    inside = module.startswith(f"{top}.")
    return module.removeprefix(f"{top}.").partition(".")[0] if inside else ""


def violations(unit: str, top: str, allowed: set[str]) -> list[str]:
    """Return a line for each import from `top`.`unit` of another unit of `top` that may not be."""
    lines = []
    for module, path in MODULES.items():
        if unit_of(module, top) != unit:
            continue
        for line, target in imports_of(module):
            if unit_of(target, top) in ("", unit):
                continue
            parts = target.removeprefix(f"{top}.").split(".")
            if not {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & allowed:
                lines.append(f"{path}:{line} imports {target}")
    return lines


def units_of(top: str) -> list[str]:
    """Return the names of all folders and modules directly under a package."""
    return sorted({unit_of(module, top) for module in MODULES} - {""})


@pytest.mark.parametrize("unit", [name for name in units_of("tpu_rl") if name != "commands"])
def test_folders_of_the_library_import_what_lies_below_them(unit):
    assert unit in ALLOWED, f"say in ALLOWED of {__file__} what tpu_rl.{unit} may import"
    wrong = violations(unit, "tpu_rl", ALLOWED[unit])
    assert not wrong, "\n".join([*wrong, f"{unit} may import {sorted(ALLOWED[unit])}"])


@pytest.mark.parametrize("unit", sorted(ALLOWED_IN_COMMANDS))
def test_modules_of_commands_import_what_lies_below_them(unit):
    wrong = violations(unit, "tpu_rl.commands", ALLOWED_IN_COMMANDS[unit])
    assert not wrong, "\n".join(wrong)


def wing_of(module: str) -> str:
    """Return the wing that a module belongs to; "" for one of the core."""
    name = module.removeprefix("tpu_rl.")
    return next((wing for wing in WINGS if name == wing or name.startswith(f"{wing}.")), "")


def test_no_file_of_the_core_imports_or_names_a_wing():
    wrong = []
    folders = "|".join(re.escape(wing) for wing in WINGS)
    name = re.compile(rf"tpu_rl\.({folders})\b")
    for module, path in MODULES.items():
        if wing_of(module) or module in ("tpu_rl.wings", "tpu_rl.commands.cli"):
            continue
        wrong += [f"{path}:{n} imports {t}" for n, t in imports_of(module) if wing_of(t)]
        wrong += [
            f"{path}:{node.lineno} names {node.value}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and name.fullmatch(node.value)
        ]
    assert not wrong, "\n".join(wrong)


CLOSURES = {"run": 52_200, "config": 25_000}
"""Module of tpu_rl.commands -> most lines of tpu_rl that importing it may load."""


@pytest.mark.parametrize("module", CLOSURES)
def test_a_command_loads_little(module):
    """Of all of tpu_rl, a run loads what its preset uses, and flags load what they are read by."""
    program = f"""
import sys
from pathlib import Path
from tpu_rl.commands import config, {module}
config.parse([])
files = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "tpu_rl"]
print(sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in files if file))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= CLOSURES[module]


CORE = 68_000
"""Most lines of the core: the files of tpu_rl that belong to no wing."""


def test_the_core_is_no_larger_than_its_budget():
    lines = {
        module: len(path.read_text(encoding="utf-8").splitlines())
        for module, path in MODULES.items()
    }
    core = sum(count for module, count in lines.items() if not wing_of(module))
    tables = [
        path for path in LIBRARY.rglob("*") if path.suffix in (".yaml", ".html", ".css", ".js")
    ]
    of_tables = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tables)
    print(f"tpu_rl has {sum(lines.values())} lines, and its core {core}; tables, pages {of_tables}")
    assert core <= CORE, "take something away, or move what only some runs need to a wing"


def folder_edges(allowed: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the edges between modules and folders that a table of allowed imports makes."""
    units = {*allowed, *(target for targets in allowed.values() for target in targets)}
    edges: dict[str, set[str]] = {unit: set() for unit in units}
    for unit, targets in allowed.items():
        edges[unit] |= targets
    for unit in units:
        if "." in unit:  # One module of a folder imports at most what its folder may.
            edges[unit] |= {name for name in allowed[unit.partition(".")[0]] if name not in units}
    return edges


def circle_in(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle, or an empty list."""
    done: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(edges.get(module, ())):
            circle = search(target, [*path, module])
            if circle:
                return circle
        done.add(module)
        return []

    for module in sorted(edges):
        circle = search(module, [])
        if circle:
            return circle
    return []


def test_the_table_itself_has_no_circle():
    assert not circle_in(folder_edges(ALLOWED))
    targets = {name.partition(".")[0] for names in ALLOWED.values() for name in names}
    assert targets <= ALLOWED.keys()


def test_no_modules_import_each_other():
    edges = {
        module: {target for _, target in imports_of(module) if target != module}
        for module in MODULES
        # It hands the names of one command on, and has nothing that the others read but a version.
        if module != "tpu_rl"
    }
    assert not circle_in(edges), " -> ".join(circle_in(edges))


def test_only_tokenizers_and_model_files_import_transformers():
    wrong = [
        f"{path}:{line}"
        for module, path in MODULES.items()
        for line, name in imported(tree_of(path), package_of(module, MODULES))
        if name.partition(".")[0] == "transformers"
        and not module.removeprefix("tpu_rl.").startswith(TRANSFORMERS)
    ]
    assert not wrong, "\n".join(wrong)


def test_slow_packages_are_imported_by_the_functions_that_need_them():
    wrong = []
    for module, path in MODULES.items():
        package = package_of(module, MODULES)
        for line, name in imported(tree_of(path), package, inside_functions=False):
            if name.partition(".")[0] in LAZY:
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_test_module_imports_another():
    wrong = [
        f"{path}:{line} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name in imported(tree_of(path), "tests")
        if any(part.startswith("test_") for part in name.split(".")[1:])
        and name.split(".")[0] == "tests"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tpu_rl.sampler", {"tpu_rl.sampler"}),
        (
            "from tpu_rl.losses import masked, log_probs",
            {"tpu_rl.losses.masked", "tpu_rl.losses.log_probs"},
        ),
        ("def f():\n    from tpu_rl.models import lora", {"tpu_rl.models.lora"}),
        ("from . import x\nfrom ..types import Array", {"tpu_rl.models.x", "tpu_rl.types.Array"}),
        ("if TYPE_CHECKING:\n    import jax", set()),
    ],
)
def test_imports_are_found_in_every_form(source, expected):
    assert {name for _, name in imported(ast.parse(source), "tpu_rl.models")} == expected


def test_circles_are_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})
