"""Plans agree with the runs that they plan: the same state, the same steps, the same memory.

Where the TPU compiler is installed, every preset compiles for a TPU.
"""

import json
import logging
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from huggingface_hub import constants

from tests.fixtures.topologies import needs_gpu_compiler, needs_libtpu, tpu_devices
from tpu_rl import models, sampler
from tpu_rl.commands import compose, roles, run
from tpu_rl.commands import config as configuration
from tpu_rl.commands.checks import preflight
from tpu_rl.commands.config import MeshConfig
from tpu_rl.commands.plan import known_models, plan, plan_search, plan_steps
from tpu_rl.cost_model import CHIPS, GPUS
from tpu_rl.cost_model.cards import CARDS
from tpu_rl.errors import InputError, MachineError
from tpu_rl.planner import estimates, memory, sampling, steps
from tpu_rl.runtime import compilations
from tpu_rl.sampler import slots
from tpu_rl.train import optimizers

SMALL = (
    "--batch.prompts",
    "4",
    "--batch.group-size",
    "2",
    "--evaluation.rows",
    "0",
    "--batch.micro-batch-rows",
    "2",
    "--steps",
    "4",
)
"""Flags with which an arithmetic preset compiles in seconds."""

PARAMETERS = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.3-70B": 70_553_706_496,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Mixtral-8x7B": 46_702_792_704,
    "OLMoE-1B-7B": 6_919_161_856,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-1B": 999_885_952,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Gemma-3-4B": 3_880_263_168,
    "Gemma-3-12B": 11_766_034_176,
    "Gemma-3-27B": 27_009_346_304,
    "Gemma-4-E2B": 4_628_569_379,
    "Gemma-4-E4B": 7_463_013_418,
    "Gemma-4-12B": 11_907_350_320,
    "Gemma-4-31B": 30_697_345_340,
    "Gemma-4-26B-A4B": 25_233_141_790,
    "SmolLM3-3B": 3_075_098_624,
    "OLMo-2-0425-1B": 1_484_916_736,
    "OLMo-2-1124-7B": 7_298_617_344,
    "OLMo-2-1124-13B": 13_716_198_400,
    "OLMo-2-0325-32B": 32_234_279_936,
    "Olmo-3-7B": 7_298_011_136,
    "Olmo-3-32B": 32_233_522_176,
    "Phi-4": 14_659_507_200,
    "Phi-4-mini": 3_836_021_760,
    "GLM-4-9B-0414": 9_400_279_040,
    "GLM-4-32B-0414": 33_142_249_472,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "DeepSeek-V3": 671_026_419_200,
    "Moonlight-16B-A3B": 15_960_110_208,
    "Granite-3.3-2B": 2_533_539_840,
    "Granite-3.3-8B": 8_170_864_640,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-35B-A3B": 34_660_610_688,
}
"""Parameters of each checkpoint; of Gemma 3 and 4 and Qwen3.5 without the vision tower, and
of DeepSeek-V3 with the correction biases. Modules for several tokens at once are left out."""


