"""A program: one step of GRPO with plain gradient descent on one process or several; the first writes what came of it.

python -m tests.one_step OUT.npz [flags of launch/run.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from launch import build, membership, peers, sources
from launch import config as configuration
from tpu_rl import processes, sharding, training
from tpu_rl.types import Params

FLAGS = [
    "arithmetic_grpo", "--batch.prompts", "8", "--batch.completions", "4", "--batch.row-length", "128",
    "--batch.micro-batch-rows", "4", "--sampling.max-new-tokens", "12", "--sampling.temperature", "1.5",
    "--reward", "arithmetic", "arithmetic_well_formed",
]  # fmt: skip

RATE = 0.5


def kept_gradient() -> optax.GradientTransformation:
    """Plain gradient descent, whose state is the gradient."""

    def update(gradient: Params, state: Params, params: Params | None = None) -> tuple[Params, Params]:
        del state, params
        return jax.tree.map(lambda g: -RATE * g, gradient), gradient

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def one_step(flags: list[str]) -> dict[str, np.ndarray]:
    """Tokens and rewards of a step's completions, the gradient and the params after it, whole."""
    config = configuration.parse([*FLAGS, *flags])
    mesh = build.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        setup, params = build.make_setup(config, configuration.Path("unused"), mesh)
        (stage,) = config.stages
        algorithm = build.build_algorithm(setup, stage)
        source = build.make_source(setup, stage, params)

        def trainable(path: str) -> bool:
            return path.startswith("policy/")

        optimizer = kept_gradient()
        state = training.init_train_state(params, algorithm, optimizer, trainable)
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        update = training.make_update_step(algorithm, optimizer, optax.constant_schedule(RATE), trainable, places)
        drawn = source.draw(1, state)
        experience = sources.lay_out(config, drawn.data, mesh)
        batch, _ = training.make_batch_step(algorithm)(experience, state.params, state.algorithm_state)
        state, _ = update(state, training.minibatch(batch, 0))
        found = {"tokens": drawn.data.tokens, "rewards": drawn.data.rewards}
        for name, tree in (("gradient", state.opt_state), ("params", state.params)):
            leaves = jax.tree_util.tree_leaves_with_path(sharding.to_host(tree))
            found |= {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
        return found


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    member, rest = membership.find(sys.argv[1:])
    with peers.joined(member):
        result = one_step(rest[1:])
        if processes.index() == 0:
            np.savez(rest[0], **result)
