"""Plans against what they plan: the same state, the same steps, the same memory; and every preset through the TPU's
compiler where it is installed."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax
import pytest
from huggingface_hub import constants

from launch import build, model_shapes, plan, preflight, roles
from launch import config as configuration
from launch.config import MeshConfig
from launch.planning import figures, memory, sampling, search, steps
from tests.topologies import needs_libtpu, tpu_devices
from tpu_rl import models
from tpu_rl.compiled import CHIPS
from tpu_rl.errors import InputError, MachineError

SMALL = ("--batch.prompts", "4", "--batch.completions", "2", "--batch.micro-batch-rows", "2", "--steps", "4")
"""Of a preset of arithmetic, to be compiled in seconds."""

PARAMETERS = {
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-3-1B": 999_885_952,
    "Gemma-3-12B": 11_766_034_176,
}
"""As their checkpoints have them; of Gemma 3 without what reads images."""


def here(**memory_of_a_device: int) -> figures.Target:
    return figures.Target("here", jax.devices()[:1], None, memory_of_a_device.get("memory"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_named_shapes_have_as_many_parameters_as_the_models(name):
    model = models.from_config(model_shapes.SHAPES[name])
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[name]


def test_shapes_are_found_however_they_are_spelt():
    assert model_shapes.find("meta-llama/Llama-3.1-8B-Instruct") is model_shapes.SHAPES["Llama-3.1-8B"]
    assert model_shapes.find("google/gemma-2-2b-it") is model_shapes.SHAPES["Gemma-2-2B"]
    assert model_shapes.find("builtin:arithmetic") is None
    assert model_shapes.SHAPES.keys() == PARAMETERS.keys()


@pytest.mark.parametrize(
    "flags",
    [
        ["arithmetic_ppo"],
        ["arithmetic_dpo"],
        ["arithmetic_grpo", "--model.lora.rank", "2"],
        ["arithmetic_grpo", "--model.dtype", "bfloat16", "--algorithm.kl-loss-coef", "0.1"],
    ],
)
def test_the_planned_state_is_the_run_s(flags, tmp_path):
    config = configuration.parse([*flags, *SMALL])
    mesh = build.make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        setup, params = build.make_setup(config, tmp_path, mesh)
        stage = config.stages[-1]
        state, _ = build.learner(setup, stage, build.build_algorithm(setup, stage), params)
    planned = steps.plan_stage(config, stage, mesh, steps.read_model(config))

    def kind(leaf):
        return leaf.shape, leaf.dtype

    assert jax.tree.map(kind, planned.state) == jax.tree.map(kind, state)


Q_ROUND = ("--phases.0.algorithm.q-model", "Qwen2.5-0.5B", "--algorithm.q-model", "Qwen2.5-0.5B")


@pytest.mark.parametrize(
    ("flags", "role"),
    [
        (["arithmetic_grpo", "--model.path", "Qwen2.5-0.5B"], "policy"),
        (["arithmetic_gkd", "--algorithm.teacher", "Qwen/Qwen2.5-0.5B-Instruct"], "teacher"),
        (["arithmetic_ppo", "--algorithm.critic.trunk", "own", "--algorithm.critic.model", "Qwen2.5-0.5B"], "value"),
        (["arithmetic_q_sharp", *Q_ROUND], "q"),
        (
            ["arithmetic_grpo", "--sampling.speculation.model", "qwen2.5-0.5b", "--sampling.speculation.tokens", "4"],
            "draft",
        ),
    ],
)
def test_a_plan_knows_any_role_s_model_by_name_and_a_run_none(flags, role, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    given = configuration.parse(flags)
    with steps.known_by_name(given) as config:
        shapes = roles.param_shapes(config, steps.read_model(config))
    assert shapes[role]["embedding"].shape == (151_936, 896)
    with pytest.raises(InputError, match="neither a directory nor a model"):
        preflight.check_models(given, roles.model_directory(given))


def test_every_step_of_a_run_is_planned():
    config = configuration.parse(["arithmetic_grpo", *SMALL, "--algorithm.kl-loss-coef", "0.1"])
    target = here(memory=2**30)
    made = search.make_plan(config, target, steps.read_model(config))
    names = [line.step.name.partition(",")[0] for _, line in made.lines]
    assert names[0] == "prefill"
    assert names[-2:] == ["make_batch", "update"]
    assert names.count("decode") >= 2
    assert made.fits(target)
    parts = made.lines[-1][1].memory.parts
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(steps.read_model(config).init, jax.random.key(0))))
    assert parts["parameters"] == parts["frozen"] == 4 * count
    assert parts["optimizer"] == pytest.approx(8 * count, rel=1e-3)
    # Twice forwards and once, at double cost, backwards; attention looks at a part of each row, or at all of it, and
    # the vocabulary is met by actions, or by all tokens.
    decoder, update = steps.read_model(config).config, made.lines[-1][1]
    attention, tokens = decoder.attention, update.step.tokens
    layers = 8 * (figures.matmul_weights(decoder) - decoder.width * decoder.vocab.size)
    whole_rows = 16 * attention.heads * attention.head_dim * config.batch.row_length * len(decoder.kinds)
    most = layers + 8 * decoder.width * decoder.vocab.size + whole_rows
    assert layers * tokens < update.flops < 1.05 * most * tokens


def test_what_was_begun_is_read_in_its_width_and_no_more_tokens_at_once():
    config = configuration.parse(["arithmetic_grpo", *SMALL, "--batch.carry-over", "2"])
    made = search.make_plan(config, here(memory=2**30), steps.read_model(config), ("sampling",))
    found = {line.step.name: line.step for _, line in made.lines}
    plain, begun = found["prefill"], found["prefill, what was begun"]
    how = config.sampling
    longest = how.max_prompt_tokens + how.max_new_tokens
    assert begun.tokens % longest == 0
    assert begun.tokens <= max(plain.tokens, longest)
    assert begun.times * begun.tokens == 2 * config.batch.completions * longest


def test_what_does_not_fit_is_said_with_changes_that_help():
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = here(memory=4 * 2**20)
    made = search.make_plan(config, target, steps.read_model(config), ("learning",))
    assert not made.fits(target)
    found = search.changes(made, target)
    assert found
    assert all(change.total < max(line.memory.total for _, line in made.lines) for change in found)
    flags = " ".join(change.flags for change in found)
    assert configuration.parse(["arithmetic_grpo", *flags.split()]) is not None


@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh.context", "2", "--batch.row-length", "512"],
        ["--batch.row-length", "384", "--batch.micro-batch-rows", "1"],
    ],
)
def test_changes_that_do_not_fit_the_other_settings_are_not_proposed(flags):
    """Half a row of 512 cannot be cut over two devices, nor one of 384."""
    config = configuration.parse(["arithmetic_grpo", *SMALL, *flags])
    plan = search.Plan(config, replace(config.mesh, data=1, fsdp=2), [("Grpo", a_line())])
    found = search.changes(plan, figures.Target("two", jax.devices() * 2, None, 1))
    assert found
    for batch, mesh in ((change.config.batch, change.config.mesh) for change in found):
        assert mesh.context == 1 or batch.row_length % (256 * mesh.context) == 0


def a_line() -> figures.Line:
    """An update that was refused, and takes a second."""
    step = steps.Step("update", steps.Compiled(None, "", 0.0), {}, 1.0, 1)
    parts = {"parameters": 4, "optimizer": 8, "temporaries": 100}
    return figures.Line(step, memory.Memory(parts, []), None, 0.0, {}, 1.0, None)


def test_a_step_of_the_run_is_one_of_the_last_stage(monkeypatch):
    config = configuration.parse(["arithmetic_q_sharp", *SMALL[:-2]])
    assert len({type(stage.algorithm) for stage in config.stages}) < len(config.stages)
    monkeypatch.setattr(search, "_lines", lambda *_: iter([a_line()]))
    assert search.make_plan(config, here(), steps.read_model(config)).seconds == 1


def test_rounds_of_q_sharp_are_drawn_once_for_all_steps_of_their_stage():
    """The first rolls in by the reference alone; answers go on behind a prompt and what was rolled in, half of the most
    tokens in the mean."""
    config = configuration.parse(["arithmetic_q_sharp", *SMALL[:-2]])
    made = search.make_plan(config, here(), steps.read_model(config), ("sampling",))
    first, second = ({line.step.name: line.step for stage, line in made.lines if stage.startswith(n)} for n in "12")
    assert first.keys() == second.keys()
    how, (stage, _) = config.sampling, config.stages
    asked, taken = stage.algorithm.prompts, stage.last - stage.first + 1
    tokens = asked * config.batch.completions * how.max_new_tokens / taken
    longest = how.max_prompt_tokens + how.max_new_tokens
    for name, width, drawn in ((" of roll-ins", how.max_prompt_tokens, 1), (" of roll-outs", longest, 0.5)):
        prefill, decode = (first[f"{kind}{name}{rest}"] for kind, rest in (
            ("prefill", ""), ("decode", f", cache of {width + how.max_new_tokens:,}")
        ))  # fmt: skip
        prompts = asked if name == " of roll-ins" else asked * config.batch.completions
        assert prefill.times * prefill.tokens * taken == pytest.approx(prompts * width)
        assert decode.times * decode.tokens == pytest.approx(drawn * tokens)
    guided, alone = (part["prefill of roll-ins"].own["cache"] for part in (second, first))
    assert guided > alone  # q has a cache, too


def test_a_cache_that_exceeds_the_memory_is_a_step_that_does_not_fit(monkeypatch):
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = here()
    refused = steps.Compiled(None, "RESOURCE_EXHAUSTED", 0.0)
    monkeypatch.setattr(sampling, "compile_step", lambda *arguments: refused)  # with which empty slots are made
    made = search.make_plan(config, target, steps.read_model(config), ("sampling",))
    assert [line.step.name.partition(",")[0] for _, line in made.lines] == ["prefill", "decode", "decode"]
    assert not made.fits(target)


def test_a_mixture_s_token_meets_the_experts_that_see_it():
    mixture = models.from_config(model_shapes.SHAPES["Qwen3-30B-A3B"]).config
    active = figures.matmul_weights(mixture) + mixture.width * mixture.vocab.size  # the embedding, which is looked up
    assert active == pytest.approx(3.35e9, rel=0.01)  # "A3B": 3.3 billion of them


def test_model_flops_are_six_times_the_weights_and_causal_attention():
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    mesh = build.make_mesh(config.mesh, jax.devices()[:1])
    planned = steps.plan_stage(config, config.stages[-1], mesh, steps.read_model(config))
    decoder = planned.setup.models["policy"].config
    prompt, new = config.sampling.max_prompt_tokens, config.sampling.max_new_tokens
    prompts, group = config.batch.prompts, config.batch.completions
    tokens = prompts * (prompt + group * new)  # each prompt once: a row holds the whole group
    seen = prompts * (prompt * (prompt + 1) / 2 + group * sum(prompt + i + 1 for i in range(new)))
    attention = 3 * 4 * decoder.attention.heads * decoder.attention.head_dim * len(decoder.kinds) * seen
    weights = figures.matmul_weights(decoder)
    assert figures.model_flops(planned) == pytest.approx(6 * weights * tokens + attention)


def test_compilers_messages_are_read():
    message = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.18G of 15.75G hbm.

  Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(update)/while/body/dot_general"
     Shape: f32[128256,4096]{1,0}
     Unpadded size: 4.00G
"""
    assert memory.refused_arrays(message) == [(4 * 2**30, "f32[128256,4096] while/body/dot_general")]
    assert memory._beyond(message, 2**34) == int(18.18 * 2**30) - 2**34
    assert (
        memory._beyond("total memory required for HLO temporaries (770.00G) exceeds available HBM (15.75G)", 0)
        == 770 * 2**30
    )


