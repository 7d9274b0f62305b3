"""Bodies in protocol buffers: the data of forward and backward passes, and their answers.

Names and numbers of the fields are those of the package `tinker` 0.38.0 (tinker_public.proto). The
messages are made here when the module is loaded, so that the server does not need that package.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from tpu_rl.serving.protocol import ApiError
from tpu_rl.train import packing

LENGTH = 1
"""The value of `SampledSequence.stop_reason` of a completion that reached its limit; 0: stopped."""
DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}
"""Numbers of `dtype`."""
FLOAT32 = 1
INT64 = 2
MOST_DATA = 2**14
"""Sequences of a pass."""
MOST_NUMBERS = 2**24
"""Numbers of a pass: tokens, each with as many targets as the one with the most."""

_SCHEMA = """
Chunk: 1 encoded_text Text, 2 image Image, 3 dmel Dmel
Text: 1 tokens bytes
Image: 1 data bytes
Dmel: 1 dmel bytes
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
Tensor: 1 dense bytes, 2 sparse_csr SparseCsr, 3 dtype int32, 4 shape int64*
Input: 1 key string, 2 value Tensor
Span: 1 prompt_tokens bytes, 2 sampled_tokens bytes
Datum: 1 model_input Chunk*, 2 loss_fn_inputs Input*, 3 model_input_spans Span*, \
4 loss_fn_input_spans Span*
Number: 1 key string, 2 value double
Setting: 1 number double, 2 text string
NamedSetting: 1 key string, 2 value Setting
ForwardBackwardRequest: 1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, \
5 loss_fn_config Number*, 6 forward_only bool, 7 loss_fn_config_v2 NamedSetting*
Batched: 1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
Field: 1 key string, 2 value Batched
ArrayRecord: 1 type_tag string, 2 fields Field*, 3 num_datums int64
ForwardBackwardOutput: 1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, \
3 metrics Number*
TopkLogprobs: 1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32
SampledSequence: 1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, \
4 topk_sampled_logprobs TopkLogprobs
SampleResponse: 1 sequences SampledSequence*, 2 prompt_logprobs bytes, \
3 topk_prompt_logprobs TopkLogprobs, 4 prompt_cache_hit_tokens int32, \
5 target_prompt_logprobs Tensor
"""
"""Message: number, name and type of each field; * marks repeated ones. Maps are repeated pairs, and
enumerations numbers, which is the same on the wire."""


def _messages() -> dict[str, Any]:
    """Return the classes of the messages in `_SCHEMA`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = dict(kinds.Type.items())
    file = descriptor_pb2.FileDescriptorProto(
        name="tpu_rl_tinker.proto", package="tpu_rl_tinker", syntax="proto3"
    )
    for line in _SCHEMA.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            number, field_name, kind = field.split()
            descriptor = message.field.add(name=field_name, number=int(number))
            is_repeated = kind.endswith("*")
            descriptor.label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
            scalar = scalars.get(f"TYPE_{kind.rstrip('*').upper()}")
            descriptor.type = kinds.TYPE_MESSAGE if scalar is None else scalar
            if scalar is None:
                descriptor.type_name = f".{file.package}.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


_CLASSES = {name.rpartition(".")[2]: cls for name, cls in _messages().items()}


def make(name: str, **fields: Any) -> Any:
    """Return a message of `_SCHEMA`."""
    return _CLASSES[name](**fields)


# --- requests ---


class Datum(NamedTuple):
    """A sequence to be scored: n tokens, and numbers of each."""

    tokens: np.ndarray
    """[n] int32."""
    inputs: dict[str, np.ndarray]
    """Inputs of the loss by name, with `target_tokens`: [n] or [n, K], int64 or float32."""


