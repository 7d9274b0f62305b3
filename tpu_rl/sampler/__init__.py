"""Sample completions of token ids from a policy.

Unique prompts are prefilled once, into a pool. Rows are decoded in slots, in jitted segments; when
a row ends, the next row that waits takes its slot on the device. When few rows are decoded, drafts
can yield several tokens per step.

Modules:

    config                the settings
    token_sampling        random keys, and one token from logits
    cache_ops             rows of any policy's cache
    slots                 arrays and programs on the devices: pool, slots, outputs
    drafts                proposals of a row's next tokens
    speculation           the decode step that verifies drafts
    decode_loop           one segment of decode steps
    partial               completions that one call leaves unfinished and another resumes
    requests              the arguments of `sample` as checked arrays
    queues                the order in which each device decodes its rows
    batch_sampler         the host's part: `sample`, and what happens between segments
    conversation_sampler  turns of conversations, which keep their caches in between
    guided_policy         a policy guided by a model of returns
    text_scores           log-probs of given texts

Words:

    row        one of the N completions to sample
    context    the tokens that a row continues: its prompt, or its prompt with the first tokens of a
               resumed completion
    pool       prefilled contexts
    queue      rows that continue the contexts of the pool
    slot       one of the B places in which rows are decoded at the same time
    segment    decode steps between two visits of the host
    draft      k proposed tokens of a row, which one step verifies

Random keys: a row's tokens depend on its own key and its logits alone, never on its slot, on the
order or number of rows, or on other rows.

    key       = fold_in(fold_in(seed key, purpose), step)      `run_key`
    row key   = fold_in(key, row id)                           `row_keys`
    token key = fold_in(row key, position of the token in its sequence)
"""

from typing import TYPE_CHECKING

from tpu_rl import lazy

if TYPE_CHECKING:
    from tpu_rl.sampler.batch_sampler import OnFinished, OnVerified, StopAt, sample
    from tpu_rl.sampler.cache_ops import take_rows
    from tpu_rl.sampler.config import SamplerConfig, SegmentConfig, Speculation, Thinking
    from tpu_rl.sampler.conversation_sampler import (
        ConversationSampler,
        Turn,
        TurnRequest,
        common_prefix,
    )
    from tpu_rl.sampler.partial import (
        PartialCompletion,
        partial_completions,
    )
    from tpu_rl.sampler.text_scores import Score, Scores, text_scorer
    from tpu_rl.sampler.token_sampling import invert_cdf, row_keys, run_key, sample_tokens

lazy.exports(__name__, __file__)
