"""Every program of a run is lowered for CUDA from shapes, on a machine without a GPU.

Whether they compile and how fast they are needs a GPU (docs/reference/attention.md).
"""

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding, PartitionSpec

from tpu_rl import models
from tpu_rl.commands import compose, roles
from tpu_rl.commands import config as configuration
from tpu_rl.commands.plan import plan_steps
from tpu_rl.planner import sampling, steps
from tpu_rl.types import Model

RUN = (
    *("gsm8k_grpo", "--model.path", "Llama-3.1-8B", "--evaluation.rows", "0"),
    *("--sampling.max-prompt-tokens", "3072", "--batch.row-length", "8192"),
    *("--sampling.max-num-seqs", "64", "--algorithm.kl-loss-coef", "0.1"),
    *("--sampling.max-new-tokens", "1024"),
)
"""32 prompts of 3,072 tokens are prefilled at once: the scores of a layer would take 36 GiB."""


def programs(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> dict[str, str]:
    """Return name -> text of the programs of a run on one GPU, with kernels of attention or not."""
    texts: dict[str, str] = {}

    def lower(mesh: Any, function: Any, *arguments: Any) -> steps.Compiled:
        with jax.set_mesh(mesh):
            lowered = function.trace(*arguments).lower(lowering_platforms=("cuda",))
        texts[function.__name__] = lowered.as_text()
        program: Any = SimpleNamespace(output_shardings=NamedSharding(mesh, PartitionSpec()))
        return steps.Compiled(program, "", 0.0)

    fast_model = roles.fast_model

    def on_gpus(config: Any, model: Model, mesh: Any) -> Model:
        model = models.variant(fast_model(config, model, mesh), attention={"cpu_cache": False})
        if not kernel:
            return model
        model = models.with_attention_kernel(model, "cudnn")
        return models.variant(model, attention={"gpu_decode": "triton"})

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(sampling, "compile_step", lower)
    monkeypatch.setattr(plan_steps, "compile_step", lower)
    monkeypatch.setattr(sampling, "compile_step", lower)
    monkeypatch.setattr(plan_steps, "compile_step", lower)
    monkeypatch.setattr(roles, "fast_model", on_gpus)
    with plan_steps.known_by_name(configuration.parse([*RUN])) as config:
        model = plan_steps.read_model(config)
        mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
        planned = plan_steps.plan_stage(config, config.stages[0], mesh, model)
    calls = plan_steps.sampler_calls(planned)
    list(sampling.sampling_steps(calls, planned.state.params))
    list(plan_steps.learning_steps(planned))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False], ids=["kernels", "xla"])
def test_all_programs_are_lowered_for_cuda_without_scores_of_whole_prompts(kernel, monkeypatch):
    texts = programs(monkeypatch, kernel)
    assert texts.keys() == {
        *("prefill", "empty_slots", "decode_segment", "refill", "resize_leaf"),
        *("make_batch", "update"),
    }
    for name in ("prefill", "make_batch", "update"):
        assert ("@__cudnn$fmha" in texts[name]) == kernel, name
    # A decode step has a layer's keys and the scores of all 64 rows, 32 heads and places, or none.
    decoding = texts["decode_segment"]
    assert ('name = "gpu_decode_attention"' in decoding) == kernel
    cache = re.search(r"tensor<32x64x8x(\d+)x128xbf16>", decoding)
    assert cache is not None
    assert bool(re.search(rf"tensor<1x64x8x{cache[1]}x128xbf16>", decoding)) != kernel
    assert bool(re.search(rf"tensor<64x8x4x(1x)?{cache[1]}xf32>", decoding)) != kernel
    # Neither scores nor masks of whole prompts, or of whole rows.
    assert "3072x3072x" not in texts["prefill"]
    assert not any("8192x8192x" in text for text in texts.values())
