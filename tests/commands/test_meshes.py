"""Sizes that a mesh does not divide: micro-batches grow, and notes are printed about the rest."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures import several
from tests.fixtures.decoders import tiny
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl.checkpoint.run_folder import RunFolder
from tpu_rl.commands import compose, micro_batches, run
from tpu_rl.commands import config as configuration
from tpu_rl.commands.config import ExperimentConfig, MeshConfig
from tpu_rl.commands.plan import meshes, plan_steps
from tpu_rl.commands.sources import of_q_examples
from tpu_rl.cost_model import CHIPS
from tpu_rl.errors import InputError
from tpu_rl.models.decoder import param_shapes
from tpu_rl.planner import update_memory
from tpu_rl.train import sharding, update_step


def experiment(micro_batch_rows: int = 4, tensor_parallel: int | None = None) -> ExperimentConfig:
    preset = configuration.preset("arithmetic_grpo")
    return dataclasses.replace(
        preset,
        batch=dataclasses.replace(preset.batch, micro_batch_rows=micro_batch_rows),
        sampling=dataclasses.replace(preset.sampling, tensor_parallel=tensor_parallel),
    )


def abstract_mesh(**sizes: int) -> sharding.AbstractMesh:
    return sharding.AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in sharding.MESH_AXES), sharding.MESH_AXES
    )


@pytest.mark.parametrize(
    ("rows", "sizes", "expected"),
    [
        (4, {}, 4),
        (4, {"fsdp": 16}, 16),
        (24, {"data": 2, "fsdp": 4, "expert": 2}, 32),
        (8, {"fsdp": 2, "tensor": 8, "context": 4}, 8),
    ],
)
def test_micro_batches_grow_until_devices_divide_them(rows, sizes, expected):
    config = experiment(rows)
    mesh = abstract_mesh(**sizes)
    fitted = micro_batches.fit_micro_batch(config, mesh)
    assert fitted == experiment(expected)
    assert micro_batches.fit_micro_batch(fitted, mesh) == fitted
    mesh = abstract_mesh(**sizes | {"tensor": 1})
    notes = [
        note
        for note in micro_batches.notes(config, tiny("llama3").model, mesh)
        if "micro-batches" in note
    ]
    if rows == expected:
        assert notes == []
    else:
        assert notes == [f"micro-batches of {expected} rows, not {rows}: 16 devices share them"]


def test_as_many_rows_are_in_memory_as_fit():
    """A step of 256 texts of 88 tokens has 128 rows of 256, of which a thirty-second is 4."""
    config = experiment(micro_batch_rows=0)
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    model = plan_steps.read_model(config)
    planned = plan_steps.plan_stage(config, config.stages[0], mesh, model)

    def chosen(memory, rows=0):
        config, line = meshes.choose_rows(experiment(rows), model, mesh, memory)
        return config.batch.micro_batch_rows, line

    for rows in (1, 2, 4):
        assert chosen(meshes.update_bytes(planned, rows) / meshes.UPDATE_MEMORY + 1)[0] == rows
    line = "micro-batches of 4 rows, 4 on each of 1 devices (--batch.micro-batch-rows)"
    assert chosen(2**40) == (4, line)
    assert chosen(1)[0] == 1
    assert chosen(None) == (4, "")
    assert chosen(1, rows=3) == (3, "")


@needs_libtpu
def test_logits_are_whole_where_they_fit_on_a_chip_alone():
    config = experiment(micro_batch_rows=2)
    mesh = compose.make_mesh(config.mesh, tpu_devices("v5e:2x2")[:1])
    model = plan_steps.read_model(config)

    def with_logits(value):
        return dataclasses.replace(
            config, batch=dataclasses.replace(config.batch, whole_logits=value)
        )

    def chosen(memory, value="auto", mesh=mesh):
        return meshes.choose_logits(with_logits(value), model, mesh, memory).batch.whole_logits

    planned = plan_steps.plan_stage(with_logits("on"), config.stages[0], mesh, model)
    fits = int(meshes.update_bytes(planned, 2) / meshes.UPDATE_MEMORY) + 1
    assert (chosen(fits), chosen(fits - 2), chosen(None)) == ("on", "off", "auto")
    assert (chosen(fits, "off"), chosen(1, "on")) == ("off", "on")
    assert chosen(fits, mesh=abstract_mesh(fsdp=2)) == "auto"
    assert chosen(fits, mesh=compose.make_mesh(config.mesh, jax.devices()[:1])) == "auto"


def test_memory_of_an_update_by_formula():
    """Two layers of 10,240 weights in products of 40 dimensions, with 80 of norms; 131 words."""
    decoder = tiny("llama3").model.config
    alone = dict.fromkeys(sharding.MESH_AXES, 1)

    def bytes_of(sizes, remat="full"):
        learner = dataclasses.replace(decoder, remat=remat)
        return update_memory.temporaries(learner, 1000, 10, 6, sizes)

    gradients, logits, kept, layer = 12 * 1000, 8 * 131 * 6, 40 * 2 * 40, 40 * 3 * 256
    assert bytes_of(alone) == gradients + logits + kept + layer
    assert bytes_of(alone, "save-dots") == bytes_of(alone) + 40 * 2 * 256
    # All logits and, in bfloat16, their gradients.
    assert update_memory.temporaries(decoder, 1000, 10, None, alone) == (
        bytes_of(alone) + 8 * 131 * 4
    )
    # With the last norm, layers have 10,340 weights each.
    assert bytes_of(alone | {"fsdp": 2}) == bytes_of(alone) + 12 * (10_340 + 131 * 40)


def test_a_run_goes_on_with_the_rows_that_it_chose(tmp_path):
    begun = experiment(micro_batch_rows=0)
    configuration.save(begun, tmp_path / "config.yaml")
    run.record_rows(experiment(micro_batch_rows=16), RunFolder(tmp_path))
    # No step was taken: another size may be chosen.
    assert run.with_recorded_rows(begun, tmp_path) == begun
    (tmp_path / "metrics.jsonl").write_text("")
    resumed = run.with_recorded_rows(begun, tmp_path)
    assert resumed.batch.micro_batch_rows == 16
    run.require_same_configuration(resumed, tmp_path, str(tmp_path))
    assert run.with_recorded_rows(experiment(4), tmp_path) == experiment(4)


@pytest.mark.parametrize(
    ("capability", "memory", "types"),
    [
        ("8.0", 2**40, ("bfloat16", "auto", "unquantized")),
        ("7.5", 2**40, ("float32", "xla", "unquantized")),
        ("7.5", None, ("float32", "xla", "unquantized")),
        ("7.5", 2, ("float32", "xla", "int8")),
        ("7.5", 1, ("float32", "xla", "nf4")),
    ],
)
def test_gpus_without_bfloat16_compute_in_float32(capability, memory, types):
    """`memory` is in bytes for each weight; 2 is too little for float32, and 1 for int8."""
    model = tiny("llama3").model
    preset = configuration.preset("gsm8k_lora")
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="A card")
    mesh: Any = SimpleNamespace(devices=np.array([device]))
    weights = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model.config)))
    room = memory and int(memory * weights / meshes.BASE_MEMORY) - 1
    config, chosen, line = meshes.choose_precision(preset, model, mesh, room)
    settings = config.model
    assert (settings.dtype, settings.attention, settings.lora.base_dtype) == types
    assert chosen.config.dtype == ("float32" if types[0] == "float32" else model.config.dtype)
    assert ("A card has no bfloat16: float32" in line) == (capability == "7.5")
    assert (f"a base in {types[2]}" in line) == (types[2] != "unquantized")


def test_note_about_heads_names_the_nearest_divisors():
    model = tiny("llama3").model
    assert model.config.attention.num_heads == 4
    mesh = abstract_mesh(fsdp=2, tensor=2)
    assert micro_batches.notes(experiment(tensor_parallel=2), model, mesh) == []
    mesh = abstract_mesh(fsdp=2, tensor=8)
    notes = micro_batches.notes(experiment(tensor_parallel=8), model, mesh)
    assert notes[:2] == [
        f"{flag} 8 does not divide 4 heads: each of these devices computes all of them; "
        "nearest that do: 2, 4"
        for flag in ("--mesh.tensor", "--sampling.tensor-parallel")
    ]


def test_note_about_experts():
    model = tiny("mixtral").model
    assert model.config.moe is not None
    num_experts = model.config.moe.num_experts
    notes = micro_batches.notes(experiment(micro_batch_rows=10), model, abstract_mesh(expert=5))
    assert notes[0].startswith(f"--mesh.expert 5 does not divide {num_experts} experts")


def test_impossible_tensor_parallel_size_is_an_input_error():
    model = tiny("llama3").model
    with pytest.raises(InputError, match="cannot be cut into groups of 0"):
        micro_batches.notes(experiment(tensor_parallel=0), model, abstract_mesh(fsdp=2))


def test_q_examples_do_not_depend_on_the_micro_batch():
    identities = {of_q_examples.q_round_identity(experiment(rows), []) for rows in (4, 16)}
    assert len(identities) == 1


RUN = """
import sys
from tpu_rl.commands import run
from tpu_rl.experience import layout