def test_meshes_that_are_tried_divide_devices_and_heads():
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target = figures.Target("eight", jax.devices() * 8, None, None)
    tried = list(search.candidates(config, target, steps.read_model(config)))
    assert {c.mesh.data * c.mesh.fsdp * c.mesh.tensor * c.mesh.expert for c in tried} == {8}
    assert all(c.batch.micro_batch_rows % (c.mesh.data * c.mesh.fsdp) == 0 for c in tried)


def test_a_mesh_that_is_too_full_is_not_tried_with_more_rows(monkeypatch):
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target, tried = figures.Target("eight", jax.devices() * 8, None, None), []

    def planned(config, target, model, parts):
        tried.append(config)
        return search.Plan(config, config.mesh, [])

    monkeypatch.setattr(search, "make_plan", planned)
    monkeypatch.setattr(search.Plan, "fits", lambda plan, target: False)
    assert search.search(config, target, steps.read_model(config), lambda line: None) is None
    assert len(tried) == len({one.mesh for one in tried}) > 1


def test_widths_are_cut_no_further_once_that_is_slower(monkeypatch):
    config = configuration.parse(["arithmetic_grpo", *SMALL])
    target, seconds = figures.Target("eight", jax.devices() * 8, None, None), {1: 3.0, 2: 2.0, 4: 5.0, 8: 1.0}
    meshes = [MeshConfig(1, 8 // tensor, tensor, 1, 1) for tensor in seconds]
    compiled = []

    def planned(config, target, model, parts):
        if parts == ("learning",):
            compiled.append(config.mesh.tensor)
        return search.Plan(config, config.mesh, [])

    monkeypatch.setattr(search, "candidates", lambda *_: (replace(config, mesh=mesh) for mesh in meshes))
    monkeypatch.setattr(search, "make_plan", planned)
    monkeypatch.setattr(search.Plan, "fits", lambda plan, target: True)
    monkeypatch.setattr(search.Plan, "seconds", property(lambda plan: seconds[plan.mesh.tensor]))
    best = search.search(config, target, steps.read_model(config), lambda line: None)
    assert best is not None
    assert best.mesh.tensor == 2
    assert compiled == [1, 2, 4, 2]  # the last with products kept


# --- the command -------------------------------------------------------------------------------------------------


def command(*flags: str) -> subprocess.CompletedProcess:
    script = Path(plan.__file__)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, script, *flags], env=env, capture_output=True, text=True, timeout=250)


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    flags = (*SMALL, "--sampling.max-new-tokens", "8", "--json", str(tmp_path / "plan.json"))
    done = command("arithmetic_sft", "--topology", "cpu", "--batch.completions", "1", *flags[:2], *flags[4:])
    assert done.returncode == 0, done.stderr
    assert "update" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [step["step"] for step in found["steps"]] == ["make_batch", "update"]
    assert found["steps"][1]["flops"] > 0
    assert found["steps"][1]["bytes"]["temporaries"] > 0


