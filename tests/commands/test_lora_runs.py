"""LoRA in runs: every kind of algorithm trains adapters without knowing it, and runs leave models
and adapters that load."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_rl import models, tokenizers
from tpu_rl.algos import (
    AlgorithmConfig,
    DpoConfig,
    GrpoConfig,
    PpoConfig,
    QSharpConfig,
    RftConfig,
)
from tpu_rl.algos.distill import DistillConfig
from tpu_rl.commands import compose, config, roles, run, saved_run
from tpu_rl.commands.config import ExperimentConfig, ModelConfig
from tpu_rl.commands.roles import BASE, RunContext
from tpu_rl.commands.tools import export
from tpu_rl.errors import InputError
from tpu_rl.losses.value_loss import Critic
from tpu_rl.models import LoraConfig, quantization
from tpu_rl.models.config import QUANTIZED
from tpu_rl.proofs import tiny
from tpu_rl.tasks import arithmetic
from tpu_rl.train import sharding, update_step
from tpu_rl.train.optimizers import OptimizerConfig
from tpu_rl.types import Algorithm, Params, TrainState

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random model of one small layer with the arithmetic task's alphabet."""
    tokenizer = tokenizers.characters(arithmetic.ALPHABET)
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | SIZES)
    path = tmp_path_factory.mktemp("model")
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    return str(path)


class Case(NamedTuple):
    algorithm: Callable[[str], AlgorithmConfig]
    """Directory of a model -> configuration."""
    data: Callable[[], Any]
    trained: tuple[str, ...] = ("policy",)
    frozen: tuple[str, ...] = (BASE,)


CASES = {
    "grpo": Case(lambda _: GrpoConfig(kl_loss_coef=0.1), tiny.rollout),
    "dpo": Case(lambda _: DpoConfig(pairs="policy"), tiny.pairs),
    "tr_dpo": Case(
        lambda _: DpoConfig(pairs="policy", reference_mix=1.0, reference_every=2),
        tiny.pairs,
        ("policy", "reference"),
    ),
    "expert_iteration": Case(
        lambda _: RftConfig(sampled_by="reference", round_steps=2),
        tiny.completions,
        ("policy", "reference"),
    ),
    "ppo": Case(lambda _: PpoConfig(kl_loss_coef=0.1), tiny.rollout, ("policy", "value")),
    "ppo_shared_trunk": Case(
        lambda _: PpoConfig(Critic(trunk="shared")), tiny.rollout, ("policy", "value")
    ),
    "ppo_other_critic": Case(
        lambda path: PpoConfig(Critic(model=path)),
        tiny.rollout,
        ("policy", "value"),
        (BASE, "value_base"),
    ),
    "q_sharp": Case(lambda _: QSharpConfig(), tiny.q_examples, ("q",)),
    "distill": Case(lambda path: DistillConfig(path), tiny.completions, frozen=(BASE, "teacher")),
}


class Prepared(NamedTuple):
    """A run before its first step."""

    algorithm: Algorithm
    context: RunContext
    params: Params
    state: TrainState
    update: update_step.UpdateStep


def config_of(name: str, model_dir: str, base_dtype: Any = "unquantized") -> ExperimentConfig:
    return replace(
        config.preset("arithmetic_grpo"),
        algorithm=CASES[name].algorithm(model_dir),
        model=ModelConfig(path=model_dir, lora=LoraConfig(3, base_dtype=base_dtype)),
        optimizer=OptimizerConfig(learning_rate=0.01),
    )


def prepare(name: str, model_dir: str, base_dtype: Any = "unquantized") -> Prepared:
    """Return a run with the launcher's own roles, optimizer and update step."""
    experiment = config_of(name, model_dir, base_dtype)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    language, loaded = roles.language(experiment, mesh)
    role_models = roles.role_models(experiment, language.model)
    context = RunContext(experiment, language, role_models, mesh, Path())
    params = roles.first_params(experiment, language, loaded, mesh, roles.specs(experiment))
    stage = experiment.stages[0]
    algorithm = compose.build_algorithm(context, stage)
    state, update = compose.learner(context, stage, algorithm, params)
    return Prepared(algorithm, context, params, state, update)


