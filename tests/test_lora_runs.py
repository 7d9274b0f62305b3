"""Adapters in runs: every kind of algorithm trains them without knowing, and what a run leaves can be used."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import build, config, export, roles, run
from launch.config import ExperimentConfig, ModelConfig
from launch.roles import BASE, Language
from launch.sources import Setup
from tests import tiny
from tpu_rl import environments, models, sharding, tokenizers, training
from tpu_rl.algos import AlgorithmConfig, DpoConfig, GrpoConfig, PpoConfig, QSharpConfig
from tpu_rl.algos.distill import DistillConfig
from tpu_rl.critics import Critic
from tpu_rl.errors import InputError
from tpu_rl.models import LoraConfig
from tpu_rl.optimizers import OptimizerConfig
from tpu_rl.types import Algorithm, Params, TrainState

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random model of one small layer with the arithmetic task's alphabet."""
    tokenizer = tokenizers.characters(environments.ALPHABET)
    model = models.from_config({"model_type": "llama", "vocab_size": tokenizer.vocab_size} | SIZES)
    path = tmp_path_factory.mktemp("model")
    models.save(path, model, jax.jit(model.init)(jax.random.key(0)), tokenizer)
    return str(path)


class Case(NamedTuple):
    algorithm: Callable[[str], AlgorithmConfig]
    """From a model's directory."""
    data: Callable[[], Any]
    trained: tuple[str, ...] = ("policy",)
    frozen: tuple[str, ...] = (BASE,)


CASES = {
    "grpo": Case(lambda _: GrpoConfig(kl_loss_coef=0.1), tiny.rollout),
    "dpo": Case(lambda _: DpoConfig(pairs="policy"), tiny.pairs),
    "tr_dpo": Case(
        lambda _: DpoConfig(pairs="policy", reference_mix=1.0, reference_every=2), tiny.pairs, ("policy", "reference")
    ),
    "ppo": Case(lambda _: PpoConfig(kl_loss_coef=0.1), tiny.rollout, ("policy", "value")),
    "ppo_shared_trunk": Case(lambda _: PpoConfig(Critic(trunk="shared")), tiny.rollout, ("policy", "value")),
    "ppo_other_critic": Case(
        lambda path: PpoConfig(Critic(model=path)), tiny.rollout, ("policy", "value"), (BASE, "value_base")
    ),
    "q_sharp": Case(lambda _: QSharpConfig(), tiny.q_examples, ("q",)),
    "distill": Case(lambda path: DistillConfig(path), tiny.completions, frozen=(BASE, "teacher")),
}


class Prepared(NamedTuple):
    algorithm: Algorithm
    setup: Setup
    params: Params
    state: TrainState
    update: training.UpdateStep


def config_of(name: str, model_dir: str) -> ExperimentConfig:
    return replace(
        config.preset("arithmetic_grpo"),
        algorithm=CASES[name].algorithm(model_dir),
        model=ModelConfig(path=model_dir, lora=LoraConfig(3)),
        optimizer=OptimizerConfig(learning_rate=0.01),
    )


def prepared(name: str, model_dir: str) -> Prepared:
    """As a run begins: the launcher's own roles, optimizer and step."""
    wanted, mesh = config_of(name, model_dir), sharding.make_mesh(devices=jax.devices()[:1])
    language = Language(models.from_config(model_dir), tokenizers.load(model_dir))
    setup = Setup(wanted, language, roles.role_models(wanted, language.model), mesh, Path())
    loaded = models.load(model_dir, mesh=mesh)[1]
    params = roles.first_params(wanted, language, loaded, mesh, roles.specs(wanted))
    algorithm = build.build_algorithm(setup, wanted.stages[0])
    return Prepared(algorithm, setup, params, *build.learner(setup, wanted.stages[0], algorithm, params))


def batch_of(run: Prepared, data: Any) -> Any:
    """By a program that is compiled as the update is: to the last bit alike."""
    make_batch = training.make_batch_step(run.algorithm, training.compiler_options(run.setup.mesh))
    return make_batch(tiny.experience(data), run.params, run.state.algorithm_state)[0]


@pytest.mark.parametrize("name", CASES)
def test_the_frozen_weights_are_there_once_and_what_trains_has_moments(name, model_dir):
    case, run = CASES[name], prepared(name, model_dir)
    assert {*run.params} == {*case.trained, *case.frozen}
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), roles.param_shapes(run.setup.config, run.setup.language.model)
    )
    trains = [role for role in case.trained if run.setup.config.algorithm.roles[role].trainable]
    learned = sum(leaf.size for role in trains for leaf in jax.tree.leaves(run.params[role]))
    assert sum(leaf.size for leaf in jax.tree.leaves(run.state.opt_state) if leaf.ndim) == 2 * learned
    assert learned < sum(leaf.size for leaf in jax.tree.leaves(run.params[BASE]))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "q_sharp", "distill")]


@pytest.mark.parametrize("name", ["grpo", "dpo", "tr_dpo", *SLOW])
def test_only_adapters_move_and_resuming_is_no_interruption(name, model_dir):
    case, run = CASES[name], prepared(name, model_dir)
    batch = training.minibatch(batch_of(run, case.data()), 0)

    def on_disk(state: TrainState) -> TrainState:
        return jax.tree.map(np.array, state)

    def after(steps: int, saved: TrainState) -> tuple[TrainState, dict[str, Any]]:
        state = jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), saved, places)
        first = {}
        for _ in range(steps):
            state, metrics = run.update(state, batch)
            first = first or training.reduce_metrics(metrics)
        return on_disk(state), first

    places = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), run.state)
    start = on_disk(run.state)
    straight, first = after(3, start)
    resumed = after(1, after(2, start)[0])[0]
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    for role in case.frozen:
        jax.tree.map(np.testing.assert_array_equal, straight.params[role], start.params[role])
    for role in case.trained:
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), straight.params[role], start.params[role])
        assert min(jax.tree.leaves(moved)) > 1e-4, role
    # At first the policy is the reference to the last bit.
    if "policy/kl_reference" in first:
        assert first["policy/kl_reference"] == 0
    if "preference/margin" in first:
        assert first["preference/margin"] == 0
        assert first["preference/loss"] == pytest.approx(np.log(2), abs=1e-7)


