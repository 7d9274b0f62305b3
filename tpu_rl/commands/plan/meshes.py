"""Choices for the devices of a run by estimates: rows of a micro-batch, and the mesh for sampling.

A training mesh that shards weights along their width would gather all of them for every decoded
token. So a run samples on a mesh of its own. Where --sampling.tensor-parallel does not name it,
`choose_sampling` takes the tensor parallelism with the least time of a decode step (see
`tpu_rl.planner.decode_time`) among those whose decoding weights and cache fit on a device beside
the train state. It computes with shapes and compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from tpu_rl import cost_model, models
from tpu_rl.commands import compose, roles
from tpu_rl.commands.config import ExperimentConfig, MeshConfig
from tpu_rl.commands.expert_axis import MATRICES, PASSES, expert_devices
from tpu_rl.commands.micro_batches import row_devices, with_micro_batch
from tpu_rl.commands.plan import plan_steps
from tpu_rl.commands.plan.plan_steps import StagePlan
from tpu_rl.cost_model import CHIPS
from tpu_rl.cost_model.costs import Link
from tpu_rl.losses import log_probs
from tpu_rl.models import Select
from tpu_rl.models.attention import decode
from tpu_rl.models.attention.cudnn import nvidia_capability
from tpu_rl.models.decoder import expert_stacks, param_shapes
from tpu_rl.models.moe import experts
from tpu_rl.planner import decode_time, estimates, update_memory
from tpu_rl.planner.sampling import copied_weights
from tpu_rl.planner.steps import chip_bytes
from tpu_rl.rollout import weights
from tpu_rl.runtime import processes
from tpu_rl.sampler import SegmentConfig
from tpu_rl.sampler.config import TensorParallel
from tpu_rl.train import sharding, update_step
from tpu_rl.types import Model

TRAIN_MESH: Literal["train-mesh"] = "train-mesh"

TEMPORARIES = 0.05
"""Share of a chip's memory that is left for what prefill and decoding compute: the planner's
examples take less."""

AS_FAST = 1.05
"""Decode steps whose times differ by less than this factor count as equally fast."""

CACHE_AXES = ("layers", "slots", "kv_heads", None, None)
LANES = 128


def choose(
    config: ExperimentConfig,
    model: Model,
    mesh: Mesh,
    memory: int | None,
    sampler_devices: tuple[Any, ...],
    samples: bool = True,
) -> tuple[ExperimentConfig, Model, list[str]]:
    """Choose all but the rows of a micro-batch, which are known by now.

    Args:
        memory: that of a device; None if it is unknown.
        samples: False if nothing is sampled.

    Returns:
        the configuration, the model in the type that devices compute in, and lines about what is
        not plain.
    """
    config, model, precision = choose_precision(config, model, mesh, memory)
    config = choose_logits(config, model, mesh, memory)
    config, products = choose_products(config, model, mesh, memory)
    decoding = ""
    if samples:
        config, decoding = choose_sampling(config, model, mesh, memory, sampler_devices)
    return config, model, [line for line in (precision, products, decoding) if line]


BASE_MEMORY = 0.6
"""Share of a GPU's memory that frozen weights may fill before they are quantized."""

BASE_BYTES: dict[str, float] = {"int8": 1.0, "nf4": 0.5625}
"""Type of frozen matrices -> bytes of a weight, with its scales."""