def test_no_mesh_is_the_best_where_no_time_is_known():
    with pytest.raises(InputError, match="rates of these devices are not known"):
        plan.run(*plan.parse(["arithmetic_grpo", "--topology", "cpu", "--search"]))


def test_wrong_topologies_and_a_missing_compiler_are_said(monkeypatch):
    flags, _ = plan.parse(["arithmetic_grpo", "--topology", "v9:2x2"])
    with pytest.raises(InputError, match="no such topology"):
        plan.prepare(flags)
    flags, others = plan.parse(["gsm8k_grpo", "--topology", "v5e:4x4", "--model.path", "Llama-3.1-8B"])
    assert others == ["gsm8k_grpo", "--model.path", "Llama-3.1-8B"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"\[plan\]") as error:
        plan.prepare(flags)
    assert error.value.code == 3


# --- the TPU's compiler ------------------------------------------------------------------------------------------

MODELS = {"code": "builtin:gsm8k_scratch", "gsm8k": "builtin:gsm8k_scratch", "star_graph": "builtin:star_graph"}
"""Of presets that leave the model to the user, or take one that another run made: one of the same kind."""


@pytest.fixture(scope="module")
def seen() -> dict[str, steps.Compiled]:
    """Lowered program -> compiled: presets share many."""
    return {}


