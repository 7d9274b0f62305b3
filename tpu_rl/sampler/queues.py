"""The order in which each device decodes its rows, and the contexts that it prefills for them."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from tpu_rl.sampler import slots
from tpu_rl.sampler.config import SamplerConfig
from tpu_rl.sampler.requests import DecodeRequest, PoolContexts
from tpu_rl.sampler.slots import Queue


class DeviceQueues:
    """The rows of each of D devices, in the order in which they take slots.

    Devices get contiguous blocks of rows, so that a group is on one device or few. Resumed rows
    come first, then rows with high limits, which may become longest.

    A device decodes its rows from one pool of contexts after another. A pool has at most as many
    prompts as there are slots, so that it takes less memory than the slots. Resumed rows have pools
    of their own: only these are as wide as the longest context, and they hold no more tokens than a
    pool of prompts.

    If so few rows are decoded at once that all are drafted by look-up, the rows of a prompt are
    decoded one after another.
    """

    def __init__(self, request: DecodeRequest, config: SamplerConfig, mesh: Mesh | None):
        rows = np.arange(len(request.limits))
        self.request = request
        self.devices = slots.device_count(mesh)
        prompts, self._group_size = config.shapes_of or (
            len(request.prompts.lengths),
            request.group_size,
        )
        num_rows = prompts * self._group_size
        self.rows_per_device = _ceil_div(num_rows, self.devices)
        """Rows of a device's outputs, of which the call may have fewer."""
        self.slots_per_device = _ceil_div(min(config.max_num_seqs, num_rows), self.devices)
        self._own_rows = _ceil_div(len(rows), self.devices)
        device, row = np.divmod(rows, self._own_rows)
        self.places = device * self.rows_per_device + row
        """[N] int: each row's index in the outputs of all devices."""
        self._is_resumed = request.num_sampled > 0
        self._prompt_of_context = np.arange(len(request.contexts.lengths))
        self._prompt_of_context[request.context] = rows // request.group_size
        self._orders: list[np.ndarray] = []
        """Of each device, its rows in the order in which they take slots."""
        for device in range(self.devices):
            block = rows[device * self._own_rows : (device + 1) * self._own_rows]
            order = block[np.lexsort((-request.limits[block], ~self._is_resumed[block]))]
            self._orders.append(order[~request.ended[order]])

        prompt_width = request.prompts.tokens.shape[1]
        context_width = request.contexts.tokens.shape[1]
        prompts_per_device = _ceil_div(prompts, self.devices)
        most_prompts = min(self.slots_per_device, prompts_per_device)
        most_contexts = max(1, most_prompts * prompt_width // context_width)
        # All pools of a kind have the same size, so that one program serves them all.
        self._prompts_per_pool = self._pool_size(~self._is_resumed, self.slots_per_device)
        if config.shapes_of is not None:
            prompt = np.arange(num_rows) // self._group_size
            starts = range(0, num_rows, self.rows_per_device)
            blocks = [prompt[start : start + self.rows_per_device] for start in starts]
            most = max(len(np.unique(block)) for block in blocks)
            self._prompts_per_pool = _even_part(most, self.slots_per_device)
        self._contexts_per_pool = self._pool_size(self._is_resumed, most_contexts)

        all_slots = self.slots_per_device * self.devices
        looks_up = config.speculation.model is None and config.speculation.drafts(all_slots)
        if looks_up and request.outputs is None:
            self._orders = [self._one_by_one(order) for order in self._orders]
        self._num_done = np.zeros(self.devices, np.int32)
        """[D]: rows that took slots from earlier queues."""
        self._sizes = np.zeros(self.devices, np.int32)
        """[D]: rows of the current queues."""
        self.contexts = np.zeros(0, int)
        """[D * contexts]: of the current pool, the index of each context in its table."""
        self.is_context = np.zeros(0, bool)
        """[D * contexts]: False for places of the pool that no context takes."""

    def _pool_size(self, is_of_kind: np.ndarray, most: int) -> int:
        """Return the number of contexts of a pool, at most `most`, for rows of a kind [N].

        A device's contexts are divided evenly between as few pools as possible.
        """
        counts = [
            len(np.unique(self.request.context[order[is_of_kind[order]]])) for order in self._orders
        ]
        contexts = max(1, *counts)
        if self.request.outputs is not None and contexts > 4:
            # With resumed rows, the number differs in each call. It is rounded up, by at most a
            # quarter, to one of few numbers, so that few programs are compiled.
            step = max(1, 1 << (contexts.bit_length() - 3))
            contexts = _ceil_div(contexts, step) * step
        return _even_part(contexts, most)

    def _one_by_one(self, order: np.ndarray) -> np.ndarray:
        """Reorder rows so that those of a prompt are decoded one after another.

        Each row then finds what those before it have written. Rows still go by their limits first,
        and the prompts of a pool stay together.
        """
        group_size = self.request.group_size
        _, first, prompt = np.unique(order // group_size, return_index=True, return_inverse=True)
        # Prompts are numbered in the order in which they first appear.
        appearance = np.argsort(np.argsort(first))[prompt]
        pool = appearance // self._prompts_per_pool
        return order[np.lexsort((order % group_size, pool, -self.request.limits[order]))]

    def num_waiting(self, num_taken: np.ndarray) -> np.ndarray:
        """Return [D] the number of rows without a slot yet.

        `num_taken` [D] rows of the current queues have taken slots.
        """
        return np.array([len(order) for order in self._orders]) - self._num_done - num_taken

    def global_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return [B] the indices among all N rows of the rows [B] of devices' outputs.

        `rows` has equally many entries for each device. An index that is no row becomes the last.
        """
        starts = np.arange(self.devices) * self._own_rows
        start = np.repeat(starts, len(rows) // self.devices)
        return np.minimum(start + rows, len(self.request.limits) - 1)

    def needs_next_pool(self, num_taken: np.ndarray) -> bool:
        """Return True if the queue of a device is empty that has rows for another pool.

        `num_taken` [D] rows of the current queues have taken slots.
        """
        has_more = self.num_waiting(self._sizes) > 0
        return bool(np.any((num_taken >= self._sizes) & has_more))

    def next_pool(self, num_taken: np.ndarray) -> tuple[PoolContexts, Queue]:
        """Return the contexts [D * contexts] of the next pool, and the queue of its rows.

        `num_taken` [D] rows of the current queues have taken slots. The others are in the new queue
        again.
        """
        request = self.request
        self._num_done = self._num_done + num_taken
        waiting = [order[done:] for order, done in zip(self._orders, self._num_done, strict=True)]
        is_resumed = [bool(self._is_resumed[order[0]]) for order in waiting if len(order)]
        if all(is_resumed):
            waiting = [order[self._is_resumed[order]] for order in waiting]
        # If only some devices have resumed rows left, the prompts of the others are read in the
        # width of contexts, because all devices run the same program.
        most = self._prompts_per_pool
        table = request.prompts
        if any(is_resumed):
            most = self._contexts_per_pool
            table = request.contexts
        entries = min(self.rows_per_device, most * self._group_size)
        contexts = np.zeros((self.devices, most), int)
        is_context = np.zeros((self.devices, most), bool)
        rows = np.zeros((self.devices, entries), np.int32)
        context = np.zeros((self.devices, entries), np.int32)
        for device, order in enumerate(waiting):
            # As many rows as there are before the first context that the pool has no room for.
            row_contexts = request.context[order[:entries]]
            _, first = np.unique(row_contexts, return_index=True)
            is_first = np.isin(np.arange(len(row_contexts)), first)
            count = int(np.sum(np.cumsum(is_first) <= most))
            unique, context[device, :count] = np.unique(row_contexts[:count], return_inverse=True)
            contexts[device, : len(unique)] = unique
            is_context[device, : len(unique)] = True
            rows[device, :count] = order[:count]
            self._sizes[device] = count
        flat_rows = rows.reshape(-1)
        start = np.repeat(np.arange(self.devices) * self._own_rows, entries)
        queue = Queue(
            row=np.maximum(flat_rows - start, 0).astype(np.int32),
            context=context.reshape(-1),
            num_sampled=request.num_sampled[flat_rows],
            limit=request.limits[flat_rows],
            key=request.keys(flat_rows),
            size=self._sizes.copy(),
            has_more=self.num_waiting(self._sizes) > 0,
        )
        self.contexts = contexts.reshape(-1)
        self.is_context = is_context.reshape(-1)
        # Places that no context takes are read as contexts of one token.
        lengths = np.where(self.is_context, table.lengths[self.contexts], 1)
        prompt = self._prompt_of_context[self.contexts]
        # The cache of a context may lack the prompt's last token. A row's first decode step writes
        # it before it reads.
        shared = np.where(self.is_context, request.prompts.lengths[prompt], 0)
        prompts = np.stack([prompt, shared], axis=1).astype(np.int32)
        return PoolContexts(table.tokens[self.contexts], lengths, prompts), queue


def _even_part(contexts: int, most: int) -> int:
    """Return the contexts of each of the fewest pools that hold them all, `most` in each."""
    return _ceil_div(contexts, _ceil_div(contexts, most))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