class ForwardBackward(NamedTuple):
    """A pass over data."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    settings: dict[str, float | str]
    is_forward_only: bool

    @property
    def size(self) -> int:
        """Bytes of the data."""
        of_data = (
            500 + datum.tokens.nbytes + sum(values.nbytes for values in datum.inputs.values())
            for datum in self.data
        )
        return sum(of_data)


def parse_forward_backward(body: bytes) -> Any:
    """Return the message of a body, with its `model_id` and `seq_id`.

    Raises ApiError if the body is no request at all.
    """
    message = make("ForwardBackwardRequest")
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise ApiError(400, "the body is no ForwardBackwardRequest") from None
    return message


def forward_backward(message: Any) -> ForwardBackward:
    """Return the request of a message.

    Raises ApiError if it is wrong, or its tensors, which may be sparse, were too large.
    """
    _require_known(message, "the request")
    _require_size(message)
    settings: dict[str, float | str] = {pair.key: pair.value for pair in message.loss_fn_config}
    for pair in message.loss_fn_config_v2:
        is_text = bool(pair.value.text)
        settings[pair.key] = pair.value.text if is_text else pair.value.number
    data = [_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)]
    if not data:
        raise ApiError(400, "the request has no data", "data")
    is_forward_only = message.forward_only
    return ForwardBackward(
        message.model_id, message.seq_id, data, message.loss_fn, settings, is_forward_only
    )


def _require_size(message: Any) -> None:
    """Raise ApiError if the numbers of a request, dense and as wide as the widest, are too many."""
    tokens = 0
    widest = 1
    dense = 0
    for datum in message.data:
        tokens += sum(len(chunk.encoded_text.tokens) // 4 for chunk in datum.model_input)
        for pair in datum.loss_fn_inputs:
            shape = list(pair.value.shape)
            if pair.value.HasField("sparse_csr") or len(shape) > 1:
                widest = max(widest, *shape[1:])
                dense += math.prod(max(size, 0) for size in shape)
    most = max(dense, tokens * packing.power_of_two(min(widest, MOST_NUMBERS)))
    if len(message.data) > MOST_DATA or most > MOST_NUMBERS:
        raise ApiError(
            400,
            f"the request has {len(message.data)} data with {most} numbers, of {MOST_DATA} and "
            f"{MOST_NUMBERS} at most; send several",
            "data",
        )


def _require_known(message: Any, place: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise ApiError(
            400,
            f"{place} has the field number {unknown[0].field_number}, which this server does not "
            "know: the client is newer than tinker 0.38.0",
        )


def _datum(message: Any, place: str) -> Datum:
    _require_known(message, place)
    tokens = []
    for chunk in message.model_input:
        _require_known(chunk, place)
        if not chunk.HasField("encoded_text"):
            raise ApiError(400, f"{place} has an image or audio, but the model reads text", place)
        tokens.append(_from_bytes(chunk.encoded_text.tokens, "<i4", place))
    # What sampled a token is recorded for one loss only, which is refused by its name.
    inputs = {
        pair.key: _tensor(pair.value, f"{place}.{pair.key}") for pair in message.loss_fn_inputs
    }
    return Datum(np.concatenate([np.zeros(0, np.int32), *tokens]), inputs)


def _from_bytes(data: bytes, dtype: str, place: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise ApiError(400, f"{place} has half a number", place)
    return np.frombuffer(data, dtype)


def _tensor(message: Any, place: str) -> np.ndarray:
    _require_known(message, place)
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise ApiError(400, f"{place} has the unknown type {message.dtype}", place)
    sparse = message.sparse_csr if message.HasField("sparse_csr") else None
    values = _from_bytes(sparse.values if sparse else message.dense, dtype, place)
    shape = list(message.shape) or [len(values)]
    if len(shape) > 2 or min(shape) < 0 or max(shape) > 2**31 or shape[-1] > 2**20:
        raise ApiError(400, f"{place} has the shape {shape}", place)
    if sparse:
        return dense_of(values, sparse.crow_indices, sparse.col_indices, shape, place)
    if len(values) != np.prod(shape):
        raise ApiError(400, f"{place} has {len(values)} numbers, but the shape {shape}", place)
    return values.reshape(shape)


def dense_of(
    values: np.ndarray, crow: bytes, col: bytes, shape: list[int], place: str, fill: int = 0
) -> np.ndarray:
    """Return the dense tensor [n, K] of compressed rows, with `fill` elsewhere."""
    starts = _from_bytes(crow, "<i8", place)
    columns = _from_bytes(col, "<i8", place)
    is_valid = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and (np.diff(starts) >= 0).all()
        and starts[0] == 0
        and starts[-1] == len(columns) == len(values)
        and ((columns >= 0) & (columns < shape[1])).all()
    )
    if not is_valid:
        raise ApiError(400, f"{place} is no sparse tensor of shape {shape}", place)
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return dense


# --- answers ---


def forward_backward_output(log_probs: list[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Return the answer to a pass: log-probs [n] or [n, K] of each datum, and metrics."""
    records = []
    # A record has arrays of one width.
    for _, group in itertools.groupby(log_probs, key=lambda values: values.shape[1:]):
        group = list(group)
        offsets = np.cumsum([0, *(values.size * 4 for values in group)]).astype("<i8")
        data = b"".join(values.astype("<f4").tobytes() for values in group)
        batched = make(
            "Batched",
            data=data,
            offsets=offsets.tobytes(),
            dtype=FLOAT32,
            trailing_shape=list(group[0].shape[1:]),
        )
        field = make("Field", key="logprobs", value=batched)
        records.append(make("ArrayRecord", fields=[field], num_datums=len(group)))
    return make(
        "ForwardBackwardOutput",
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=records,
        metrics=[make("Number", key=key, value=value) for key, value in metrics.items()],
    ).SerializeToString()


def top_log_probs(ids: np.ndarray, log_probs: np.ndarray) -> Any:
    """Return the k most likely tokens [n, k] of each place, and their log-probs."""
    return make(
        "TopkLogprobs",
        token_ids=ids.astype("<i4").tobytes(),
        logprobs=log_probs.astype("<f4").tobytes(),
        k=ids.shape[1],
        length=len(ids),
    )
