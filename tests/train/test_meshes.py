"""Every mesh gives what one device gives: a set of cases in which every two of family, algorithm
and mesh axes meet."""

import itertools
import json
import subprocess
import sys

import pytest

from tests.fixtures import several
from tpu_rl.train.sharding import MESH_AXES

PAIRWISE = [
    "llama3/sft/tensor=2,context=2",
    "llama3/grpo/data=2,fsdp=2",
    "llama3/ppo/data=2,context=2",
    "llama3/dpo/fsdp=2",
    "llama3/gkd/fsdp=2,context=2",
    "llama3/q_sharp/data=2,expert=2",
    "gemma2/sft/data=2,fsdp=2",
    "gemma2/grpo/fsdp=2,context=2",
    "gemma2/ppo/tensor=2",
    "gemma2/dpo/tensor=2,expert=2",
    "gemma2/gkd/tensor=2,context=2",
    "gemma2/q_sharp/data=2,tensor=2",
    "gemma3/sft/data=2,tensor=2",
    "gemma3/grpo/tensor=2,expert=2",
    "gemma3/ppo/fsdp=2,expert=2",
    "gemma3/dpo/data=2,context=2",
    "gemma3/gkd/expert=2,context=2",
    "gemma3/q_sharp/fsdp=2,expert=2",
    "olmoe/sft/expert=2",
    "olmoe/grpo/fsdp=2,tensor=2",
    "olmoe/ppo/data=2,expert=2",
    "olmoe/dpo/fsdp=2,tensor=2",
    "olmoe/gkd/data=2",
    "olmoe/q_sharp/expert=2,context=2",
]
"""family/algorithm/axes; families of `test_models`, algorithms of the battery in `test_algos`."""


def test_every_two_of_family_algorithm_and_axes_meet():
    families, algorithms, axes = ({each.split("/")[i] for each in PAIRWISE} for i in range(3))
    assert {tuple(each.split("/")[:2]) for each in PAIRWISE} == {
        *itertools.product(families, algorithms)
    }
    axes = [{part.partition("=")[0] for part in each.split("/")[2].split(",")} for each in PAIRWISE]
    for i, every in enumerate((families, algorithms)):
        met = {
            (each.split("/")[i], axis)
            for each, of_case in zip(PAIRWISE, axes, strict=True)
            for axis in of_case
        }
        assert met == {*itertools.product(every, MESH_AXES)}
    assert {frozenset(of_case) for of_case in axes if len(of_case) == 2} == {
        frozenset(two) for two in itertools.combinations(MESH_AXES, 2)
    }


def require_equal(devices: int, cases: list[str]) -> None:
    env = several.virtual_devices(devices)
    command = [sys.executable, "-m", "tests.fixtures.on_meshes", *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["case"] for each in found] == cases
    for each in found:
        assert max(each[part] for part in ("metrics", "gradients", "params")) <= 1e-5, each
        assert each["samples"], each


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["sft", "grpo", "ppo", "dpo", "gkd", "q_sharp"])
def test_two_and_four_devices_equal_one(algorithm):
    require_equal(4, [case for case in PAIRWISE if f"/{algorithm}/" in case])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_eight_devices_equal_one():
    """Phi-3 has partial rotary embeddings, Gemma 4 wider heads in full layers, its small models
    reused keys and inputs of layers, gpt-oss sinks and biased experts, DeepSeek-V3 latent attention
    and shared experts, Qwen3-Next recurrent states.
    """
    cases = [
        "olmoe/grpo/fsdp=2,expert=2,context=2",
        "phi3/grpo/data=2,fsdp=2,tensor=2",
        "gemma4_moe/grpo/fsdp=2,tensor=2,context=2",
        "gemma4_small/grpo/fsdp=2,tensor=2,context=2",
        "gpt_oss/grpo/fsdp=2,tensor=2,expert=2",
        "deepseek_v3/grpo/fsdp=2,tensor=2,expert=2",
        "qwen3_next/grpo/fsdp=2,tensor=2,expert=2",
    ]
    require_equal(8, cases)
