"""The tables of `tpu_rl.wings`: each row loads, and each row of a wing's module is in a table."""

import importlib
from pathlib import Path

import pytest

import tpu_rl
from tpu_rl import wings
from tpu_rl.commands import cli
from tpu_rl.lazy import LazyTable, name_of

ROOT = Path(tpu_rl.__file__).parent


@pytest.mark.parametrize("table", ["TASKS", "ENVIRONMENTS", "FAMILIES", "VERIFIERS", "MODULES"])
def test_every_row_loads(table):
    for name, value in vars(wings)[table].items():
        assert value is not None, name


@pytest.mark.parametrize("folder", ["tasks", "verifiers"])
@pytest.mark.parametrize("table", ["ENVIRONMENTS", "VERIFIERS"])
def test_every_row_of_a_module_is_in_the_table(folder, table):
    for file in (ROOT / folder).glob("[!_]*.py"):
        if f"\n{table} = {{" in file.read_text(encoding="utf-8"):
            rows = vars(importlib.import_module(f"tpu_rl.{folder}.{file.stem}"))[table]
            assert rows == {name: vars(wings)[table][name] for name in rows}


def test_settings_tell_their_task():
    for name, task in wings.TASKS.items():
        assert name_of(task.settings.__name__, "Data") == name


def test_every_command_has_a_module():
    for name in cli.COMMANDS:
        assert callable(cli.command(name).main), name


def test_a_table_reads_a_row_once_and_only_when_asked():
    calls = []

    def read(module, name):
        calls.append((module.__name__, name))
        return name.upper()

    table = LazyTable(read, {"a": "json", "b": "no.such.module"})
    assert (list(table), len(table), "b" in table, "c" in table) == (["a", "b"], 2, True, False)
    assert (table["a"], table["a"], table.loaded()) == ("A", "A", ["A"])
    assert calls == [("json", "a")]
    with pytest.raises(KeyError):
        table["c"]


def test_a_name_of_a_package_is_no_module_of_the_same_name():
    from tpu_rl import algos, models
    from tpu_rl.algos.grpo import grpo

    importlib.import_module("tpu_rl.models.decoder")
    assert algos.grpo is grpo
    assert callable(models.decoder)
    assert "load" in dir(models)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = models.nothing