def local_target(memory: int | None = None) -> estimates.Target:
    return estimates.Target("local", jax.devices()[:1], None, memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_the_parameter_counts_of_their_checkpoints(name):
    model = models.from_config(known_models.SHAPES[name])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[name]


def test_a_gemma_3_has_the_parameters_of_its_checkpoint_with_the_tower():
    model = models.from_config(known_models.SHAPES["Gemma-3-4B"], images=True)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 4_300_079_472


@pytest.mark.parametrize(
    ("name", "weights", "measured"),
    [("Gemma-4-E2B", 4_797_113_600, 35 + 16 * 28), ("Gemma-4-31B", 31_273_086_512, 60 + 2 * 1152)],
)
def test_a_gemma_4_has_the_parameters_of_transformers_with_the_tower(name, weights, measured):
    """Numbers that do not train are no parameters there: one of each layer of the text, and of each
    layer of the tower, or bias and gain of features."""
    model = models.from_config(known_models.SHAPES[name], images=True)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == weights + measured


def test_known_models_are_found_by_hub_id():
    assert (
        known_models.find("meta-llama/Llama-3.1-8B-Instruct") is known_models.SHAPES["Llama-3.1-8B"]
    )
    assert known_models.find("google/gemma-2-2b-it") is known_models.SHAPES["Gemma-2-2B"]
    assert known_models.find("builtin:arithmetic") is None
    assert known_models.SHAPES.keys() == PARAMETERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["arithmetic_ppo"],
        ["arithmetic_dpo"],
        ["arithmetic_grpo", "--model.lora.rank", "2"],
        ["arithmetic_grpo", "--model.dtype", "bfloat16", "--algorithm.kl-loss-coef", "0.1"],
    ],
)
def test_planned_state_has_the_shapes_and_dtypes_of_the_run(flags, tmp_path):
    config = configuration.parse([*flags, *SMALL])
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        context, params = compose.make_context(config, tmp_path, mesh)
        stage = config.stages[-1]
        algorithm = compose.build_algorithm(context, stage)
        state, _ = compose.learner(context, stage, algorithm, params)
    planned = plan_steps.plan_stage(config, stage, mesh, plan_steps.read_model(config))

    def shape_and_dtype(leaf):
        return leaf.shape, leaf.dtype

    assert jax.tree.map(shape_and_dtype, planned.state) == jax.tree.map(shape_and_dtype, state)


