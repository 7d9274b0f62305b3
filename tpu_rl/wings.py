"""The tables by which the core reaches its wings. No other file of the core names a wing.

A wing is a folder that the core works without: built-in tasks and environments, built-in rewards,
servers, reports, and the commands around a run. A row names a module, which is imported when the
row is read. To add a task, an environment or a reward, write its file and add its row here.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from tpu_rl.lazy import LazyTable

if TYPE_CHECKING:
    from tpu_rl.environments.contract import Factory
    from tpu_rl.environments.task import Task
    from tpu_rl.rewards.verifier import Verifier


def _module(module: ModuleType, name: str) -> ModuleType:
    return module


def _task(module: ModuleType, name: str) -> Task:
    return module.TASK


def _environment(module: ModuleType, name: str) -> Factory:
    return module.ENVIRONMENTS[name]


def _family(module: ModuleType, name: str) -> Any:
    return module.factory


def _verifier(module: ModuleType, name: str) -> Verifier:
    return module.VERIFIERS[name]


TASKS: LazyTable[Task] = LazyTable(
    _task,
    {
        "arithmetic": "tpu_rl.tasks.arithmetic",
        "mini_shell": "tpu_rl.tasks.mini_shell",
        "pictures": "tpu_rl.tasks.pictures",
        "puzzles": "tpu_rl.tasks.puzzles",
        "reasoning_gym": "tpu_rl.tasks.reasoning",
        "reverse": "tpu_rl.tasks.reverse",
        "search": "tpu_rl.tasks.search",
        "star_graph": "tpu_rl.tasks.star_graph",
    },
)
"""Task -> its module, which has `TASK`. The settings of the task NAME_OF_IT are the dataclass
NameOfItData: config.yaml tells by this name which task it is."""

ENVIRONMENTS: LazyTable[Factory] = LazyTable(
    _environment,
    {
        "calculator": "tpu_rl.tasks.calculator",
        "mini_shell": "tpu_rl.tasks.mini_shell",
        "multi_attempt": "tpu_rl.tasks.multi_attempt",
        "picture_look": "tpu_rl.tasks.pictures",
        "python_tool": "tpu_rl.tasks.python_tool",
        "search": "tpu_rl.tasks.search",
        "search_random": "tpu_rl.tasks.search",
        "self_verify": "tpu_rl.tasks.self_verify",
    },
)
"""Name of `--environment` -> its module, which has it in `ENVIRONMENTS`."""

FAMILIES: LazyTable[Any] = LazyTable(
    _family,
    {
        "gem": "tpu_rl.tasks.adapters.gem",
        "gymnasium": "tpu_rl.tasks.adapters.gymnasium",
        "harbor": "tpu_rl.tasks.adapters.harbor",
        "mcp": "tpu_rl.tasks.adapters.mcp",
        "openenv": "tpu_rl.tasks.adapters.openenv",
        "reasoning_gym": "tpu_rl.tasks.adapters.reasoning_gym",
        "reflection": "tpu_rl.tasks.reflection",
        "skyrl_gym": "tpu_rl.tasks.adapters.skyrl_gym",
        "textarena": "tpu_rl.tasks.adapters.textarena",
    },
)
"""Name before the colon of `--environment FAMILY:NAME` -> its module, which has `factory`, what
makes a factory of the name after it: packages of environments, and what wraps another one."""

VERIFIERS: LazyTable[Verifier] = LazyTable(
    _verifier,
    {
        "action": "tpu_rl.verifiers.actions",
        "after": "tpu_rl.verifiers.others",
        "arithmetic": "tpu_rl.tasks.arithmetic",
        "arithmetic_well_formed": "tpu_rl.tasks.arithmetic",
        "box_iou": "tpu_rl.verifiers.actions",
        "brier": "tpu_rl.verifiers.confidence",
        "choice": "tpu_rl.verifiers.choice",
        "coin": "tpu_rl.verifiers.others",
        "consistent": "tpu_rl.verifiers.others",
        "cosine_length": "tpu_rl.verifiers.length",
        "dense": "tpu_rl.verifiers.others",
        "diversity": "tpu_rl.verifiers.text_form",
        "doubt": "tpu_rl.verifiers.confidence",
        "easy_length": "tpu_rl.verifiers.length",
        "effort": "tpu_rl.verifiers.length",
        "environment": "tpu_rl.verifiers.others",
        "f_beta": "tpu_rl.verifiers.sets",
        "for_rows": "tpu_rl.verifiers.others",
        "gsm8k": "tpu_rl.verifiers.gsm8k_answers",
        "gsm8k_marks": "tpu_rl.tasks.calculator",
        "hit_score": "tpu_rl.verifiers.sets",
        "implicit": "tpu_rl.verifiers.others",
        "judge": "tpu_rl.verifiers.judge",
        "listed_items": "tpu_rl.verifiers.sets",
        "majority": "tpu_rl.verifiers.others",
        "math": "tpu_rl.verifiers.math_verify_pool",
        "ordered_keys": "tpu_rl.verifiers.similarity",
        "pair_judge": "tpu_rl.verifiers.judge",
        "patch_ratio": "tpu_rl.verifiers.similarity",
        "pattern": "tpu_rl.verifiers.text_form",
        "phrases": "tpu_rl.verifiers.text_form",
        "pictures": "tpu_rl.tasks.pictures",
        "plain_judge": "tpu_rl.verifiers.programs",
        "point_in_box": "tpu_rl.verifiers.actions",
        "puzzles": "tpu_rl.tasks.puzzles",
        "python_checks": "tpu_rl.verifiers.programs",
        "python_speed": "tpu_rl.verifiers.programs",
        "python_tests": "tpu_rl.verifiers.programs",
        "recall": "tpu_rl.verifiers.recall",
        "repetition": "tpu_rl.verifiers.text_form",
        "reverse": "tpu_rl.tasks.reverse",
        "reverse_characters": "tpu_rl.tasks.reverse",
        "rubric": "tpu_rl.verifiers.similarity",
        "search_answer": "tpu_rl.tasks.search",
        "search_called": "tpu_rl.tasks.search",
        "search_format": "tpu_rl.tasks.search",
        "similarity": "tpu_rl.verifiers.others",
        "sql": "tpu_rl.verifiers.sql_pool",
        "sql_match": "tpu_rl.verifiers.sql_pool",
        "star_graph": "tpu_rl.tasks.star_graph",
        "think_format": "tpu_rl.verifiers.text_form",
        "tool_calls": "tpu_rl.verifiers.tool_matching",
        "unit_test_quality": "tpu_rl.verifiers.unit_test_quality",
        "verdict": "tpu_rl.verifiers.judge",
    },
)
"""Built-in reward of `--reward` -> its module, which has it in `VERIFIERS`."""

MODULES: LazyTable[Any] = LazyTable(
    _module,
    {
        "agents": "tpu_rl.serving.agents",
        "alarms": "tpu_rl.studies.alarms",
        "code_problems": "tpu_rl.sandbox.problems",
        "conversations": "tpu_rl.rollout.conversations.engine",
        "dry_run": "tpu_rl.commands.tools.dry_run",
        "episode_log": "tpu_rl.rollout.conversations.episode_log",
        "episodes": "tpu_rl.rollout.conversations.episodes",
        "gsm8k_rows": "tpu_rl.tasks.gsm8k_rows",
        "harness": "tpu_rl.studies.harness",
        "label_flips": "tpu_rl.studies.label_flips",
        "meshes": "tpu_rl.commands.plan.meshes",
        "pair_audit": "tpu_rl.studies.pair_audit",
        "presets": "tpu_rl.commands.presets",
        "report": "tpu_rl.report",
        "sandbox": "tpu_rl.sandbox",
        "served_teacher": "tpu_rl.serving.served_teacher",
    },
)
"""Part of a wing that a run calls where a setting asks for it -> its module."""
