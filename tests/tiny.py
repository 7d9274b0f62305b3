"""Tiny models, random experience and plain second ways to compute: what the tests share. Nothing here imports
tpu_rl.models, so that the mathematics is proved without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_rl import packing
from tpu_rl.needs import RoleSpec
from tpu_rl.types import (
    Array,
    Completions,
    Demonstrations,
    Experience,
    Model,
    Pairs,
    Params,
    Policy,
    QExamples,
    Role,
    Roles,
    Rollout,
    Sampling,
)

VOCABULARY = 11
SAMPLING = Sampling(temperature=0.7, max_new_tokens=6)

Groups = Sequence[tuple[int, Sequence[int]]]
"""(prompt length, completion lengths) a group."""

GROUPS: Groups = ((3, (4, 1, 6, 0)), (5, (2, 3, 5)), (1, (6, 6, 2, 3)), (2, (3, 3, 4)), (2, (1, 2, 1)))
"""18 completions, one of them without actions. In rows of 24 slots they fill four."""

ROWS = {"row_length": 24, "micro_batch_rows": 2}
"""How `experience` packs GROUPS: two micro-batches of two rows."""

ROLES = ("policy", "reference")

QUICKLY = {"xla_backend_optimization_level": 0}
"""jax.jit's compiler_options for programs that take longer to compile than to run."""


# --- models ------------------------------------------------------------------------------------------------------


def _numpy_random(key: Array) -> np.random.Generator:
    """numpy's numbers need no compilation."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def recomputing(
    hidden: Callable[[Params, Array, Array, Array, Array], Array], logits: Callable[[Params, Array], Array]
) -> Policy:
    """Continues sequences by `hidden` of all tokens so far: the cache holds tokens, and a slot is a position."""

    def init_cache(params: Params, rows: int, length: int) -> Any:
        del params
        return {"lengths": jnp.zeros(rows, jnp.int32), "tokens": jnp.zeros((1, rows, length), jnp.int32)}

    def extend(
        params: Params, cache: Any, tokens: Array, positions: Array, branch_ids: Array, commit: Array
    ) -> tuple[Array, Any]:
        lengths, kept = cache["lengths"], cache["tokens"][0]
        slots = jnp.broadcast_to(jnp.arange(kept.shape[1])[None, :], kept.shape)
        held = jnp.int32(slots < lengths[:, None])
        old = (kept, slots, held, jnp.zeros_like(kept))
        new = (tokens, positions, jnp.ones_like(tokens), branch_ids)
        both = (jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True))
        at = lengths[:, None] + jnp.arange(tokens.shape[1])[None, :]
        written = kept.at[jnp.arange(len(kept))[:, None], at].set(tokens, mode="drop")
        after = {"lengths": lengths + commit, "tokens": written[None]}
        return logits(params, hidden(params, *both)[:, kept.shape[1] :]), after

    return Policy(init_cache, extend)


def attention_model(
    vocabulary: int = VOCABULARY, width: int = 8, positions: int = 64, outputs: int | None = None
) -> Model:
    """One layer of attention with the visibility rule of `types.Model`, in the dtype of its params.

    `outputs`: a head of so many numbers in place of the vocabulary.
    """

    def init(key: Array) -> Params:
        random = _numpy_random(key)

        def matrix(*shape: int) -> Array:
            return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]))

        return {
            "embedding": 3.0 * matrix(vocabulary, width),
            "position": 3.0 * matrix(positions, width),
            "norm": {"scale": 1.0 + 0.1 * matrix(width)},
            "attention": {name: matrix(width, width) for name in ("query", "key", "value")},
            "unembedding": 2.0 * matrix(width, outputs or vocabulary),
        }

    def hidden(params: Params, tokens: Array, positions: Array, segment_ids: Array, branch_ids: Array) -> Array:
        x = params["embedding"][tokens] + params["position"][positions]
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
        normed = jnp.einsum("rsd,d->rsd", normed, params["norm"]["scale"])
        query, key, value = (
            jnp.einsum("rsd,de->rse", normed, params["attention"][name]) for name in ("query", "key", "value")
        )
        same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
        prompt_or_own = (branch_ids[:, None, :] == 0) | (branch_ids[:, None, :] == branch_ids[:, :, None])
        slots = jnp.arange(tokens.shape[1])
        not_later = (slots[:, None] >= slots[None, :])[None]
        scores = jnp.einsum("rie,rje->rij", query, key) / np.sqrt(x.shape[-1])
        scores = jnp.where(same_segment & prompt_or_own & not_later, scores, -1e30)
        return x + jnp.einsum("rij,rje->rie", jax.nn.softmax(scores), value)

    def logits(params: Params, hidden: Array) -> Array:
        return jnp.einsum("...d,dv->...v", hidden, params["unembedding"])

    return Model("attention", init, hidden, logits, *recomputing(hidden, logits)[:2], axes=None)


def tabular_model(vocabulary: int, positions: int) -> Model:
    """Logits free for every (position, token): all policies over sequences of a one-token prompt and two tokens."""

    def init(key: Array) -> Params:
        return {"table": jnp.asarray(_numpy_random(key).normal(size=(positions, vocabulary, vocabulary)))}

    def hidden(params: Params, tokens: Array, positions: Array, segment_ids: Array, branch_ids: Array) -> Array:
        del segment_ids, branch_ids
        return params["table"][positions, tokens]

    def logits(params: Params, hidden: Array) -> Array:
        del params
        return hidden

    return Model("tabular", init, hidden, logits, *recomputing(hidden, logits)[:2], axes=None)


def role(model: Model, name: str) -> Role:
    """The model reading the params of the role `name`."""
    return Role(
        lambda params, rows: model.hidden(params[name], rows.tokens, rows.positions, rows.segment_ids, rows.branch_ids),
        lambda params, hidden: model.logits(params[name], hidden),
    )


def roles(model: Model) -> Roles:
    return {name: role(model, name) for name in ROLES}


def cast(specs: Mapping[str, RoleSpec]) -> tuple[Roles, Params]:
    """The roles that an algorithm's config asks for, on tiny models, with random params: no two begin alike."""
    roles, params = {}, {}
    for name, spec in specs.items():
        per_token = spec.outputs_per_token and spec.outputs_per_token * VOCABULARY
        model = attention_model(outputs=spec.outputs or per_token)
        roles[name] = role(model, name)
        seed = ROLES.index(name) if name in ROLES else zlib.crc32(name.encode()) % 2**31
        params[name] = model.init(jax.random.key(seed))
        if spec.trunk_of is not None:
            roles[name] = Role(roles[spec.trunk_of].hidden, roles[name].logits)
            params[name] = {"unembedding": params[name]["unembedding"]}
    return roles, params