def choose_precision(
    config: ExperimentConfig, model: Model, mesh: Mesh, memory: int | None
) -> tuple[ExperimentConfig, Model, str]:
    """Return the configuration and the model for GPUs without bfloat16, and a line about them.

    GPUs older than compute capability 8.0 (T4, V100) multiply bfloat16 in float32, after converting
    weights for every use, and have none of the kernels of attention. So they compute in float32. A
    base under adapters that would fill most of the memory is quantized. On other devices nothing
    changes, and the line is empty.
    """
    device = mesh.devices.flat[0]
    if not 0 < nvidia_capability(device) < 8 or config.model.attention == "cudnn":
        return config, model, ""
    settings = replace(config.model, dtype="float32", attention="xla")
    line = f"{device.device_kind} has no bfloat16: float32 (--model.dtype), XLA's attention"
    lora = settings.lora
    if lora.rank and lora.weight_dtype is None and memory is not None:
        weights = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model.config)))
        size = jax.numpy.dtype(settings.param_dtype).itemsize
        room = BASE_MEMORY * memory
        if weights * size > room:
            fitting = [name for name, size in BASE_BYTES.items() if weights * size <= room]
            base = [*fitting, "nf4"][0]
            settings = replace(settings, lora=replace(lora, base_dtype=base))
            line += f", a base in {base} (--model.lora.base-dtype)"
    model = models.decoder(replace(model.config, dtype="float32"))
    return replace(config, model=settings), model, line


UPDATE_MEMORY = 0.9
"""Share of a device's memory that an update may fill by the estimate, which may be 6 % too low."""

MICRO_BATCHES = 32
"""Micro-batches of a step of full length, if each has more than `BatchConfig.rows_at_once` rows.
The last one is half empty in the mean, which is 5 % of a step whose texts have a third of that."""


