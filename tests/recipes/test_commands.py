"""The commands of recipes/README.md and of its results parse, and the files they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from recipes.arithmetic import make_rows, make_texts
from recipes.chains import make_rows as make_chain_rows
from tpu_rl.commands import config
from tpu_rl.commands.recipe import recipe_file
from tpu_rl.experience.config import FileData

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "recipes" / "README.md", ROOT / "docs" / "benchmarks" / "recipes.md")
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
COMMANDS = re.findall(r"^python launch/run\.py (.*)$", TEXT, re.MULTILINE)
CHAINS = re.findall(r"^python launch/recipe\.py (\S+)", TEXT, re.MULTILINE)
PARTS = ("train", "held_out")
WRITTEN = {
    *(f"runs/arithmetic_rows/{kind}_{part}.jsonl" for kind in make_rows.KINDS for part in PARTS),
    *(f"runs/issues/{part}.jsonl" for part in PARTS),
    *(
        f"runs/tic_tac_toe_rows/{name}.jsonl"
        for name in ("random_games", "openings", "random", "perfect")
    ),
    *(f"runs/own_problem_rows/{name}.jsonl" for name in ("writer", "problems")),
    *(f"runs/chain_rows/{name}.jsonl" for name in make_chain_rows.FILES),
    *(f"runs/gemma_rows/{name}.jsonl" for name in make_texts.rows(largest=20, worked=2)),
    *(
        f"runs/{folder}/games_{part}.jsonl"
        for folder in ("guess_number_rows", "guess_lists_rows")
        for part in ("demonstrations", *PARTS)
    ),
    *(f"runs/repository_rows/{name}.jsonl" for name in ("demonstrations", *PARTS)),
    *(f"runs/tool_calls_rows/calls_{part}.jsonl" for part in PARTS),
    "runs/arithmetic_tries.jsonl",
    "rows.jsonl",
}
"""Files that a command of the page writes, or the reader."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse_and_their_files_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    parsed = config.parse(shlex.split(command))
    assert missing_files(parsed) == []


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_parse_and_their_files_exist(chain, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = recipe_file.read(Path(chain))
    stages = [stage.argv for stage in recipe.stages if stage.reads_only_models]
    for flags in [*stages, *recipe.evaluations.values()]:
        assert missing_files(config.parse(flags)) == []


def missing_files(parsed: config.ExperimentConfig) -> list[Path]:
    """Return the files of a command that neither the repository has nor a command writes."""
    if not isinstance(parsed.data, FileData):
        return []  # A task makes its problems, and has its rewards.
    rewards = [name for name in parsed.reward_names if ".py:" in name]
    paths = [parsed.data.path, parsed.data.evaluation_path, *rewards]
    names = [name for path in paths if path for name in path.split(",")]
    files = [Path(name.rpartition(":")[0] or name) for name in names]
    assert files
    return [file for file in files if not file.is_file() and str(file) not in WRITTEN]


def test_every_recipe_has_a_command():
    folders = [path.parent.name for path in ROOT.glob("recipes/*/reward.py")]
    texts = [*COMMANDS, *((ROOT / chain).read_text(encoding="utf-8") for chain in CHAINS)]
    assert [name for name in folders if f"recipes/{name}/" not in " ".join(texts)] == []
