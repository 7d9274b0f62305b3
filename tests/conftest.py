"""Settings of every test: silent broadcasting is an error, float32 means float32."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