def choose_rows(
    config: ExperimentConfig, model: Model, mesh: Mesh, memory: int | None
) -> tuple[ExperimentConfig, str]:
    """Return the configuration with a value for --batch.micro-batch-rows, and a line about it.

    The number is one row for each of the devices that share rows, twice that, four times ...: the
    largest whose update fits by estimate, with whole logits if those of one row do, but no more
    than make `MICRO_BATCHES` of a step. More rows gather weights and add gradients less often. TPUs
    that gather a mixture's experts take all rows of a step, if these fit. A number that is given
    stays. Where the memory is unknown, the number is `BatchConfig.rows_at_once`. The line is empty
    in both cases.
    """
    if config.batch.micro_batch_rows or memory is None:
        return with_micro_batch(config, config.batch.rows_at_once), ""
    devices = row_devices(mesh)
    one_row, model, _ = choose_precision(config, model, mesh, memory)
    one_row = choose_logits(with_micro_batch(one_row, devices), model, mesh, memory)
    needed = _largest_update(one_row, model, mesh)
    length = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    rows_of_step = math.ceil(_texts_of_step(config) / max(1, config.batch.row_length // length))
    most = max(rows_of_step // MICRO_BATCHES, config.batch.rows_at_once)
    rows = devices
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    if is_tpu and model.config.moe is not None and mesh.shape["expert"] == 1 < mesh.shape["fsdp"]:
        whole = _whole_step(config, devices)
        if needed(whole) <= UPDATE_MEMORY * memory:
            rows = whole * devices
    while 2 * rows <= most and needed(2 * rows // devices) <= UPDATE_MEMORY * memory:
        rows *= 2
    share = f"{rows // devices} on each of {devices} devices"
    line = f"micro-batches of {rows} rows, {share} (--batch.micro-batch-rows)"
    return with_micro_batch(config, rows), line


def _texts_of_step(config: ExperimentConfig) -> int:
    batch = config.batch
    return math.ceil(batch.prompts * batch.group_size / batch.num_minibatches)


def _whole_step(config: ExperimentConfig, devices: int) -> int:
    """Return the rows of a device that hold a step of texts of full length, which share prompts."""
    batch = config.batch
    sampling = config.sampling
    shared = sampling.max_prompt_tokens if batch.share_prefixes else 0
    text_tokens = sampling.max_prompt_tokens + sampling.max_new_tokens - shared
    of_row = max(1, (batch.row_length - shared) // text_tokens)
    return math.ceil(_texts_of_step(config) / of_row / devices)


def gathers_experts(config: ExperimentConfig, model: Model, devices: Sequence[Any]) -> bool:
    """Return True if a run with no mesh of its own gathers the experts of a mixture.

    Then one micro-batch has all rows of a step, if that fits. The weights of each layer come twice
    and their gradients go once, which computation hides in part. Otherwise tokens travel to experts
    and back in each pass of each row, and wait. The times that are compared are those of the links.
    """
    mixture = model.config.moe
    chip = next((chip for chip in CHIPS.values() if chip.kind == devices[0].device_kind), None)
    count = len(devices)
    whole = _whole_step(config, count)
    # A resumed run has the rows that it chose.
    if mixture is None or chip is None or config.batch.micro_batch_rows not in (0, whole * count):
        return False
    tokens = config.batch.row_length
    expert = expert_devices(model.config, count, tokens)
    mesh = compose.make_mesh(MeshConfig(), devices)
    torus = estimates.torus(mesh, chip)
    width = model.config.hidden_size * jax.numpy.dtype(model.config.dtype).itemsize
    shard = MATRICES * width * mixture.intermediate_size * mixture.num_experts // count
    gather = Link("all-gather", shard, tuple(range(count)), overlaps=True)
    rows = experts.exchanged_rows(tokens, mixture.experts_per_token, expert)
    exchange = Link("all-to-all", rows * width, tuple(range(expert)), overlaps=False)
    gathered = PASSES * cost_model.link_seconds(gather, torus)
    exchanged = 2 * PASSES * whole * cost_model.link_seconds(exchange, torus)
    memory = device_memory(mesh)
    if memory is None or gathered >= exchanged:
        return False
    return _largest_update(config, model, mesh)(whole) <= UPDATE_MEMORY * memory


def choose_logits(
    config: ExperimentConfig, model: Model, mesh: Mesh, memory: int | None
) -> ExperimentConfig:
    """Return the configuration with a value for --batch.whole-logits; a value that is given stays.

    On a mesh, a device has few rows, whose chunks are large (`log_probs.CHUNK_TOKENS`). The formula
    of the memory was compared with programs for TPUs only.
    """
    if config.batch.whole_logits != "auto" or mesh.size > 1 or memory is None:
        return config
    if mesh.devices.flat[0].platform != "tpu":
        return config
    whole = replace(config, batch=replace(config.batch, whole_logits="on"))
    if _largest_update(whole, model, mesh)(config.batch.rows_at_once) <= UPDATE_MEMORY * memory:
        return whole
    return replace(config, batch=replace(config.batch, whole_logits="off"))


WHOLE_PRODUCTS_MEMORY = 1.06
"""Estimate of an update above which its products get windows, as a share of a device's memory: for
an 8B on 16 chips of v5e it is 1.05, and the compiled program with whole products fills 0.96."""


def choose_products(
    config: ExperimentConfig, model: Model, mesh: Mesh, memory: int | None
) -> tuple[ExperimentConfig, str]:
    """Return the configuration with a value for --batch.whole-products where devices have windows,
    and a line if they get them. A value that is given stays."""
    if config.batch.whole_products != "auto" or not update_step.takes_windows(mesh):
        return config, ""
    rows = config.batch.rows_at_once // row_devices(mesh)
    needed = 0 if memory is None else _largest_update(config, model, mesh)(rows)
    fits = memory is None or needed <= WHOLE_PRODUCTS_MEMORY * memory
    chosen = replace(config.batch, whole_products="on" if fits else "off")
    line = (
        "" if fits else "products of training in windows, to save memory (--batch.whole-products)"
    )
    return replace(config, batch=chosen), line


def _largest_update(config: ExperimentConfig, model: Model, mesh: Mesh) -> Callable[[int], int]:
    """Return the function: rows of a device -> bytes of the stage with the largest update."""
    # The kernel is left out: it runs on the device.
    plain = replace(config, model=replace(config.model, attention="xla"))
    stages = [plan_steps.plan_stage(plain, stage, mesh, model) for stage in config.stages]
    return lambda rows: max(update_bytes(planned, rows) for planned in stages)


def update_bytes(planned: StagePlan, rows: int) -> int:
    """Return the bytes of a device during an update of `rows` rows of its own."""
    context = planned.context
    learning = compose.learning(context.config, planned.stage)
    trained, _ = update_step.partition(planned.state.params, learning.trainable)
    own_weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(trained)
    )
    sizes = context.mesh.shape
    learners = [
        context.models[name].config
        for name, spec in planned.stage.algorithm.roles.items()
        if spec.trainable and spec.trunk_of is None
    ]
    tokens = rows * context.config.batch.row_length // sizes["context"]
    whole = context.config.batch.whole_logits == "on"
    with jax.sharding.use_abstract_mesh(context.mesh.abstract_mesh):
        chunks = [
            None if whole else log_probs.tokens_at_once(decoder.num_outputs or decoder.vocab.size)
            for decoder in learners
        ]
    state = sum(plan_steps.state_bytes(planned).values())
    return state + max(
        update_memory.temporaries(decoder, own_weights, tokens, chunk, sizes)
        for decoder, chunk in zip(learners, chunks, strict=True)
    )


# --- the mesh for sampling ---


class _Need(NamedTuple):
    """Bytes of one chip during sampling."""

    steady: int
    """Train state, decoding weights, the longest cache, and the pool of prompts."""
    growing: int
    """The same, while the longest cache is filled from the one before it, leaf by leaf."""
    seconds: float | None
    """Time of a decode step, by `decode_time`; None if the devices' speed is unknown."""

    def fits(self, memory: int) -> bool:
        return max(self.steady + TEMPORARIES * memory, self.growing) <= memory


def device_memory(mesh: Mesh) -> int | None:
    """Return the bytes that a program may use on a device, or None if that is not known.

    It is the same number on all processes, which call this together.
    """
    kind = mesh.devices.flat[0].device_kind
    for chip in CHIPS.values():
        if chip.kind == kind:
            return chip.memory
    return processes.from_first(lambda: estimates.device_memory(jax.local_devices()[0]))


def choose_sampling(
    config: ExperimentConfig,
    model: Model,
    mesh: Mesh,
    memory: int | None,
    sampler_devices: tuple[Any, ...] = (),
) -> tuple[ExperimentConfig, str]:
    """Return the configuration with values for --sampling.tensor-parallel and
    --sampling.max-num-seqs, and a line about the first.

    The line is empty if there is one device, and says of a mixture of experts on TPUs if each token
    copies all experts. `memory` is that of a device; if it is None, the run samples on its training
    mesh, or with a tensor parallelism of 1 on devices that only sample.
    """
    config = _choose_slots(config, model, mesh, memory, sampler_devices)
    config, line = _choose_sampling(config, model, mesh, memory, sampler_devices)
    if line and _copies_experts(config, model, mesh, sampler_devices):
        line += "; each token copies all experts, and does not read those it needs in place"
    return config, line


SLOTS_MEMORY = 0.85
"""Share of a device's memory that the most slots may fill: evaluations also read the prompts of
their next pool beside full slots."""


FEW_SLOTS = 16
"""So many slots are not halved any more, whether they fit or not."""


MOST_OF_EVALUATION = 64
"""Slots for the sake of an evaluation, which is rarer than steps, if a step has fewer."""


def _completions(config: ExperimentConfig) -> int:
    """Return the completions that are decoded together: those of a step, or at least some."""
    of_step = config.batch.prompts * config.batch.group_size
    return max(of_step, min(config.evaluation.rows, MOST_OF_EVALUATION))


def _choose_slots(
    config: ExperimentConfig,
    model: Model,
    mesh: Mesh,
    memory: int | None,
    sampler_devices: tuple[Any, ...],
) -> ExperimentConfig:
    """Return the configuration with a value for --sampling.max-num-seqs.

    More slots take fewer decode steps, each of which reads the weights once.
    """
    if config.sampling.max_num_seqs or memory is None:
        return config
    stages = _stages_that_sample(config, model, mesh, sampler_devices)
    if not stages:
        return config
    own_tokens = roles.has_attention_kernel(config, mesh)
    devices = len(sampler_devices) or mesh.size
    given = config.sampling.tensor_parallel
    # The shapes of a train state that gathers its weights count no copy: that is the least.
    sizes: list[TensorParallel] = [given] if given is not None else [*_sizes(stages, devices)]

    def with_slots(rows: int) -> ExperimentConfig:
        return replace(config, sampling=replace(config.sampling, max_num_seqs=rows))

    def fits(rows: int) -> bool:
        planned = [
            stage._replace(context=stage.context._replace(config=with_slots(rows)))
            for stage in stages
        ]
        needs = (_need(planned, size, own_tokens) for size in sizes)
        return any(need.fits(int(SLOTS_MEMORY * memory)) for need in needs)

    rows = _completions(config)
    of_step = config.batch.prompts * config.batch.group_size
    while rows > FEW_SLOTS and not fits(rows):
        half = math.ceil(rows / 2)
        # A few slots less than completions would cost a step almost as many decode steps again.
        rows = of_step if half < of_step < rows else half
    return with_slots(rows)


def _copies_experts(
    config: ExperimentConfig, model: Model, mesh: Mesh, sampler_devices: tuple[Any, ...]
) -> bool:
    """Return True if decode steps copy the experts of each layer (see `decoder.expert_stacks`)."""
    if model.config.moe is None or not roles.has_attention_kernel(config, mesh):
        return False
    model = models.with_attention_kernel(model)
    sampled = config.sampling.weight_dtype
    weight_dtype = config.model.lora.weight_dtype if sampled == "computed" else sampled
    model = models.variant(model, weight_dtype=weight_dtype)
    params = models.cast_to_compute_dtype(param_shapes(model.config), model.config.dtype)
    if isinstance(config.sampling.tensor_parallel, int):
        if sampler_devices:
            mesh = sharding.make_mesh(fsdp=len(sampler_devices), devices=sampler_devices)
        mesh = sharding.sampling_mesh(mesh, config.sampling.tensor_parallel)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        stacks = expert_stacks(model.config, params, config.sampling.slots)
    return stacks is None


def _choose_sampling(
    config: ExperimentConfig,
    model: Model,
    mesh: Mesh,
    memory: int | None,
    sampler_devices: tuple[Any, ...],
) -> tuple[ExperimentConfig, str]:
    """Choose the tensor parallelism of decoding; return the configuration, and a line about it."""
    if mesh.size == 1 and not sampler_devices:
        return config, ""
    size = config.sampling.tensor_parallel
    reason = ""
    if size is None:
        size, reason = _tensor_parallel(config, model, mesh, memory, sampler_devices)
        config = _with(config, size)
    if reason is None:
        return config, ""
    count = len(sampler_devices) or mesh.size
    spread = (
        f"data {count // size} x tensor {size}" if isinstance(size, int) else "on the training mesh"
    )
    if not sampler_devices:
        return config, f"decoding: {spread}{': ' * bool(reason)}{reason}"
    if config.sampling.during_updates:
        return config, (f"decoding: up to {config.batches_at_once} batches at once, during updates")
    return config, (
        f"decoding: {spread}, on devices that only sample{', ' * bool(reason)}{reason}; "
        f"{mesh.size} for learning"
    )


def _tensor_parallel(
    config: ExperimentConfig,
    model: Model,
    mesh: Mesh,
    memory: int | None,
    sampler_devices: tuple[Any, ...],
) -> tuple[TensorParallel, str | None]:
    """Return the tensor parallelism of decoding, and the reason, "" for none.

    The reason is None if nothing is sampled.
    """
    count = len(sampler_devices) or mesh.size
    if memory is None or count == 1:
        return 1 if sampler_devices else TRAIN_MESH, ""
    if not sampler_devices and config.model.exact_sampling:
        return TRAIN_MESH, "exact sampling adds up in the order of training"
    if not sampler_devices and all(mesh.shape[axis] == 1 for axis in sharding.RULES["embed"]):
        return TRAIN_MESH, "it gathers no weights"
    stages = _stages_that_sample(config, model, mesh, sampler_devices)
    if not stages:
        return TRAIN_MESH, None
    own_tokens = roles.has_attention_kernel(config, mesh)
    needs: dict[TensorParallel, _Need] = {
        size: _need(stages, size, own_tokens) for size in _sizes(stages, count)
    }
    size, reason = _fastest(needs, memory)
    if size is None and not sampler_devices:
        needs[TRAIN_MESH] = _need(stages, TRAIN_MESH, own_tokens)
        if needs[TRAIN_MESH].fits(memory):
            size = TRAIN_MESH
            reason = "no copy of the weights fits that need not be gathered for every token"
    if size is None:
        size = min(needs, key=lambda size: needs[size].growing)
        reason = "nothing fits, and this is the least"
    used = f"about {needs[size].steady / 2**30:.1f} of {memory / 2**30:.1f} GiB a device"
    return size, f"{reason} ({used}; --sampling.tensor-parallel)"


def _fastest(
    needs: Mapping[TensorParallel, _Need], memory: int
) -> tuple[TensorParallel | None, str]:
    """Return the fastest tensor parallelism that fits, and why; None if none does.

    It is the smallest of those that are as fast, or of all if no time is known: whatever is split
    further, devices must exchange.
    """
    fitting: dict[TensorParallel, _Need] = {
        size: need for size, need in needs.items() if need.fits(memory)
    }
    if not fitting:
        return None, ""
    most = AS_FAST * min(need.seconds or 0.0 for need in fitting.values())
    size, need = next(item for item in fitting.items() if (item[1].seconds or 0.0) <= most)
    if not need.seconds:
        return size, "the smallest tensor parallelism that fits"
    return size, f"the fastest that fits, at least {1e3 * need.seconds:.1f} ms a token"


def _stages_that_sample(
    config: ExperimentConfig, model: Model, mesh: Mesh, sampler_devices: tuple[Any, ...] = ()
) -> list[StagePlan]:
    # cuDNN's trial is left out: it runs on the device.
    plain = replace(config, model=replace(config.model, attention="xla"))
    stages = [
        plan_steps.plan_stage(plain, stage, mesh, model, sampler_devices) for stage in config.stages
    ]
    return [planned for planned in stages if _reads(planned)]


def _with(config: ExperimentConfig, size: TensorParallel) -> ExperimentConfig:
    return replace(config, sampling=replace(config.sampling, tensor_parallel=size))


def _reads(planned: StagePlan) -> list[Select]:
    """Return the roles that a stage samples from, in rollouts or in evaluations."""
    context = planned.context
    stage = planned.stage
    reads = compose.read_for_evaluation(context, stage)
    if plan_steps.samples(stage):
        reads = [*compose.read_for_rollouts(context, stage), *reads]
    return list(dict.fromkeys(reads))


def _sizes(stages: Sequence[StagePlan], num_devices: int) -> list[int]:
    """Return the numbers of devices that can share the heads of every model that is sampled."""
    heads = [
        planned.context.models[select.name].config.attention.num_heads
        for planned in stages
        for select in _reads(planned)
        if select.name in planned.context.models
    ]
    common = math.gcd(num_devices, *heads)
    return [size for size in range(1, common + 1) if common % size == 0]


def _need(stages: Sequence[StagePlan], size: TensorParallel, own_tokens: bool) -> _Need:
    """Return the bytes of the fullest stage, and the time of the slowest.

    With `own_tokens`, each row reads its own tokens of the cache (see `decode_attention`).
    """
    needs = [_stage_need(planned, size, own_tokens) for planned in stages]
    times = [need.seconds for need in needs if need.seconds is not None]
    # Evaluations need more memory than rollouts with quantized weights.
    needs += [
        _stage_need(planned._replace(context=planned.context.unrounded()), size, own_tokens)
        for planned in stages
        if planned.context.weight_dtype is not None
        and compose.read_for_evaluation(planned.context, planned.stage)
    ]
    return _Need(
        steady=max(need.steady for need in needs),
        growing=max(need.growing for need in needs),
        seconds=max(times) if times else None,
    )


def _stage_need(planned: StagePlan, size: TensorParallel, own_tokens: bool) -> _Need:
    context = planned.context._replace(config=_with(planned.context.config, size))
    config = context.config
    layout = context.sampling_layout
    reads = _reads(planned)
    params = planned.state.params
    held = 0
    if config.sampling.during_updates:
        held = sum(plan_steps.state_bytes(planned).values())
    elif layout.training_mesh is None:
        params = weights.reshard_for_sampling(params, reads, layout)
        state = replace(planned.state, params=params)
        held = sum(plan_steps.state_bytes(planned._replace(context=context, state=state)).values())
    names = [select.name for select in reads if select.name in context.models]
    own_tokens &= not config.model.exact_sampling
    if own_tokens:
        tensor = layout.mesh.shape["tensor"]
        kernels = {
            name: models.with_attention_kernel(model, tensor=tensor)
            for name, model in context.models.items()
        }
        context = context._replace(models=kernels)
    policies = [context.policy(name) for name in names]
    configs = [context.sampling_model(name).config for name in names]
    read = weights.rollout_policy(policies[0], reads, layout).params(params)
    held += config.batches_at_once * chip_bytes(copied_weights(params, read))

    rows = min(config.sampling.slots, _completions(config))

    def cache_bytes(rows: int, tokens: int, lanes: int = LANES) -> list[int]:
        return [
            config.batches_at_once * size
            for policy in policies
            for size in _cache_bytes(policy, read, layout.mesh, rows, tokens, lanes)
        ]

    prompt_tokens = config.sampling.max_prompt_tokens
    longest = config.sampling.max_new_tokens
    steady = held + sum(cache_bytes(min(config.batch.prompts, rows), prompt_tokens))
    steady += sum(cache_bytes(rows, prompt_tokens + longest))
    full_cache = sum(cache_bytes(rows, prompt_tokens + longest, lanes=1))
    own_tokens &= all(decode.has_kernel(policy.attention) for policy in configs)
    # A row has half of its new tokens in the mean of its decode steps.
    filled = (prompt_tokens + longest / 2) / (prompt_tokens + longest) if own_tokens else 1.0
    seconds = decode_time.step_seconds(
        configs, [select(read) for select in reads], layout.mesh, rows, filled * full_cache
    )
    shorter = SegmentConfig().initial_cache_tokens
    if shorter >= longest:
        return _Need(steady, steady, seconds)
    while 2 * shorter < longest:
        shorter *= 2
    growing = steady + max(cache_bytes(rows, prompt_tokens + shorter))
    return _Need(steady, growing, seconds)


def _cache_bytes(
    policy: Any, params: Any, mesh: Mesh, rows: int, tokens: int, lanes: int
) -> list[int]:
    """Return the bytes of a cache's leaves on one device: of its share of rows and heads.

    On TPUs, widths are padded to a multiple of `lanes`, because programs may store them so.
    """
    devices = math.prod(mesh.shape[axis] for axis in sharding.rules(mesh)["slots"])
    rows = math.ceil(rows / devices) * devices
    cache = jax.eval_shape(lambda: policy.init_cache(params, rows, tokens))
    sizes = []
    for leaf in jax.tree.leaves(cache):
        if leaf.ndim == 1:
            continue
        axes = CACHE_AXES[: leaf.ndim]
        placement = NamedSharding(mesh, sharding.spec(axes, leaf.shape, mesh))
        *outer, width = placement.shard_shape(leaf.shape)
        if mesh.devices.flat[0].platform == "tpu":
            width = math.ceil(width / lanes) * lanes
        sizes.append(math.prod(outer) * width * leaf.dtype.itemsize)
    return sizes