@needs_libtpu
@pytest.mark.parametrize("name", configuration.preset_names())
@pytest.mark.parametrize(
    "topology",
    # With --dist loadgroup presets that share programs are one process's.
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("v5e:2x2", "v5p:2x2x1")],
)
def test_every_preset_compiles_for_a_tpu(name, topology, seen, monkeypatch):
    monkeypatch.setattr(sampling, "cache_lengths", lambda most: [most])
    # As runs have it; the other tests' float32 products take a TPU six passes, and its compiler as much longer.
    with jax.default_matmul_precision("default"):
        check_preset(name, topology, seen)


def check_preset(name: str, topology: str, seen: dict[str, steps.Compiled]) -> None:
    chip = CHIPS[topology.partition(":")[0]]

    def compile_once(mesh, function, *arguments):
        lowered = steps.lower(mesh, function, *arguments)
        text = topology + lowered.as_text()
        if text not in seen:
            seen[text] = steps.compile_lowered(lowered)
        return seen[text]

    config = configuration.preset(name)
    kind = next((kind for kind in MODELS if name.startswith(kind)), None)
    if kind and not str(config.model.path).startswith("builtin:"):
        config = replace(config, model=replace(config.model, path=MODELS[kind]))
    # Teachers are what other runs leave behind; the shipped model is of the same shape.
    teachers = [name for name, value in asdict(config.algorithm).items() if name.startswith("teacher") and value]
    config = replace(config, algorithm=replace(config.algorithm, **dict.fromkeys(teachers, "builtin:arithmetic")))
    target = figures.Target(topology, tpu_devices(topology), chip, chip.memory)
    made = search.make_plan(config, target, steps.read_model(config), compile_with=compile_once)
    assert made.fits(target), [(line.step.name, line.step.compiled.refused[:300]) for _, line in made.lines]
    assert all(line.estimate and line.estimate.seconds > 0 for _, line in made.lines)
    if any(sampling.samples(stage) for stage in config.stages):
        assert {"prefill", "update"} <= {line.step.name.partition(" of ")[0] for _, line in made.lines}