Q_ROUND = ("--phases.0.algorithm.q-model", "Qwen2.5-0.5B", "--algorithm.q-model", "Qwen2.5-0.5B")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "role"),
    [
        (["arithmetic_grpo", "--model.path", "Qwen2.5-0.5B"], "policy"),
        (["arithmetic_gkd", "--algorithm.teacher", "Qwen/Qwen2.5-0.5B-Instruct"], "teacher"),
        (
            [
                "arithmetic_ppo",
                "--algorithm.critic.trunk",
                "own",
                "--algorithm.critic.model",
                "Qwen2.5-0.5B",
            ],
            "value",
        ),
        (["arithmetic_q_sharp", *Q_ROUND], "q"),
        (
            [
                "arithmetic_grpo",
                "--sampling.speculation.model",
                "qwen2.5-0.5b",
                "--sampling.speculation.tokens",
                "4",
            ],
            "draft",
        ),
    ],
)
def test_only_plans_accept_model_names_without_weights(flags, role, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    given = configuration.parse(flags)
    with plan_steps.known_by_name(given) as config:
        shapes = roles.param_shapes(config, plan_steps.read_model(config))
    assert shapes[role]["embedding"].shape == (151_936, 896)
    with pytest.raises(InputError, match="neither a directory nor a model"):
        preflight.find_models(given)


@pytest.mark.slow
def test_plan_covers_every_step_of_a_run():
    config = configuration.parse(["arithmetic_grpo", *SMALL, "--algorithm.kl-loss-coef", "0.1"])
    target = local_target(memory=2**30)
    made = plan_search.make_plan(config, target, plan_steps.read_model(config))
    names = [line.step.name.partition(",")[0] for _, line in made.lines]
    assert names[0] == "prefill"
    assert names[-2:] == ["make_batch", "update"]
    assert names.count("decode") == 1
    assert made.fits(target)
    parts = made.lines[-1][1].memory.parts
    count = sum(
        leaf.size
        for leaf in jax.tree.leaves(
            jax.eval_shape(plan_steps.read_model(config).init, jax.random.key(0))
        )
    )
    assert parts["parameters"] == parts["frozen"] == 4 * count
    assert parts["optimizer"] == pytest.approx(8 * count, rel=1e-3)
    # Two forward passes and one backward pass at double cost. Attention covers between a part of
    # each row and all of it; the unembedding sees between the actions and all tokens.
    decoder = plan_steps.read_model(config).config
    update = made.lines[-1][1]
    attention = decoder.attention
    tokens = update.step.tokens
    layers = 8 * (estimates.matmul_weights(decoder) - decoder.hidden_size * decoder.vocab.size)
    whole_rows = (
        16
        * attention.num_heads
        * attention.head_dim
        * config.batch.row_length
        * len(decoder.layer_types)
    )
    most = layers + 8 * decoder.hidden_size * decoder.vocab.size + whole_rows
    assert layers * tokens < update.flops < 1.05 * most * tokens


EVERY_PROGRAM = (
    *("arithmetic_grpo", "--algorithm.kl-loss-coef", "0.1", "--evaluation.rows", "12"),
    *("--batch.prompts", "4", "--batch.group-size", "2", "--batch.micro-batch-rows", "2"),
    *("--sampling.max-num-seqs", "4", "--sampling.host-sync-steps", "4", "--steps", "1"),
)
"""More rows than slots, and evaluations with more prompts than a step has."""


@pytest.mark.nightly
def test_a_run_compiles_no_program_that_is_larger_than_planned(tmp_path, monkeypatch, caplog):
    """Programs that the plan does not name move single arrays, or only read the train state."""
    segments = partial(sampler.SegmentConfig, initial_cache_tokens=6, min_slots_per_device=2)
    monkeypatch.setattr(sampler, "SegmentConfig", segments)
    config = configuration.parse([*EVERY_PROGRAM, "--run-dir", str(tmp_path / "run")])
    planned: dict[str, int] = {}

    def compile_and_note(mesh, function, *arguments):
        compiled = steps.compile_step(mesh, function, *arguments)
        name = f"jit({function.__name__})"
        arrays = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
        planned[name] = max(planned.get(name, 0), steps.chip_bytes(arrays))
        return compiled

    monkeypatch.setattr(sampling, "compile_step", compile_and_note)
    monkeypatch.setattr(plan_steps, "compile_step", compile_and_note)
    plan_search.make_plan(config, local_target(), plan_steps.read_model(config))
    del planned["jit(empty_slots)"]  # It is no step of the plan.
    assert planned.keys() == {
        f"jit({name})"
        for name in (
            *("prefill", "refill", "resize_leaf", "decode_segment", "make_batch", "update"),
        )
    }
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    stage = plan_steps.plan_stage(config, config.stages[0], mesh, plan_steps.read_model(config))
    largest_leaf = max(map(steps.chip_bytes, jax.tree.leaves(stage.state.params)))

    jax.clear_caches()
    caplog.set_level(logging.DEBUG, compilations.LOGGER)
    assert run.main([*EVERY_PROGRAM, "--run-dir", str(tmp_path / "run")]) == 0
    compiled: dict[str, int] = {}
    for record in caplog.records:
        if str(record.msg).startswith(compilations.MESSAGE):
            name, avals = str(record.args[0]), record.args[1]
            size = sum(aval.size * aval.dtype.itemsize for aval in avals)
            compiled[name] = max(compiled.get(name, 0), size)
    assert planned.keys() <= compiled.keys()
    for name, size in compiled.items():
        if name in planned:
            assert size <= planned[name], name
        elif name not in plan_steps.READS_STATE:
            assert size <= 2 * largest_leaf + 2**14, name


@pytest.mark.nightly
def test_evaluations_that_need_more_than_a_step_are_planned():
    """Twelve problems at once need a larger pool than four prompts."""
    config = configuration.parse(EVERY_PROGRAM)
    config = replace(config, sampling=replace(config.sampling, max_num_seqs=32))
    model = plan_steps.read_model(config)
    made = plan_search.make_plan(config, local_target(), model, ("sampling",))
    steps_by_name = {line.step.name: line.step for _, line in made.lines}
    step, evaluation = steps_by_name["prefill"], steps_by_name["prefill of evaluations"]
    assert evaluation.tokens == 3 * step.tokens
    assert evaluation.times == 0
    assert evaluation.argument_bytes["cache"] > step.argument_bytes["cache"]
    # Four problems need no more than the four prompts of a step, of which each is sampled twice.
    config = replace(config, evaluation=replace(config.evaluation, rows=4))
    made = plan_search.make_plan(config, local_target(), model, ("sampling",))
    assert not any("evaluations" in line.step.name for _, line in made.lines)


@pytest.mark.nightly
def test_partial_completions_are_prefilled_in_their_own_length():
    config = configuration.parse(["arithmetic_grpo", *SMALL, "--rollout.partial", "2"])
    made = plan_search.make_plan(
        config, local_target(memory=2**30), plan_steps.read_model(config), ("sampling",)
    )
    planned = {line.step.name: line.step for _, line in made.lines}
    prompts = planned["prefill"]
    partial = planned["prefill, partial completions"]
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    assert partial.tokens % longest == 0
    assert partial.tokens <= max(prompts.tokens, longest)
    assert partial.times * partial.tokens == 2 * config.batch.group_size * longest


def a_line() -> estimates.Line:
    """An update that the compiler refused and that takes one second."""
    mesh = jax.make_mesh((1,), ("data",))
    step = steps.Step("update", steps.Compiled(None, "", 0.0), {}, 1.0, 1, mesh)
    parts = {"parameters": 4, "optimizer": 8, "temporaries": 100}
    return estimates.Line(step, memory.Memory(parts, []), None, 0.0, 1.0, None)


def test_seconds_of_a_plan_are_those_of_the_last_stage(monkeypatch):
    config = configuration.parse(["arithmetic_q_sharp", *SMALL[:-2]])
    assert len({type(stage.algorithm) for stage in config.stages}) < len(config.stages)
    monkeypatch.setattr(plan_search, "_stage_lines", lambda *_: iter([a_line()]))
    assert plan_search.make_plan(config, local_target(), plan_steps.read_model(config)).seconds == 1


@needs_libtpu
def test_each_side_is_planned_as_a_topology_of_its_own():
    """The compiler takes no part of one."""
    target = plan.find_target("v5e:4x4")
    learning, sampling = target.split(target.devices, 4)
    assert [len(learning), len(sampling)] == [12, 4]
    assert {tuple(device.coords) for device in sampling} == {(0, y, 0) for y in range(4)}
    assert not set(learning) & set(sampling)
    again = target.split(target.devices, 4)
    assert all(one is other for one, other in zip(sampling, again[1], strict=True))
    with pytest.raises(InputError, match="whole planes"):
        target.split(target.devices, 6)


def test_devices_that_only_sample_work_beside_the_others():
    """The step takes as long as the longer half."""
    update = a_line()
    apart = SimpleNamespace(devices=np.array(["another device"]))
    decode = update._replace(step=update.step._replace(mesh=apart, times=3.0))
    made = estimates.Plan({}, 1, [("grpo", decode), ("grpo", update)])
    assert made.seconds == 3.0
    assert made.side_seconds() == [3.0, 1.0]
    together = update._replace(step=update.step._replace(times=3.0))
    assert estimates.Plan({}, 1, [("grpo", together), ("grpo", update)]).seconds == 4.0


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion", "sgd"])
def test_a_plan_counts_the_state_of_any_optimizer(name):
    config = configuration.parse(["arithmetic_grpo", *SMALL, "--optimizer.name", name])
    base = plan_steps.read_model(config)
    mesh = compose.make_mesh(MeshConfig())
    planned = plan_steps.plan_stage(config, config.stages[0], mesh, base)
    params = roles.param_shapes(config, base)["policy"]
    size = optimizers.state_bytes(config.optimizer, params, models.matrix_axes)
    assert plan_steps.state_bytes(planned)["optimizer"] == size
    offloaded = replace(config, optimizer=replace(config.optimizer, offload=True))
    planned = plan_steps.plan_stage(offloaded, config.stages[0], mesh, base)
    on_host = steps.chip_bytes(planned.state.opt_state, on_host=True)
    assert size - 16 <= on_host < size  # The counters stay.


@pytest.mark.nightly
def test_q_sharp_samples_once_per_stage():
    """The first stage rolls in with the reference alone. Roll-outs continue a prompt with its
    roll-in, and have half of the maximum length on average."""
    config = configuration.parse(["arithmetic_q_sharp", *SMALL[:-2]])
    made = plan_search.make_plan(
        config, local_target(), plan_steps.read_model(config), ("sampling",)
    )
    first, second = (
        {line.step.name: line.step for stage, line in made.lines if stage.startswith(number)}
        for number in "12"
    )
    assert first.keys() == second.keys()
    stage = config.stages[0]
    max_new_tokens = config.sampling.max_new_tokens
    max_prompt_tokens = config.sampling.max_prompt_tokens
    prompts = stage.algorithm.prompts
    completions = prompts * config.batch.group_size
    run_steps = stage.last - stage.first + 1
    cases = (
        (" of roll-ins", prompts, max_prompt_tokens, 1),
        (" of roll-outs", completions, max_prompt_tokens + max_new_tokens, 0.5),
    )
    for name, texts, length, mean_share in cases:
        prefill = first[f"prefill{name}"]
        decode = first[f"decode{name}, cache of {length + max_new_tokens:,}"]
        assert prefill.times * prefill.tokens * run_steps == pytest.approx(texts * length)
        new_tokens = mean_share * completions * max_new_tokens / run_steps
        assert decode.times * decode.tokens == pytest.approx(new_tokens)
    alone, guided = (
        part["prefill of roll-ins"].argument_bytes["cache"] for part in (first, second)
    )
    assert guided > alone  # The role "q" has a cache too.


def test_a_cache_larger_than_memory_makes_decoding_not_fit(monkeypatch):
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = local_target()
    refused = steps.Compiled(None, "RESOURCE_EXHAUSTED", 0.0)

    def compile_or_refuse(mesh, function, *arguments):
        is_cache = function is slots.empty_slots
        return refused if is_cache else steps.compile_step(mesh, function, *arguments)

    monkeypatch.setattr(sampling, "compile_step", compile_or_refuse)
    made = plan_search.make_plan(config, target, plan_steps.read_model(config), ("sampling",))
    names = [line.step.name.partition(",")[0] for _, line in made.lines]
    assert names == ["prefill", "decode"]
    assert not made.fits(target)


def test_matmul_weights_of_a_mixture_count_the_active_experts():
    mixture = models.from_config(known_models.SHAPES["Qwen3-30B-A3B"]).config
    # The embedding is looked up, which is no matrix product.
    active = estimates.matmul_weights(mixture) + mixture.hidden_size * mixture.vocab.size
    assert active == pytest.approx(3.35e9, rel=0.01)  # "A3B": 3.3 billion active parameters


def test_model_flops_are_six_times_the_weights_plus_causal_attention():
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    planned = plan_steps.plan_stage(config, config.stages[-1], mesh, plan_steps.read_model(config))
    decoder = planned.context.models["policy"].config
    prompt, new = config.sampling.max_prompt_tokens, config.sampling.max_new_tokens
    prompts, group = config.batch.prompts, config.batch.group_size
    tokens = prompts * (prompt + group * new)  # Each prompt once: a row holds the whole group.
    seen = prompts * (prompt * (prompt + 1) / 2 + group * sum(prompt + i + 1 for i in range(new)))
    attention = (
        3
        * 4
        * decoder.attention.num_heads
        * decoder.attention.head_dim
        * len(decoder.layer_types)
        * seen
    )
    weights = estimates.matmul_weights(decoder)
    layout, _ = plan_steps.full_experience(planned)
    flops = plan_steps.update_model_flops(planned, layout)
    assert flops == pytest.approx(6 * weights * tokens + attention)


@pytest.mark.slow
def test_flops_of_linear_attention_do_not_grow_with_the_position():
    config = models.from_config(known_models.SHAPES["Qwen3.5-9B"]).config
    first, second = (
        estimates.attention_flops(config, np.array([position])) for position in (0, 999)
    )
    per_key = 4 * 16 * 256 * 8  # heads, their elements, and layers with attention
    assert second - first == 999 * per_key
    assert first - per_key == 6 * 32 * 128 * 128 * 24


def test_memory_errors_of_the_compiler_are_parsed():
    message = """\
RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.18G of 15.75G hbm.

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(update)/while/body/dot_general"
     Shape: f32[128256,4096]{1,0}
     Unpadded size: 4.00G
"""
    assert memory.refused_arrays(message) == [
        (4 * 2**30, "f32[128256,4096] while/body/dot_general")
    ]
    assert memory._bytes_beyond(message, 2**34) == int(18.18 * 2**30) - 2**34
    message = "total memory required for HLO temporaries (770.00G) exceeds available HBM (15.75G)"
    assert memory._bytes_beyond(message, 0) == 770 * 2**30


def test_candidate_meshes_use_all_devices_and_divide_the_rows():
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = estimates.Target("eight", jax.devices() * 8, None, None)
    tried = list(plan_search.candidates(config, target, plan_steps.read_model(config)))
    assert {c.mesh.data * c.mesh.fsdp * c.mesh.tensor * c.mesh.expert for c in tried} == {8}
    assert all(c.batch.micro_batch_rows % (c.mesh.data * c.mesh.fsdp) == 0 for c in tried)


def test_a_mesh_that_does_not_fit_is_not_tried_with_more_rows(monkeypatch):
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = estimates.Target("eight", jax.devices() * 8, None, None)
    tried = []

    def make_plan(config, target, model, parts):
        tried.append(config)
        return estimates.Plan(asdict(config.mesh), config.batch.micro_batch_rows, [])

    monkeypatch.setattr(plan_search, "make_plan", make_plan)
    monkeypatch.setattr(estimates.Plan, "fits", lambda plan, target: False)
    model = plan_steps.read_model(config)
    assert plan_search.search(config, target, model, lambda line: None) is None
    assert len(tried) == len({candidate.mesh for candidate in tried}) > 1


def test_tensor_parallelism_stops_growing_once_it_is_slower(monkeypatch):
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = estimates.Target("eight", jax.devices() * 8, None, None)
    seconds = {1: 3.0, 2: 2.0, 4: 5.0, 8: 1.0}
    meshes = [MeshConfig(1, 8 // tensor, tensor, 1, 1) for tensor in seconds]
    compiled = []

    def make_plan(config, target, model, parts):
        if parts == ("learning",):
            compiled.append(config.mesh.tensor)
        return estimates.Plan(asdict(config.mesh), config.batch.micro_batch_rows, [])

    def candidates(*_):
        return (replace(config, mesh=mesh) for mesh in meshes)

    monkeypatch.setattr(plan_search, "candidates", candidates)
    monkeypatch.setattr(plan_search, "make_plan", make_plan)
    monkeypatch.setattr(estimates.Plan, "fits", lambda plan, target: True)
    monkeypatch.setattr(
        estimates.Plan, "seconds", property(lambda plan: seconds[plan.mesh["tensor"]])
    )
    best = plan_search.search(config, target, plan_steps.read_model(config), lambda line: None)
    assert best is not None
    assert best.config.mesh.tensor == 2
    # The last ones with matrix products kept, and with a barrier behind gradients.
    assert compiled == [1, 2, 4, 2, 2]


# --- the command ---


@pytest.mark.slow
def test_command_prints_tables_and_writes_json(monkeypatch, tmp_path, capsys):
    # The command sets it.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    flags = (*SMALL, "--sampling.max-new-tokens", "8", "--json", str(tmp_path / "plan.json"))
    command = ["arithmetic_sft", "--topology", "cpu", "--batch.group-size", "1"]
    assert plan.main([*command, *flags[:2], *flags[4:]]) == 0
    assert "update" in capsys.readouterr().out
    planned = json.loads((tmp_path / "plan.json").read_text())
    assert [step["step"] for step in planned["steps"]] == ["make_batch", "update"]
    assert planned["steps"][1]["flops"] > 0
    assert planned["steps"][1]["bytes"]["temporaries"] > 0


def test_a_name_like_a_well_known_one_is_corrected(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    config = configuration.parse(["arithmetic_grpo", "--model.path", "Llama-3.1-7B"])
    with pytest.raises(InputError, match=r"known by name: Llama-3\.1-70B, Llama-3\.1-8B"):
        plan_steps.read_model(config)
    assert known_models.nearest("meta-llama/Meta-Llama-3.1-8B")[0] == "Llama-3.1-8B"
    assert not known_models.nearest("gpt-5")


def test_search_requires_a_chip_of_known_speed():
    with pytest.raises(InputError, match="rates of these devices are not known"):
        plan.run(*plan.parse(["arithmetic_grpo", "--topology", "cpu", "--search"]))


def test_bad_topologies_and_a_missing_compiler_are_reported(monkeypatch):
    flags, _ = plan.parse(["arithmetic_grpo", "--topology", "v9:2x2"])
    with pytest.raises(InputError, match="no such topology"):
        plan.prepare(flags)
    flags, _ = plan.parse(["arithmetic_grpo", "--topology", "cpu", "--slices", "2"])
    with pytest.raises(InputError, match="slices does not go with topology cpu"):
        plan.prepare(flags)
    flags, others = plan.parse(
        ["gsm8k_grpo", "--topology", "v5e:4x4", "--model.path", "Llama-3.1-8B"]
    )
    assert others == ["gsm8k_grpo", "--model.path", "Llama-3.1-8B"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"jax\[tpu\]==") as error:
        plan.prepare(flags)
    assert error.value.code == 3


def test_a_plan_for_a_gpu_needs_its_compiler_and_no_topology(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags, _ = plan.parse(["gsm8k_lora", "--gpu", "t4"])
    with pytest.raises(MachineError, match="compiler for NVIDIA GPUs") as error:
        plan.prepare(flags)
    assert f"jax-cuda12-plugin=={jax.__version__}" in error.value.fix
    flags, _ = plan.parse(["gsm8k_lora", "--gpu", "t4", "--topology", "v5e:1x1"])
    with pytest.raises(InputError, match="gpu does not go with topology"):
        plan.prepare(flags)
    assert {card.kind for card in CARDS.values()} <= set(GPUS)


@needs_gpu_compiler
@pytest.mark.slow
def test_plan_for_a_t4(capsys):
    """It has no bfloat16 and no kernels, so that an update in float32 is bound by its products."""
    small = ["--batch.prompts", "8", "--sampling.max-new-tokens", "64", "--evaluation.rows", "0"]
    flags, others = plan.parse(
        ["gsm8k_lora", "--model.path", "builtin:gsm8k_scratch", "--gpu", "t4", *small]
    )
    plan.prepare(flags)
    assert plan.run(flags, others) == 0
    shown = capsys.readouterr()
    assert "Tesla T4 has no bfloat16: float32 (--model.dtype), XLA's attention" in shown.err
    assert "Tesla T4 (by its description, an estimate): 1 devices, 11.25 GiB each" in shown.out
    assert "update" in shown.out


# --- the TPU compiler ---

MODELS = {
    "code": "builtin:gsm8k_scratch",
    "gsm8k": "builtin:gsm8k_scratch",
    "mini_shell": "builtin:mini_shell",
    "pictures": "builtin:pictures",
    "reasoning_gym": "builtin:gsm8k_scratch",
    "search": "builtin:search",
    "star_graph": "builtin:star_graph",
}
"""Prefix of a preset -> a model to plan it with, for presets that bring none."""


@pytest.fixture(scope="module")
def seen() -> dict[str, steps.Compiled]:
    """Lowered program -> compiled program. Presets share many."""
    return {}


PER_CHANGE = {
    "arithmetic_sft", "arithmetic_rft", "arithmetic_grpo", "arithmetic_dpo", "arithmetic_gkd",
    "arithmetic_vapo", "arithmetic_reward_model", "arithmetic_process_reward",
    "arithmetic_q_sharp", "scored_completions",
}  # fmt: skip
"""Presets that are compiled for v5e on every change. The others, and v5p, are nightly."""


def sources_of(preset: str) -> set[str]:
    return {stage.algorithm.experience.source for stage in configuration.preset(preset).stages}


def test_a_preset_of_every_source_of_rows_is_compiled_on_every_change():
    compiled = {source for preset in PER_CHANGE for source in sources_of(preset)}
    every = {source for preset in configuration.preset_names() for source in sources_of(preset)}
    assert compiled == every


FEW_SLOTS = 64
"""Slots with which presets are compiled on every change: the compiler's time for the scatter of
prompts into narrow caches grows with their tokens, to 17 s for 512 prompts of 88."""


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("name", configuration.preset_names())
def test_presets_compile_for_a_tpu(topology, name, seen, monkeypatch):
    check_preset(name, topology, seen, monkeypatch)


@needs_libtpu
@pytest.mark.parametrize("name", sorted(PER_CHANGE))
def test_presets_compile_for_a_tpu_with_few_slots(name, seen, monkeypatch):
    check_preset(name, "v5e:2x2", seen, monkeypatch, FEW_SLOTS)


def check_preset(
    name: str,
    topology: str,
    seen: dict[str, steps.Compiled],
    monkeypatch: pytest.MonkeyPatch,
    slots: int | None = None,
) -> None:
    """Compile a preset's steps for a topology, with its own number of slots or another."""
    chip = CHIPS[topology.partition(":")[0]]

    def compile_once(mesh, function, *arguments):
        lowered = steps.lower(mesh, function, *arguments)
        text = topology + lowered.as_text()
        if text not in seen:
            seen[text] = steps.compile_lowered(lowered)
        return seen[text]

    config = configuration.preset(name)
    # Their answers would be compiled once more for each preset, only for other sizes.
    config = replace(config, evaluation=replace(config.evaluation, rows=0))
    if slots is not None:
        config = replace(config, sampling=replace(config.sampling, max_num_seqs=slots))
    default = "gsm8k" if config.model.path is None else None
    kind = next((kind for kind in MODELS if name.startswith(kind)), default)
    if kind and not str(config.model.path).startswith("builtin:"):
        config = replace(config, model=replace(config.model, path=MODELS[kind]))
    # Teachers come from other runs; the built-in model has the same shape.
    teachers = [
        name
        for name, value in asdict(config.algorithm).items()
        if name in ("teacher", "teacher_reverse") and value is not None
    ]
    config = replace(
        config, algorithm=replace(config.algorithm, **dict.fromkeys(teachers, "builtin:arithmetic"))
    )
    target = estimates.Target(topology, tpu_devices(topology), chip, chip.memory)
    # Runs use the default precision. With "highest", as in the other tests, a float32 product takes
    # a TPU six passes, and compiling takes as much longer.
    monkeypatch.setattr(sampling, "compile_step", compile_once)
    monkeypatch.setattr(plan_steps, "compile_step", compile_once)
    with jax.default_matmul_precision("default"):
        made = plan_search.make_plan(config, target, plan_steps.read_model(config))
    assert made.fits(target), [
        (line.step.name, line.step.compiled.memory_error[:300]) for _, line in made.lines
    ]
    assert all(line.estimate and line.estimate.seconds > 0 for _, line in made.lines)
    names = {line.step.name.partition(" of ")[0] for _, line in made.lines}
    if any(plan_steps.samples(stage) for stage in config.stages):
        assert {"prefill", "update"} <= names
        assert ("tower" in names) == name.startswith("pictures")


READING = [
    ("Qwen/Qwen2.5-VL-3B-Instruct", (), "v5e:2x4"),
    ("google/gemma-3-4b-it", ("--model.images",), "v5p:2x2x1"),
]
"""On v5e:2x4 the update of the second does not fit, and on v5p:2x2x1 that of the first ends libtpu
0.0.42.1 with a failed check of its own."""


@needs_libtpu
@pytest.mark.nightly
@pytest.mark.parametrize(("model", "flags", "topology"), READING, ids=["qwen", "gemma"])
def test_models_that_read_images_compile_for_a_tpu(model, flags, topology):
    """The table of docs/benchmarks/images.md is of the same flags."""
    config = configuration.parse(
        ["grpo", "--model.path", model, *flags, "--model.dtype", "bfloat16", "--reward", "math"]
        + ["--sampling.max-prompt-tokens", "1024", "--sampling.max-new-tokens", "1024"]
        + ["--batch.row-length", "4096", "--batch.micro-batch-rows", "8", "--evaluation.rows", "0"]
    )
    chip = CHIPS[topology.partition(":")[0]]
    target = estimates.Target(topology, tpu_devices(topology), chip, chip.memory)
    with (
        jax.default_matmul_precision("default"),
        plan_steps.known_by_name(config) as known,
    ):
        made = plan_search.make_plan(known, target, plan_steps.read_model(known))
    assert made.fits(target)
    names = {line.step.name.partition(",")[0] for _, line in made.lines}
    assert {"tower", "prefill", "decode", "make_batch", "update"} <= names


@pytest.mark.parametrize(
    ("measured", "bound", "cycles"), [(11.85, 12.58, 25.7), (19.9, 21.5, 37.6)], ids=["8", "128"]
)
def test_decode_steps_are_expected_as_published(measured, bound, cycles):
    """Llama-3.1-70B in int8 on v5e:4x4, rows by rows (docs/benchmarks/scaling.md), in ms."""
    assert estimates.decode_seconds(bound, cycles) == pytest.approx(measured, rel=0.1)
    assert cycles > 1.8 * measured
