"""--model.float32-sums: products with weights are summed in float32, over devices too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.fixtures.decoders import CONFIGS, LENGTH, plain, tiny
from tests.fixtures.topologies import needs_libtpu, tpu_devices
from tpu_rl import models
from tpu_rl.commands import compose, roles
from tpu_rl.commands import config as configuration
from tpu_rl.errors import InputError
from tpu_rl.models import layers


def dots(jaxpr):
    """Yield the matrix products of a program, those of inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from dots(inner)


@pytest.mark.parametrize(("float32_sums", "dtypes"), [(False, {"bfloat16"}), (True, {"float32"})])
def test_products_with_weights_are_float32_before_they_are_rounded(float32_sums, dtypes):
    model = models.from_config(CONFIGS["llama3"], dtype="bfloat16")
    if float32_sums:
        model = models.variant(model, float32_sums=True)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jnp.zeros((1, LENGTH), jnp.int32)

    def loss(params):
        return model.hidden(params, tokens, *plain(1)).astype(jnp.float32).sum()

    program = jax.make_jaxpr(jax.grad(loss))(params)
    # Attention's products have a dimension for rows in both operands.
    of_weights = [dot for dot in dots(program.jaxpr) if not any(dot.params["dimension_numbers"][1])]
    assert {str(dot.outvars[0].aval.dtype) for dot in of_weights} == dtypes
    # Seven weights: forward, computed again, and two gradients.
    assert len(of_weights) >= 7 * 4 - 1


def test_what_does_not_sum_in_float32_is_refused():
    with pytest.raises(InputError, match="--model.float32-sums do not go together"):
        configuration.parse(["grpo", "--model.float32-sums", "--model.exact-sampling"])
    config = configuration.parse(["grpo", "--model.float32-sums"])
    mesh = compose.make_mesh(config.mesh, jax.devices()[:1])
    assert roles.fast_model(config, tiny("llama3").model, mesh).config.float32_sums
    with pytest.raises(InputError, match="experts are not summed in float32"):
        roles.fast_model(config, tiny("mixtral").model, mesh)


@needs_libtpu
@pytest.mark.parametrize(
    ("einsum", "dtype"), [(jnp.einsum, "bf16"), (layers.float32_einsum, "f32")]
)
def test_gradients_are_summed_over_chips_in_float32(einsum, dtype):
    """The program for four chips of v6e has one sum over them: that of the weight's gradient."""
    mesh = Mesh(np.array(tpu_devices("v6e:2x2")), ("fsdp",))

    def shape(dims, *spec):
        placement = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=placement)

    def loss(weight, x):
        return (layers.product("btd,df->btf", x, weight, einsum).astype(jnp.float32) ** 2).sum()

    gradient = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, PartitionSpec("fsdp")))
    lowered = gradient.lower(shape((512, 1024), "fsdp"), shape((4, 256, 512), "fsdp"))
    text = lowered.compile().as_text() or ""
    found = re.findall(r"= (\w+)\[[\d,]+\]\S* (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    assert set(found) == {dtype}
