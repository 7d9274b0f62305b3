"""A program: optimizer steps and samples on meshes of virtual devices, each beside the same on one of them.

python -m tests.on_meshes CASE ...        CASE: family/algorithm/axis=size,axis=size

Prints a line of JSON a case: the largest differences found, and whether samples are equal.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
import optax

from launch.sources import experience_sharding
from tests import tiny
from tests.one_step import RATE, kept_gradient
from tests.test_algos import CASES
from tests.test_models import CONFIGS
from tpu_rl import models, sampler, sharding, training
from tpu_rl.needs import RoleSpec
from tpu_rl.types import Model, Params, Role, Roles, TrainState

PROMPTS = [[3, 4, 5, 6], [7], [8, 9], [3, 4], [5], [6, 7, 8], [9], [4, 4]]
HOW = sampler.SamplerConfig(max_new_tokens=5, samples_per_prompt=2, max_rows=8)


def cast(base: Model, specs: dict[str, RoleSpec]) -> tuple[Roles, dict[str, Model]]:
    """The roles that an algorithm asks for, on heads of one family's decoder."""
    roles, found = {}, {}
    for name, spec in specs.items():
        outputs = spec.outputs or (spec.outputs_per_token and spec.outputs_per_token * base.config.vocab.size)
        found[name] = models.with_head(base, outputs) if outputs else base

        def select(params: Params, name: str = name) -> Params:
            return params[name]

        roles[name] = models.role(found[name], select)
        if spec.trunk_of is not None:
            roles[name] = Role(roles[spec.trunk_of].hidden, roles[name].logits)
    return roles, found


def stepped(family: str, name: str, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Metrics of an optimizer step, gradients, and the params after plain descent."""
    case, base = CASES[name], models.from_config(CONFIGS[family])
    roles, cast_models = cast(base, case.config.roles)
    trained = {name for name, spec in case.config.roles.items() if spec.trainable}

    def trainable(path: str) -> bool:
        return path.partition("/")[0] in trained

    with jax.set_mesh(mesh):
        params = {
            name: sharding.place(model.init(jax.random.key(i)), model.axes, mesh)
            for i, (name, model) in enumerate(cast_models.items())
        }
        algorithm = case.factory(case.config, roles, tiny.SAMPLING)
        optimizer = kept_gradient()
        state = training.init_train_state(params, algorithm, optimizer, trainable)
        places: TrainState = jax.tree.map(lambda leaf: leaf.sharding, state)
        update = training.make_update_step(algorithm, optimizer, optax.constant_schedule(RATE), trainable, places)
        experience = jax.tree.map(
            lambda array: sharding.put(np.asarray(array), experience_sharding(mesh, np.shape(array))),
            tiny.experience(case.data(), micro_batch_rows=4),
        )
        batch, _ = training.make_batch_step(algorithm)(experience, state.params, state.algorithm_state)
        state, metrics = update(state, training.minibatch(batch, 0))
        numbers = training.reduce_metrics(metrics)
        return sharding.to_host({"metrics": numbers, "gradients": state.opt_state, "params": state.params})


def sampled(family: str, mesh: jax.sharding.Mesh) -> np.ndarray:
    """[N, T] tokens. On a mesh for drawing experts lie on as many devices as there are."""
    model = models.from_config(CONFIGS[family])
    with jax.set_mesh(mesh):
        params = sharding.place(model.init(jax.random.key(0)), model.axes, mesh)
        drawn = sampler.sample(models.policy(model), params, PROMPTS, jax.random.key(7), HOW, mesh=mesh)
    return np.asarray(drawn.tokens)


def difference(one: Any, many: Any) -> float:
    """The largest of all leaves' differences, each over the norm of its leaf, or of all leaves' mean where that is
    less: some hold nothing but rounding."""
    norms = [np.linalg.norm(leaf) for leaf in jax.tree.leaves(one)]
    least = 1e-3 * float(max(norms))
    apart = [np.linalg.norm(a - b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True)]
    return float(max(gap / max(norm, least) for gap, norm in zip(apart, norms, strict=True)))


def compared(case: str) -> dict[str, Any]:
    family, name, axes = case.split("/")
    sizes = {axis: int(size) for axis, _, size in (part.partition("=") for part in axes.split(","))}
    count = int(np.prod(list(sizes.values())))
    meshes = [sharding.make_mesh(devices=jax.devices()[:1]), sharding.make_mesh(**sizes, devices=jax.devices()[:count])]
    one, many = (stepped(family, name, mesh) for mesh in meshes)
    drawn_on = {"ppo": meshes, "grpo": [*meshes, *(sharding.drawing_mesh(meshes[1], size) for size in (1, 2))]}
    tokens = [sampled(family, mesh) for mesh in drawn_on.get(name, [])]
    found = {key: difference(one[key], many[key]) for key in ("gradients", "params")}
    found["metrics"] = max(abs(many["metrics"][k] - x) / max(abs(x), 0.1) for k, x in one["metrics"].items())
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one["gradients"]))
    alike = all(np.array_equal(tokens[0], others) for others in tokens[1:])
    return {"case": case, **{key: float(gap) for key, gap in found.items()}, "samples": alike}


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    for each in sys.argv[1:]:
        print(json.dumps(compared(each)), flush=True)
        jax.clear_caches()
