"""Tasks that need no data files, and environments: programs that a model talks to.

Every task is registered once, in `TASKS`, and every built-in environment in
`named.ENVIRONMENTS`. What a class must be to be an environment is in `contract`; `pool` runs them.
"""

from __future__ import annotations

from tpu_rl.environments import (
    arithmetic,
    mini_shell,
    pictures,
    puzzles,
    reasoning,
    reverse,
    search,
    star_graph,
)
from tpu_rl.environments.arithmetic import (
    ALPHABET,
    Arithmetic,
    ArithmeticData,
    ArithmeticDemonstrations,
    ArithmeticSource,
)
from tpu_rl.environments.mini_shell import MiniShellData, MiniShellSource
from tpu_rl.environments.pictures import PicturesData, PicturesSource
from tpu_rl.environments.puzzles import PuzzlesData
from tpu_rl.environments.reasoning import ReasoningGymData
from tpu_rl.environments.reverse import ReverseData
from tpu_rl.environments.search import SearchData, SearchSource
from tpu_rl.environments.star_graph import StarGraph, StarGraphData, StarGraphSource
from tpu_rl.environments.task import Task, text_of

__all__ = [
    "ALPHABET",
    "TASKS",
    "Arithmetic",
    "ArithmeticData",
    "ArithmeticDemonstrations",
    "ArithmeticSource",
    "MiniShellData",
    "MiniShellSource",
    "PicturesData",
    "PicturesSource",
    "PuzzlesData",
    "ReasoningGymData",
    "ReverseData",
    "SearchData",
    "SearchSource",
    "StarGraph",
    "StarGraphData",
    "StarGraphSource",
    "Task",
    "arithmetic",
    "mini_shell",
    "pictures",
    "puzzles",
    "reverse",
    "star_graph",
    "task_of",
    "text_of",
]

TASKS: dict[str, Task] = {
    "arithmetic": arithmetic.TASK,
    "mini_shell": mini_shell.TASK,
    "pictures": pictures.TASK,
    "puzzles": puzzles.TASK,
    "reasoning_gym": reasoning.TASK,
    "reverse": reverse.TASK,
    "search": search.TASK,
    "star_graph": star_graph.TASK,
}
"""Every task by its name. To add a task, write its file and add its row here."""


def task_of(settings: object) -> Task | None:
    """Return the task with these settings, or None if they belong to no task (data files)."""
    return next((task for task in TASKS.values() if type(settings) is task.settings), None)
