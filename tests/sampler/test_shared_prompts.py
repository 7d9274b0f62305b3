"""Rows of one prompt share its reads in decode steps, with the kernels interpreted."""

import jax
import numpy as np
import pytest

from tests.fixtures.decoders import tiny
from tests.fixtures.sampling import KEY, V, trigram
from tpu_rl import models
from tpu_rl.models import kv_cache
from tpu_rl.models.attention import decode_kernel, gpu_decode
from tpu_rl.sampler import SamplerConfig, SegmentConfig, partial_completions, sample
from tpu_rl.sampler.partial import PartialCompletion
from tpu_rl.sampler.queues import DeviceQueues
from tpu_rl.sampler.requests import make_request
from tpu_rl.types import SHARED_PROMPT

LONG = [np.random.default_rng(seed).integers(2, 130, 130 + seed).tolist() for seed in range(2)]
CONFIG = SamplerConfig(
    3, samples_per_prompt=4, max_num_seqs=6, prompt_length=144, segments=SegmentConfig(4, 8, 64)
)
TOKENS = ("tokens", "log_probs", "behaviour_log_probs")


@pytest.fixture
def group_sizes(monkeypatch):
    """The sizes of groups in each call of `find_groups` or, of tiles, of `find_tiles`."""
    sizes = []
    find_groups = decode_kernel.find_groups
    find_tiles = gpu_decode.find_tiles

    def recorded_groups(*arguments):
        groups = find_groups(*arguments)
        jax.debug.callback(lambda size: sizes.append(size[size > 0].tolist()), groups.size)
        return groups

    def recorded_tiles(*arguments):
        tiles = find_tiles(*arguments)
        jax.debug.callback(lambda tile: sizes.append(np.bincount(tile).tolist()), tiles.tile)
        return tiles

    monkeypatch.setattr(decode_kernel, "find_groups", recorded_groups)
    monkeypatch.setattr(decode_kernel, "MAX_BLOCK", 128)
    monkeypatch.setattr(gpu_decode, "find_tiles", recorded_tiles)
    return sizes


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kernel", "first_sizes"),
    [
        # Of the TPU, rows 0 and 1 in one half of the slots, 2 and 3 in the other.
        pytest.param("kernel", [2, 2], id="tpu"),
        pytest.param("gpu_decode", [2, 4], id="gpu"),
    ],
)
def test_sharing_changes_no_completion(group_sizes, kernel, first_sizes):
    """Two rows of four each continue an earlier call. Slots are refilled within a segment."""
    made = tiny("llama3")

    def decode(model, **arguments):
        limits = [2, 3, 3, 2, 3, 1, 3, 2]
        return sample(
            models.policy(model), made.params, LONG, KEY, CONFIG, limits=limits, **arguments
        )

    wanted = decode(made.model)
    begun = partial_completions(wanted, np.zeros(8, bool))
    resumed = [
        one._replace(**{name: getattr(one, name)[:1] for name in TOKENS}) if row in (0, 4) else None
        for row, one in enumerate(begun)
    ]
    assert not group_sizes
    model = models.variant(made.model, attention={kernel: "interpreted"})
    actual = decode(model, resumed=resumed)
    jax.effects_barrier()
    assert group_sizes[0] == first_sizes
    np.testing.assert_array_equal(actual.tokens, wanted.tokens)
    np.testing.assert_allclose(actual.log_probs, wanted.log_probs, atol=1e-5)


def test_contexts_share_what_their_prompts_share():
    """A resumed row begins with its prompt."""
    policy, _ = trigram()
    params = {"table": np.zeros((V, V, V), np.float32)}
    one = np.ones(1)
    begun = PartialCompletion(np.array([2]), one, one, np.zeros(2, np.uint32), 0, False, False)
    config = SamplerConfig(4, prompt_length=4)
    request = make_request(
        policy, params, [[3, 4], [5, 6, 7]], KEY, config, None, None, [begun, None]
    )
    queues = DeviceQueues(request, config, None)
    pools = []
    taken = np.zeros(1, np.int32)
    while queues.needs_next_pool(taken):
        contexts, queue = queues.next_pool(taken)
        pools.append((contexts.lengths.tolist(), contexts.prompts.tolist()))
        taken = queue.size
    assert pools == [([3], [[0, 2]]), ([3], [[1, 3]])]


def test_only_caches_of_the_kernel_know_prompts():
    plain = tiny("llama3").model
    for model in (
        models.with_attention_kernel(plain, "interpreted"),
        models.variant(plain, attention={"gpu_decode": "triton"}),
    ):
        assert kv_cache.init_cache(model.config, 3, 128)[SHARED_PROMPT].shape == (2, 3)
        exact = models.with_exact_sampling(model)
        assert SHARED_PROMPT not in kv_cache.init_cache(exact.config, 3, 128)
    assert SHARED_PROMPT not in kv_cache.init_cache(plain.config, 3, 128)
