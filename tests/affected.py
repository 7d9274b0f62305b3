"""Print the tests that the changes of this branch can touch, for pytest:

    pytest $(python tests/affected.py [BASE])

Changes are those since the branch left BASE (main), files that are not committed included. Tests
are touched that import a changed module, directly or through others, and those in the folder that
mirrors its own. Tests of whole runs, which import everything through `tpu_rl.commands`, are touched
only where they import a changed module otherwise: `.ci/run` runs them all.
"""

import functools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fixtures import import_graph  # noqa: E402

PACKAGES = ("tpu_rl", "bench", "recipes", "tests")
DOCUMENTS = ("tests/test_docs.py", "tests/recipes/test_commands.py")
EVERYTHING = ("setup.py", "pyproject.toml", "requirements-lock.txt", "tests/conftest.py")


def changed_files(base: str) -> list[str]:
    """List the files that differ from the commit where the branch left `base`, and new ones."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    (start,) = git("merge-base", base, "HEAD")
    return [*git("diff", "--name-only", start), *git("ls-files", "--others", "--exclude-standard")]


@functools.cache
def graph() -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Read ({module: file}, {module: the modules that import it})."""
    modules: dict[str, Path] = {}
    for package in PACKAGES:
        modules |= import_graph.modules_of(ROOT / package)
    importers: dict[str, set[str]] = {module: set() for module in modules}
    for module in modules:
        for _, target in import_graph.imports_of(module, modules):
            importers[target].add(module)
    return modules, importers


def affected(changed: Iterable[str]) -> list[str]:
    """Return the test files and folders that changed files, by path from the root, can touch."""
    paths = list(changed)
    if any(path in EVERYTHING for path in paths):
        return ["tests"]
    modules, importers = graph()
    name_of = {str(path.relative_to(ROOT)): module for module, path in modules.items()}
    touched = {name_of[path] for path in paths if path in name_of}
    waiting = list(touched)
    while waiting:
        new = importers[waiting.pop()] - touched
        new = {module for module in new if not module.startswith("tpu_rl.commands")}
        touched |= new
        waiting += new
    files = {modules[name] for name in touched if name.rpartition(".")[2].startswith("test_")}
    tests = {str(file.relative_to(ROOT)) for file in files}
    if any(path.endswith((".md", ".yml", ".py")) for path in paths):
        tests |= set(DOCUMENTS)
    if any(path.endswith(".py") for path in paths):
        tests.add("tests/test_layers.py")
    # Names of families, presets and flags, which it imports by name.
    if any(path.startswith("tpu_rl/") for path in paths):
        tests.add("tests/frozen")
    for path in paths:
        mirror = "/".join(["tests", *Path(path).parts[1:2]])
        if path.startswith("tpu_rl/") and mirror != "tests" and (ROOT / mirror).is_dir():
            tests.add(mirror)
        if path.startswith(("recipes/", "launch/")):
            tests.add("tests/recipes" if path.startswith("recipes/") else "tests/commands")
    return sorted(test for test in tests if not {str(p) for p in Path(test).parents} & tests)


if __name__ == "__main__":
    for test in affected(changed_files(sys.argv[1] if len(sys.argv) > 1 else "main")):
        print(test)
