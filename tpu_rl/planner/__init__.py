"""The needs of the compiled steps of a run, and how fast they can be.

The planner takes jitted functions, shapes and small values; `commands/plan_steps.py` composes them
from a run's configuration.

- `steps` compiles a function for shapes.
- `sampling` compiles the sampler's prefill and decoding.
- `memory` and `estimates` turn a compiled step into a line of the plan.
"""