def test_a_reference_that_is_reset_becomes_the_policy(model_dir):
    run = prepared("tr_dpo", model_dir)
    batch, state = batch_of(run, tiny.pairs()), run.state
    for step in range(1, 4):
        state, _ = run.update(state, training.minibatch(batch, 0))
        apart = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max()), state.params["policy"], state.params["reference"]
        )
        assert (max(jax.tree.leaves(apart)) == 0) == (step == 2), step


def test_the_reference_is_the_policy_with_its_adapters_off(model_dir):
    wanted = config_of("grpo", model_dir)
    assert roles.place(wanted, "reference")({BASE: 1, "policy": 2}) == 1
    assert roles.place(wanted, "policy") == roles.place(wanted, "policy")  # one program for both
    assert roles.role_models(wanted, models.from_config(model_dir))["reference"] is models.from_config(model_dir)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (DpoConfig(pairs="policy", reference_mix=0.5), "moved a part of the way(.|\n)*reference-mix 1"),
        (QSharpConfig(layers=1), "no model of this run can have adapters"),
    ],
)
def test_what_adapters_cannot_do_is_said(algorithm, words, model_dir):
    wanted = replace(config_of("grpo", model_dir), algorithm=algorithm)
    with pytest.raises(InputError, match=words):
        roles.role_models(wanted, models.from_config(model_dir))


# --- the whole program -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(model_dir, tmp_path_factory):
    """Two steps of GRPO from a copy of the model, a checkpoint after each."""
    path = tmp_path_factory.mktemp("run")
    shutil.copytree(model_dir, path / "base")
    (path / "odd.py").write_text("def length(prompts, completions):\n    return [len(c) % 2 for c in completions]\n")
    flags = f"""arithmetic_grpo --model.path {path / "base"} --model.lora.rank 2 --model.lora.targets q_proj up
        --run-dir {path / "run"} --steps 2 --checkpoint-every 1 --batch.prompts 2 --batch.completions 4
        --batch.row-length 64 --batch.micro-batch-rows 2 --reward {path / "odd.py"}:length --evaluation.rows 4
        --sampling.max-new-tokens 8 --optimizer.learning-rate 0.02 --optimizer.warmup-steps 0"""
    assert run.main(flags.split()) == 0
    return path / "run", flags.split()


def test_a_run_leaves_the_merged_model_and_its_adapter(run_dir, model_dir):
    folder, _ = run_dir
    model, merged = models.load(folder / "model")
    adapted, adapters = models.load_adapters(folder / "model_adapter", models.load(model_dir)[0])
    assert adapted.config.adapters == LoraConfig(2, targets=("query", "up"))
    assert all(bool(leaf.any()) for leaf in jax.tree.leaves(adapters))
    whole = models.merge(adapted, models.join(models.load(model_dir)[1], adapters))[1]
    jax.tree.map(np.testing.assert_array_equal, merged, whole)
    jax.tree.map(np.testing.assert_array_equal, merged, models.load(folder / "model_adapter")[1])
    for name in ("model", "model_adapter"):
        assert (folder / name / "tokenizer.json").is_file()
    written = json.loads((folder / "model_adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str((folder.parent / "base").resolve())


def test_the_newest_checkpoint_is_exported_merged_and_as_an_adapter(run_dir, tmp_path, capsys):
    folder, _ = run_dir
    assert export.main([str(folder), "--to", str(tmp_path / "merged")]) == 0
    assert export.main([str(folder), "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    for name, there in (("merged", "model"), ("adapter", "model_adapter")):
        for file in (tmp_path / name).glob("*.safetensors"):
            assert file.read_bytes() == (folder / there / file.name).read_bytes()
    assert export.main([str(folder), "--to", str(tmp_path / "none"), "--adapter", "--role", "nobody"]) == 2
    assert "no model 'nobody'" in capsys.readouterr().err


def test_a_run_goes_on_from_what_trains_and_only_over_the_same_weights(run_dir, capsys):
    """The last test of these: it changes the run and its model."""
    folder, flags = run_dir
    longer = [*flags[: flags.index("--steps")], "--steps", "3", *flags[flags.index("--steps") + 2 :]]
    assert run.main(longer) == 0
    assert "resumed at step 2 (digest ok)" in capsys.readouterr().out
    setup, params, step = export.load_run(str(folder))
    assert step == 3
    jax.tree.map(np.testing.assert_array_equal, params[BASE], models.load(folder.parent / "base")[1])
    whole = models.merge(setup.models["policy"], setup.params_of("policy")(params))[1]
    jax.tree.map(np.testing.assert_array_equal, whole, models.load(folder / "model")[1])
    record = json.loads((folder / "checkpoints" / "3" / "record" / "metadata").read_text())
    assert not [path for path in record["leaves"] if path.startswith(f"params.{BASE}")]

    model, weights = models.load(folder.parent / "base")
    models.save(
        folder.parent / "base", model, weights | {"final_norm": 2 * weights["final_norm"]}, setup.language.tokenizer
    )
    assert run.main([*longer[: longer.index("--steps")], "--steps", "4", *longer[longer.index("--steps") + 2 :]]) == 2
    assert "the model under the adapters is not the one" in capsys.readouterr().err
