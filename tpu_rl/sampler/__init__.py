"""Completions from a policy, on token ids.

Unique prompts are prefilled once, into a pool; so many rows as there are slots are decoded at once, in jitted segments;
a row that ends leaves its slot, on the device, to the next that waits. The last few may draw some tokens a step.

    config      the settings
    drawing     keys, and one token from logits
    caches      rows of any policy's cache
    slots       the device's part: pool and slots
    drafts      what guesses a row's next tokens
    speculation the step that verifies drafts
    segments    one segment of steps
    requests    what is asked for, and which device does which part of it
    decoding    the host's part: `sample`, and what happens at the borders of segments

What a row draws depends on its own key and its logits alone, never on its slot, the order, the batch size or the other
rows:

    key       = fold_in(fold_in(seed key, purpose), step)      `run_key`
    row key   = fold_in(key, row id)                           `row_keys`
    token key = fold_in(row key, position of the token in its sequence)
"""

from tpu_rl.sampler.caches import take_rows
from tpu_rl.sampler.config import Borders, SamplerConfig, Speculation
from tpu_rl.sampler.decoding import OnFinished, OnVerified, StopAt, sample
from tpu_rl.sampler.drawing import draw, invert_cdf, row_keys, run_key
from tpu_rl.sampler.requests import Begun, begun, pack, unpack

__all__ = [
    "Begun",
    "Borders",
    "OnFinished",
    "OnVerified",
    "SamplerConfig",
    "Speculation",
    "StopAt",
    "begun",
    "draw",
    "invert_cdf",
    "pack",
    "row_keys",
    "run_key",
    "sample",
    "take_rows",
    "unpack",
]