def init_params(model: Model, seed: int = 0) -> Params:
    """Random params of every role."""
    return {name: model.init(jax.random.key(10 * seed + i)) for i, name in enumerate(ROLES)}


def train_policy(path: str) -> bool:
    """The `training.Trainable` of full fine-tuning."""
    return path.startswith("policy/")


def plain_distributions(model: Model, params: Params, tokens: Array, temperature: float = 1.0) -> Array:
    """tokens [N, T] -> [N, T - 1, V] log-probabilities of the next token: a row a completion, all logits at once."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    branches = jnp.zeros_like(tokens)
    hidden = model.hidden(params, tokens, positions, branches + 1, branches)
    return jax.nn.log_softmax(model.logits(params, hidden[:, :-1]) / temperature)


def plain_log_probs(model: Model, params: Params, tokens: Array, temperature: float = 1.0) -> Array:
    """tokens [N, T] -> [N, T]: log_softmax, then gather; zero for first tokens."""
    every = plain_distributions(model, params, tokens, temperature)
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


# --- experience --------------------------------------------------------------------------------------------------


def texts(
    random: np.random.Generator, groups: Groups, columns: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [N, T], action_mask [N, T], group_id [N]), random but for the groups' common prompts.

    The third token of a completion of at least five is no action: the output of a tool.
    """
    lengths = [(prompt, completion) for prompt, completions in groups for completion in completions]
    columns = columns or max(map(sum, lengths))
    tokens = random.integers(1, VOCABULARY, (len(lengths), columns)).astype(np.int32)
    group_id = np.repeat(np.arange(len(groups), dtype=np.int32), [len(completions) for _, completions in groups])
    column = np.arange(columns)[None]
    start, length = (np.array(x)[:, None] for x in zip(*lengths, strict=True))
    first_of_group = np.searchsorted(group_id, group_id)
    tokens = np.where(column < start, tokens[first_of_group], tokens)
    tokens = np.where(column < start + length, tokens, 0)
    tool_output = (column == start + 2) & (length >= 5)
    return tokens, (column >= start) & (column < start + length) & ~tool_output, group_id