def batch_of(run: Prepared, data: Any) -> Any:
    """Return the batch from a program with the update's compiler options, so that bits agree."""
    make_batch = update_step.make_batch_step(
        run.algorithm, update_step.compiler_options(run.context.mesh)
    )
    return make_batch(tiny.experience(data), run.params, run.state.algorithm_state)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base_dtype"),
    [*((name, "unquantized") for name in CASES), ("ppo_other_critic", "nf4")],
)
def test_frozen_weights_exist_once_and_only_trained_params_have_moments(
    name, base_dtype, model_dir
):
    case = CASES[name]
    run = prepare(name, model_dir, base_dtype)
    experiment = run.context.config

    def shapes_and_dtypes(params: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)

    def size(tree: Any) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim)

    assert {*run.params} == {*case.trained, *case.frozen}
    planned = roles.param_shapes(experiment, run.context.language.model)
    assert shapes_and_dtypes(run.params) == shapes_and_dtypes(planned)
    trained = [name for name in case.trained if experiment.algorithm.roles[name].trainable]
    num_trained = sum(leaf.size for name in trained for leaf in jax.tree.leaves(run.params[name]))
    assert size(run.state.opt_state) == 2 * num_trained
    assert num_trained < sum(leaf.size for leaf in jax.tree.leaves(run.params[BASE]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base_dtype"),
    [
        *((name, "unquantized") for name in ("grpo", "dpo")),
        *(
            pytest.param(name, "unquantized", marks=pytest.mark.nightly)
            for name in ("ppo", "distill", "tr_dpo", "expert_iteration", "q_sharp")
        ),
        ("grpo", "nf4"),
        pytest.param("ppo_other_critic", "nf4", marks=pytest.mark.nightly),
        pytest.param("dpo", "int8", marks=pytest.mark.nightly),
    ],
)
def test_only_adapters_move_and_resume_is_bit_exact(name, base_dtype, model_dir):
    case = CASES[name]
    run = prepare(name, model_dir, base_dtype)
    batch = update_step.minibatch(batch_of(run, case.data()), 0)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.state)

    def on_host(state: TrainState) -> TrainState:
        return jax.tree.map(np.array, state)

    def take_steps(count: int, saved: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return the state after some steps, and the metrics of the first one."""
        state = jax.tree.map(jax.device_put, saved, shardings)
        first_metrics = {}
        for _ in range(count):
            state, metrics = run.update(state, batch)
            first_metrics = first_metrics or update_step.reduce_metrics(metrics)
        return on_host(state), first_metrics

    start = on_host(run.state)
    uninterrupted, metrics = take_steps(3, start)
    resumed, _ = take_steps(1, take_steps(2, start)[0])
    jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)
    for role in case.frozen:
        jax.tree.map(np.testing.assert_array_equal, uninterrupted.params[role], start.params[role])
    for role in case.trained:
        changes = jax.tree.map(
            lambda new, old: np.abs(new - old).max(), uninterrupted.params[role], start.params[role]
        )
        assert min(jax.tree.leaves(changes)) > 1e-4, role
    # In the first step the policy equals the reference to the last bit.
    if "policy/kl_reference" in metrics:
        assert metrics["policy/kl_reference"] == 0
    if "preference/margin" in metrics:
        assert metrics["preference/margin"] == 0
        assert metrics["preference/loss"] == pytest.approx(np.log(2), abs=1e-7)


@pytest.mark.nightly
def test_reference_that_is_reset_equals_the_policy(model_dir):
    run = prepare("tr_dpo", model_dir)
    batch = batch_of(run, tiny.pairs())
    state = run.state
    for step in range(1, 4):
        state, _ = run.update(state, update_step.minibatch(batch, 0))
        differences = jax.tree.map(
            lambda policy, reference: float(jnp.abs(policy - reference).max()),
            state.params["policy"],
            state.params["reference"],
        )
        assert (max(jax.tree.leaves(differences)) == 0) == (step == 2), step


def test_reference_is_the_policy_without_its_adapters(model_dir):
    experiment = config_of("grpo", model_dir)
    model = models.from_config(model_dir)
    assert roles.place(experiment, "reference")({BASE: 1, "policy": 2}) == 1
    # Equal values, so that both compile to one program.
    assert roles.place(experiment, "policy") == roles.place(experiment, "policy")
    assert roles.role_models(experiment, model)["reference"] is model


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            DpoConfig(pairs="policy", reference_mix=0.5),
            "moved a part of the way(.|\n)*reference-mix 1",
        ),
        (QSharpConfig(layers=1), "no model of this run can have adapters"),
    ],
)
def test_impossible_adapters_are_input_errors(algorithm, message, model_dir):
    experiment = replace(config_of("grpo", model_dir), algorithm=algorithm)
    with pytest.raises(InputError, match=message):
        roles.role_models(experiment, models.from_config(model_dir))


# --- whole runs ---


@pytest.fixture(scope="module")
def run_dir(model_dir, tmp_path_factory):
    """A run folder and its flags: two steps of GRPO from a copy of the model, with a checkpoint
    after each."""
    path = tmp_path_factory.mktemp("run")
    shutil.copytree(model_dir, path / "base")
    (path / "odd.py").write_text(
        "def length(prompts, completions):\n    return [len(c) % 2 for c in completions]\n"
    )
    flags = [
        "arithmetic_grpo",
        f"--model.path={path / 'base'}",
        "--model.lora.rank=2",
        "--model.lora.targets",
        "q_proj",
        "up",
        f"--run-dir={path / 'run'}",
        "--checkpoint.interval=1",
        "--batch.prompts=2",
        "--batch.group-size=4",
        "--batch.row-length=64",
        "--batch.micro-batch-rows=2",
        "--reward",
        f"{path / 'odd.py'}:length",
        "--evaluation.rows=4",
        "--sampling.max-new-tokens=8",
        "--optimizer.learning-rate=0.02",
        "--optimizer.warmup-steps=0",
    ]
    assert run.main([*flags, "--steps", "2"]) == 0
    return path / "run", flags


@pytest.mark.nightly
def test_run_leaves_the_merged_model_and_its_adapter(run_dir, model_dir):
    folder, _ = run_dir
    _, merged = models.load(folder / "model")
    base, base_params = models.load(model_dir)
    adapted, adapters = models.load_adapters(folder / "model_adapter", base)
    assert adapted.config.adapters == LoraConfig(2, targets=("query", "up"))
    assert all(bool(leaf.any()) for leaf in jax.tree.leaves(adapters))
    expected = models.merge(adapted, models.join(base_params, adapters))[1]
    jax.tree.map(np.testing.assert_array_equal, merged, expected)
    jax.tree.map(np.testing.assert_array_equal, merged, models.load(folder / "model_adapter")[1])
    for name in ("model", "model_adapter"):
        assert (folder / name / "tokenizer.json").is_file()
    adapter_config = json.loads((folder / "model_adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str((folder.parent / "base").resolve())


@pytest.mark.slow
def test_newest_checkpoint_is_exported_merged_and_as_an_adapter(run_dir, tmp_path, capsys):
    folder, _ = run_dir
    assert export.main([str(folder), "--to", str(tmp_path / "merged")]) == 0
    assert export.main([str(folder), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    for name, of_run in (("merged", "model"), ("adapter", "model_adapter")):
        for file in (tmp_path / name).glob("*.safetensors"):
            assert file.read_bytes() == (folder / of_run / file.name).read_bytes()
    command = [str(folder), "--to", str(tmp_path / "none"), "--adapter", "--role", "nobody"]
    assert export.main(command) == 2
    assert "no model 'nobody'" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_run_over_four_bits_resumes_and_leaves_the_whole_model(run_dir, capsys):
    """The saved model is the rounded base, as it was trained on, plus the adapter."""
    folder, flags = run_dir
    own = folder.parent / "four_bits"
    flags = [*flags, f"--run-dir={own}", "--model.lora.base-dtype=nf4"]
    for steps in ("1", "2"):
        assert run.main([*flags, "--steps", steps]) == 0
    assert "resumed at step 1 (digest ok)" in capsys.readouterr().out
    _, merged = models.load(own / "model")
    base, base_params = models.load(folder.parent / "base")
    adapted, adapters = models.load_adapters(own / "model_adapter", base)

    def rounded(path, leaf):
        name = path[-1].key
        if name not in QUANTIZED:
            return leaf
        return quantization.dequantize(name, quantization.quantize(name, leaf, "nf4"), leaf.dtype)

    base_params = jax.tree.map_with_path(rounded, base_params)
    expected = models.merge(adapted, models.join(base_params, adapters))[1]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), merged, expected)


@pytest.mark.nightly
def test_resume_needs_the_weights_under_the_adapters(run_dir, capsys):
    """Checkpoints contain only what trains. This test comes last: it changes the run and its
    model."""
    folder, flags = run_dir
    assert run.main([*flags, "--steps", "3"]) == 0
    assert "resumed at step 2 (digest ok)" in capsys.readouterr().out
    context, params, step = saved_run.load_run(str(folder))
    assert step == 3
    base, base_params = models.load(folder.parent / "base")
    jax.tree.map(np.testing.assert_array_equal, params[BASE], base_params)
    policy_params = context.params_of("policy")(params)
    merged = models.merge(context.models["policy"], policy_params)[1]
    jax.tree.map(np.testing.assert_array_equal, merged, models.load(folder / "model")[1])
    record = json.loads((folder / "checkpoints" / "3" / "record" / "metadata").read_text())
    assert not [path for path in record["leaves"] if path.startswith(f"params.{BASE}")]

    changed = base_params | {"final_norm": 2 * base_params["final_norm"]}
    models.save(folder.parent / "base", base, changed, context.language.tokenizer)
    assert run.main([*flags, "--steps", "4"]) == 2
    assert "the model under the adapters is not the one" in capsys.readouterr().err
