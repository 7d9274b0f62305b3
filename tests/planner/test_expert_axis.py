"""The devices that share experts by default."""

import dataclasses

import pytest

from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import models
from tpu_rl.commands import compose
from tpu_rl.commands import config as configuration
from tpu_rl.commands.expert_axis import expert_devices
from tpu_rl.commands.plan import known_models, meshes, plan_steps
from tpu_rl.cost_model import CHIPS


@pytest.mark.parametrize(
    ("model", "devices", "tokens", "expected"),
    [
        # 3 x 2,048 x 768 x 128 elements of a layer, x 3 / 32 = 57 million, and 2 x 7 x 2,048 x
        # 2,048 = 59 million of gathered tokens; on 32 devices no weights, and 2 x 31 x 640 x 2,048
        # = 81 million, because each sends 640 rows to each other.
        ("Qwen3-30B-A3B", 32, 2048, 32),
        ("Qwen3-30B-A3B", 8, 2048, 8),
        # With many tokens it pays to gather weights.
        ("Qwen3-30B-A3B", 8, 262_144, 1),
        ("Mixtral-8x7B", 32, 2048, 8),
        ("Llama-3.1-8B", 16, 2048, 1),
    ],
)
def test_the_fewest_elements_over_links(model, devices, tokens, expected):
    shape = known_models.find(model)
    assert shape is not None
    config = models.from_config(shape).config
    assert expert_devices(config, devices, tokens) == expected


@needs_libtpu
@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], (1, 1, 1, 32, 1)), (["--mesh.expert", "4"], (1, 8, 1, 4, 1))]
    + [(["--mesh.fsdp", "32"], (1, 32, 1, 1, 1))],
)
def test_only_a_default_mesh_is_chosen(flags, expected):
    command = ["gsm8k_grpo", "--model.path", "Qwen3-30B-A3B", "--batch.micro-batch-rows", "32"]
    with plan_steps.known_by_name(configuration.parse([*command, *flags])) as config:
        model = plan_steps.read_model(config)
        mesh = compose.share_devices(config, tpu_devices("v6e:8x4"), model=model).mesh
    assert tuple(mesh.shape.values()) == expected
    assert dataclasses.asdict(config.mesh)["expert"] == (4 if "--mesh.expert" in flags else -1)


@needs_libtpu
@pytest.mark.parametrize(
    ("model_name", "flags", "expert", "rows"),
    [
        # 86 rows of full length. Gathers take 17.6 ms a layer, tokens 9.8 ms a row of a chip.
        ("Qwen3-30B-A3B", [], 1, 96),
        # So does the resumed run.
        ("Qwen3-30B-A3B", ["--batch.micro-batch-rows", "96"], 1, 96),
        # One row on a chip: then tokens take less time.
        ("Qwen3-30B-A3B", ["--batch.prompts", "12"], 32, 32),
        # Few large experts.
        ("Mixtral-8x7B", [], 8, 32),
    ],
)
def test_experts_are_gathered_for_all_rows_of_a_step(model_name, flags, expert, rows):
    command = ["gsm8k_grpo", "--model.path", model_name, *flags]
    with plan_steps.known_by_name(configuration.parse(command)) as config:
        model = plan_steps.read_model(config)
        mesh = compose.share_devices(config, tpu_devices("v6e:8x4"), model=model).mesh
        config, _ = meshes.choose_rows(config, model, mesh, CHIPS["v6e"].memory)
    assert (mesh.shape["expert"], config.batch.micro_batch_rows) == (expert, rows)
