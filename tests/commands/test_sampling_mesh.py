"""The mesh for sampling that a run chooses by itself, and the line that it prints about it."""

from dataclasses import replace

import jax
import pytest

from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl.commands import compose
from tpu_rl.commands import config as configuration
from tpu_rl.commands.plan import meshes, plan_steps
from tpu_rl.cost_model import CHIPS
from tpu_rl.planner import decode_time

V5E = CHIPS["v5e"].memory
AT_SCALE = (
    ["gsm8k_grpo", "--batch.prompts", "64", "--batch.group-size", "8"]
    + ["--sampling.max-prompt-tokens", "512", "--sampling.max-new-tokens", "1536"]
    + ["--batch.row-length", "2048", "--algorithm.kl-loss-coef", "0.001"]
    + ["--sampling.max-num-seqs", "256"]
)


def chosen(flags, memory: int | None = V5E, topology="v5e:4x4"):
    with plan_steps.known_by_name(configuration.parse(flags)) as config:
        model = plan_steps.read_model(config)
        mesh, sampler = compose.share_devices(config, tpu_devices(topology), model=model)
        config, line = meshes.choose_sampling(config, model, mesh, memory, sampler)
    return config.sampling.tensor_parallel, line


def test_one_device_has_nothing_to_choose():
    config = configuration.parse(["arithmetic_grpo"])
    mesh = compose.make_mesh(config.mesh)
    model = plan_steps.read_model(config)
    assert meshes.choose_sampling(config, model, mesh, 2**30) == (config, "")


def test_as_many_completions_are_decoded_at_once_as_fit():
    """A slot of 88 tokens of the shipped model takes 135,168 bytes."""
    config = configuration.parse(["arithmetic_grpo", "--sampling.max-num-seqs", "0"])
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    model = plan_steps.read_model(config)

    def slots(memory, config=config):
        chosen, _ = meshes.choose_sampling(config, model, mesh, memory)
        return chosen.sampling.slots

    # The 256 completions of a step, and not the 500 of an evaluation, decide.
    found = [slots(memory) for memory in (2**30, 80 * 2**20, 40 * 2**20, 2**20)]
    assert found == [256, 256, 128, 16]
    few = replace(config, batch=replace(config.batch, prompts=2, group_size=4))
    assert slots(2**30, few) == 64
    assert slots(None) == 256
    given = replace(config, sampling=replace(config.sampling, max_num_seqs=7))
    assert slots(2**30, given) == 7


@needs_libtpu
@pytest.mark.parametrize(
    ("model", "flags", "size", "line"),
    [
        # A sixteenth of the state, 3.7 GiB of weights and 4 GiB of cache fit four ways, but not
        # with 1.5 GiB of keys twice while the cache grows.
        ("Llama-3.1-8B", [], 8, "data 2 x tensor 8: the fastest that fits, at least 8.4 ms"),
        # Eight ways no chip has two KV heads to pair, and decodes without the kernel.
        ("Llama-3.2-1B", [], 4, "data 4 x tensor 4: the fastest"),
        ("Qwen2.5-0.5B", ["--mesh.data", "16"], "train-mesh", "it gathers no weights"),
        ("Llama-3.1-8B", ["--sampling.tensor-parallel", "4"], 4, "data 4 x tensor 4"),
        ("Llama-3.1-8B", ["--sampling.tensor-parallel", "train-mesh"], "train-mesh", "on the"),
        # Without the train state, half of the chips need to cut weights and cache less.
        (
            "Llama-3.1-8B",
            ["--batch.staleness", "1", "--sampling.devices", "8"],
            8,
            "data 1 x tensor 8, on devices that only sample, the fastest that fits",
        ),
    ],
)
def test_the_fastest_tensor_parallelism_that_fits_is_chosen(model, flags, size, line):
    tensor_parallel, said = chosen([*AT_SCALE, "--model.path", model, *flags])
    assert tensor_parallel == size
    assert said.startswith("decoding: ")
    assert line in said


@needs_libtpu
def test_seven_billion_weights_are_split_for_speed_and_not_for_room():
    flags = [*AT_SCALE, "--model.path", "Qwen2.5-7B"]
    size, line = chosen(flags, CHIPS["v6e"].memory, "v6e:4x4")
    assert size == 4
    assert "at least 3.6 ms" in line


@needs_libtpu
@pytest.mark.parametrize(
    ("size", "copied"), [("4", False), ("train-mesh", True)], ids=["sampling", "training"]
)
def test_the_line_says_if_each_token_copies_experts(size, copied):
    """A training mesh splits the width of experts, which each token gathers."""
    flags = [*AT_SCALE, "--model.path", "Qwen3-30B-A3B", "--sampling.tensor-parallel", size]
    _, line = chosen(flags)
    assert ("copies all experts" in line) == copied


@needs_libtpu
def test_unknown_speed_leaves_the_smallest_that_fits(monkeypatch):
    monkeypatch.setattr(decode_time, "CHIPS", {})
    size, line = chosen([*AT_SCALE, "--model.path", "Llama-3.2-1B"])
    assert (size, "the smallest tensor parallelism that fits" in line) == (1, True)


@needs_libtpu
def test_less_memory_splits_weights_further_and_unknown_memory_not_at_all():
    flags = [*AT_SCALE, "--model.path", "Llama-3.2-3B"]
    assert [chosen(flags, int(gib * 2**30))[0] for gib in (12, 9)] == [4, 8]
    assert "nothing fits" in chosen(flags, 2**30)[1]
    assert chosen(flags, None) == ("train-mesh", "decoding: on the training mesh")
