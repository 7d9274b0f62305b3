"""What a mesh does not divide: micro-batches are made larger, and the rest is said."""

import dataclasses
import subprocess
import sys

import pytest

from launch import config as configuration
from launch import divisions, q_examples
from tests import several
from tests.test_models import tiny
from tpu_rl import sharding
from tpu_rl.errors import InputError


def given(rows=4, tensor=None):
    config = configuration.preset("arithmetic_grpo")
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, micro_batch_rows=rows),
        sampling=dataclasses.replace(config.sampling, tensor=tensor),
    )


def mesh_of(**sizes: int) -> sharding.AbstractMesh:
    return sharding.AbstractMesh(tuple(sizes.get(axis, 1) for axis in sharding.MESH_AXES), sharding.MESH_AXES)


@pytest.mark.parametrize(
    ("rows", "sizes", "wanted"),
    [
        (4, {}, 4),
        (4, {"fsdp": 16}, 16),
        (24, {"data": 2, "fsdp": 4, "expert": 2}, 32),
        (8, {"fsdp": 2, "tensor": 8, "context": 4}, 8),
    ],
)
def test_micro_batches_are_shared_evenly(rows, sizes, wanted):
    config, mesh = given(rows), mesh_of(**sizes)
    fitted = divisions.fitted(config, mesh)
    assert fitted == given(wanted)
    assert divisions.fitted(fitted, mesh) == fitted
    notes = divisions.doubts(config, tiny("llama3").model, mesh_of(**sizes | {"tensor": 1}))
    assert [note for note in notes if "micro-batches" in note] == (
        [] if rows == wanted else [f"micro-batches of {wanted} rows, not {rows}: 16 devices share them"]
    )


def test_what_is_not_divided_is_said_with_what_would():
    model = tiny("llama3").model
    heads = model.config.attention.heads
    assert divisions.doubts(given(tensor=2), model, mesh_of(fsdp=2, tensor=2)) == []
    notes = divisions.doubts(given(tensor=8), model, mesh_of(fsdp=2, tensor=8))
    assert heads == 4
    assert notes[:2] == [
        f"{flag} 8 does not divide 4 heads: each of these devices computes all of them; nearest that do: 2, 4"
        for flag in ("--mesh.tensor", "--sampling.tensor")
    ]


def test_experts_that_do_not_divide_are_said():
    model = tiny("mixtral").model
    assert model.config.experts is not None
    notes = divisions.doubts(given(rows=10), model, mesh_of(expert=5))
    assert notes[0].startswith(f"--mesh.expert 5 does not divide {model.config.experts.count} experts")


def test_devices_that_cannot_be_cut_so_are_refused():
    with pytest.raises(InputError, match="cannot be cut into groups of 0"):
        divisions.doubts(given(tensor=0), tiny("llama3").model, mesh_of(fsdp=2))


def test_examples_do_not_depend_on_micro_batches():
    first, second = (q_examples.made_of(given(rows), []) for rows in (4, 16))
    assert first == second


RUN = """
import sys
from launch import run, sources
lay_out = sources.layout_of
sources.layout_of = lambda config, data: (print("rows", config.batch.micro_batch_rows), lay_out(config, data))[1]
flags = "--steps 1 --batch.prompts 4 --batch.micro-batch-rows 1 --sampling.max-new-tokens 8 --evaluation.rows 8"
sys.exit(run.main(["arithmetic_grpo", *flags.split(), "--run-dir", sys.argv[1]]))
"""


def test_a_run_says_so_and_shares_its_rows(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    ended = subprocess.run(command, env=several.virtual_devices(2), capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "note: micro-batches of 2 rows, not 1: 2 devices share them" in ended.stderr
    assert "rows 2\n" in ended.stdout
    saved = configuration.load(tmp_path / "run" / "config.yaml")
    assert saved.batch.micro_batch_rows == 1  # on other devices it is another number