def rollout(seed: int = 0, groups: Groups = GROUPS, columns: int | None = None) -> Rollout:
    """Random ragged completions with random rewards and old log-probs; those of the limit's length are truncated."""
    random = np.random.default_rng(seed)
    tokens, action_mask, group_id = texts(random, groups, columns)
    lengths = np.array([length for _, completions in groups for length in completions])
    log_probs = np.where(action_mask, -1.0 - random.random(tokens.shape), 0.0)
    return Rollout(
        tokens=jnp.asarray(tokens),
        action_mask=jnp.asarray(action_mask),
        log_probs=jnp.asarray(log_probs),
        behaviour_log_probs=jnp.asarray(log_probs),
        rewards=jnp.asarray(np.where(action_mask, random.normal(size=tokens.shape), 0.0)),
        group_id=jnp.asarray(group_id),
        policy_step=jnp.zeros(len(tokens), jnp.int32),
        birth_key=jnp.zeros((len(tokens), 2), jnp.uint32),
        truncated=jnp.asarray(lengths == SAMPLING.max_new_tokens),
        scored=jnp.asarray(lengths > 0),
    )


def sampled_near(data: Rollout, model: Model, policy: Params, noise: float, seed: int = 0) -> Rollout:
    """The rollout as if sampled by a policy whose log-probs are off `policy`'s by `noise` (0: on policy)."""
    log_probs = plain_log_probs(model, policy, data.tokens, SAMPLING.temperature)
    log_probs += noise * np.random.default_rng(seed).normal(size=log_probs.shape).astype(log_probs.dtype)
    log_probs = jnp.where(data.action_mask, log_probs, 0.0)
    return data.replace(log_probs=log_probs, behaviour_log_probs=log_probs)


def demonstrations(seed: int = 0, groups: Groups = GROUPS, columns: int | None = None) -> Demonstrations:
    tokens, action_mask, group_id = texts(np.random.default_rng(seed), groups, columns)
    return Demonstrations(jnp.asarray(tokens), jnp.asarray(action_mask), jnp.arange(len(group_id), dtype=jnp.int32))


PAIRS: Groups = ((3, (4, 1)), (5, (2, 3)), (1, (6, 6)), (2, (3, 4)), (2, (1, 2)))
"""Groups of two, for `pairs`. They fill rows as GROUPS do, so that one program serves both."""


def pairs(seed: int = 0, groups: Groups = PAIRS, columns: int | None = None) -> Pairs:
    """Random pairs; now the first, now the second of them is preferred, by a random margin."""
    random = np.random.default_rng(seed)
    tokens, action_mask, group_id = texts(random, groups, columns)
    first = np.concatenate([[True], group_id[1:] != group_id[:-1]])
    return Pairs(
        tokens=jnp.asarray(tokens),
        action_mask=jnp.asarray(action_mask),
        group_id=jnp.asarray(group_id),
        preferred=jnp.asarray(first == (group_id % 3 > 0)),
        margin=jnp.asarray(random.random(len(groups))[group_id]),
        reference_log_probs=jnp.asarray(np.where(action_mask, -1.0 - random.random(tokens.shape), 0.0)),
    )


def completions(seed: int = 0, groups: Groups = GROUPS, columns: int | None = None) -> Completions:
    """Random completions, every second group of them the policy's own."""
    tokens, action_mask, group_id = texts(np.random.default_rng(seed), groups, columns)
    return Completions(*map(jnp.asarray, (tokens, action_mask, group_id, group_id % 2 == 0)))


def q_examples(seed: int = 0, groups: Groups = GROUPS, columns: int | None = None) -> QExamples:
    """Random texts whose tokens earn 0 or 1, a whole row the same."""
    random = np.random.default_rng(seed)
    tokens, action_mask, group_id = texts(random, groups, columns)
    returns = np.where(action_mask, random.integers(0, 2, (len(tokens), 1)), 0).astype(float)
    return QExamples(*map(jnp.asarray, (tokens, action_mask, group_id, returns)))


def experience(data: Any, shared_prompts: bool = True, **cut: int) -> Experience:
    """The data laid out as ROWS says, or as `cut` does; without shared prompts every completion has its own."""
    group_id = np.asarray(data.group_id) if shared_prompts else np.arange(len(data.group_id))
    return Experience(data, packing.lay_out(np.asarray(data.action_mask), group_id, **(ROWS | cut)))