layout_of = layout.layout_of

def print_and_lay_out(batch, data, **settings):
    print("rows", batch.micro_batch_rows)
    return layout_of(batch, data, **settings)

layout.layout_of = print_and_lay_out
flags = (
    "--steps 1 --batch.prompts 4 --batch.micro-batch-rows 1 --sampling.max-new-tokens 8 "
    "--evaluation.rows 8"
)
sys.exit(run.main(["arithmetic_grpo", *flags.split(), "--run-dir", sys.argv[1]]))
"""


@pytest.mark.nightly
def test_run_prints_the_note_and_uses_larger_micro_batches(tmp_path):
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    ended = subprocess.run(
        command, env=several.virtual_devices(2), capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "note: micro-batches of 2 rows, not 1: 2 devices share them" in ended.stderr
    assert "rows 2\n" in ended.stdout
    saved = configuration.load(tmp_path / "run" / "config.yaml")
    # The saved configuration is as given, because the run may continue on other devices.
    assert saved.batch.micro_batch_rows == 1


@needs_libtpu
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "on"),
        # A reference and 1.0 GiB more: by the compiler it does not fit with whole products.
        (("--algorithm.kl-loss-coef", "0.001"), "off"),
        (("--batch.whole-products", "off"), "off"),
    ],
)
def test_products_are_whole_where_the_update_fits(flags, expected):
    command = ["gsm8k_grpo", "--model.path", "Llama-3.1-8B", "--batch.micro-batch-rows", "16"]
    chip = CHIPS["v5e"]
    mesh = compose.make_mesh(MeshConfig(), tpu_devices("v5e:4x4"))
    with plan_steps.known_by_name(configuration.parse([*command, *flags])) as config:
        model = plan_steps.read_model(config)
        chosen, line = meshes.choose_products(config, model, mesh, chip.memory)
        alone = compose.make_mesh(MeshConfig(), tpu_devices("v5e:4x4")[:1])
        assert meshes.choose_products(config, model, alone, chip.memory) == (config, "")
    assert chosen.batch.whole_products == expected
    assert ("in windows" in line) == (expected == "off" and "--batch.whole-products" not in flags)
    options = compose.training_options(chosen, mesh)
    assert options is not None
    assert (update_step.WHOLE_PRODUCTS.items() <= options.items()) == (expected == "on")
