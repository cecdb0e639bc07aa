# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests and answers in the encoding of protocol buffers.

The numbers of fields are those of the client. A mapping is a repeated message with ``key`` and ``value``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from megatron.bridge.utils.errors import UserError

MEDIA_TYPE = "application/x-protobuf"
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_READ_DTYPES = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32}
_PACKAGE = "megatron_bridge_training_service"

_Field = tuple[int, str]
_MESSAGES: dict[str, dict[str, _Field]] = {
    "SparseTensor": {
        "values": (1, "bytes"),
        "crow_indices": (2, "bytes"),
        "col_indices": (3, "bytes"),
    },
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "SparseTensor"),
        "dtype": (3, "int32"),
        "shape": (4, "repeated int64"),
    },
    "TensorEntry": {"key": (1, "string"), "value": (2, "Tensor")},
    "EncodedText": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "EncodedText"), "image": (2, "bytes"), "dmel": (3, "bytes")},
    "Datum": {
        "model_input": (1, "repeated Chunk"),
        "loss_fn_inputs": (2, "repeated TensorEntry"),
        # where tokens come from, which no loss here uses
        "model_input_spans": (3, "repeated bytes"),
        "loss_fn_input_spans": (4, "repeated bytes"),
    },
    "NumberEntry": {"key": (1, "string"), "value": (2, "double")},
    "Setting": {"number": (1, "double"), "text": (2, "string")},
    "SettingEntry": {"key": (1, "string"), "value": (2, "Setting")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "repeated Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "repeated NumberEntry"),
        "forward_only": (6, "bool"),
        "loss_fn_settings": (7, "repeated SettingEntry"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "repeated int64"),
    },
    "BatchedTensorEntry": {"key": (1, "string"), "value": (2, "BatchedTensor")},
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "repeated BatchedTensorEntry"),
        "num_datums": (3, "int64"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "repeated NumberEntry"),
    },
    "TopLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "repeated SampledSequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
    },
}
_STOP_REASONS = {"stop": 0, "length": 1}
_NO_LOGPROB = -99999.0
"""Marks cells of top log-probabilities without an entry."""


def _make_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            is_repeated = kind.startswith("repeated ")
            type_name = kind.removeprefix("repeated ")
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            if type_name in _MESSAGES:
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{type_name}"
            else:
                field.type = getattr(field, f"TYPE_{type_name.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _make_classes()


def read_forward_backward(body: bytes) -> dict[str, Any]:
    """Return a request for gradients in the form of its JSON.

    Raises:
        UserError: The body is damaged, or has fields that are not known.
    """
    request = _CLASSES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
        data = [_read_datum(datum) for datum in request.data]
    except (DecodeError, ValueError) as error:  # ValueError: half a number
        raise UserError(
            "the body is not a ForwardBackwardRequest in protocol buffers: send JSON instead"
        ) from error
    settings: dict[str, Any] = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_settings:
        settings[entry.key] = entry.value.text or entry.value.number
    return {
        "model_id": request.model_id,
        "seq_id": request.seq_id or None,
        "forward_only": request.forward_only,
        "unknown_fields": _find_unknown_fields(request),
        "forward_backward_input": {
            "loss_fn": request.loss_fn,
            "loss_fn_config": settings,
            "data": data,
        },
    }


def _read_datum(datum: Any) -> dict[str, Any]:
    chunks = []
    for chunk in datum.model_input:
        if chunk.image or chunk.dmel:
            chunks.append({"type": "image" if chunk.image else "dmel"})
        else:
            tokens = np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
            chunks.append({"type": "encoded_text", "tokens": tokens})
    inputs = {entry.key: _read_tensor(entry.key, entry.value) for entry in datum.loss_fn_inputs}
    return {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}


def _read_tensor(key: str, tensor: Any) -> dict[str, Any]:
    dtype = _READ_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{key} has dtype number {tensor.dtype}: send float32 or int64")
    dtype_name = "float32" if dtype is np.float32 else "int64"
    answer: dict[str, Any] = {"dtype": dtype_name, "shape": list(tensor.shape) or None}
    if tensor.HasField("sparse_csr"):
        sparse = tensor.sparse_csr
        answer["data"] = np.frombuffer(sparse.values, dtype).tolist()
        answer["sparse_crow_indices"] = np.frombuffer(sparse.crow_indices, np.int64).tolist()
        answer["sparse_col_indices"] = np.frombuffer(sparse.col_indices, np.int64).tolist()
    else:
        answer["data"] = np.frombuffer(tensor.dense, dtype).tolist()
    return answer


def _find_unknown_fields(message: Any) -> list[str]:
    """Return the fields of a message, and of those in it, that this module does not know."""
    name = message.DESCRIPTOR.name
    unknown = [f"{name}.{field.field_number}" for field in UnknownFieldSet(message)]
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in value if field.is_repeated else [value]:
            unknown += _find_unknown_fields(part)
    return sorted(set(unknown))


def write_forward_backward(
    logprobs: Sequence[Sequence[float]], metrics: Mapping[str, float]
) -> bytes:
    """Encode the log-probabilities of each row, and metrics."""
    lengths = [len(row) * 4 for row in logprobs]
    output = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    entry = record.fields.add(key="logprobs")
    entry.value.data = b"".join(np.asarray(row, np.float32).tobytes() for row in logprobs)
    entry.value.offsets = np.cumsum([0, *lengths], dtype=np.int64).tobytes()
    entry.value.dtype = _FLOAT32
    for key, value in metrics.items():
        output.metrics.add(key=key, value=value)
    return output.SerializeToString()


def write_sample(answer: Mapping[str, Any]) -> bytes:
    """Encode an answer to a request for samples, given as its JSON."""
    response = _CLASSES["SampleResponse"]()
    for sequence in answer["sequences"]:
        message = response.sequences.add(
            stop_reason=_STOP_REASONS[sequence["stop_reason"]],
            tokens=np.asarray(sequence["tokens"], np.int32).tobytes(),
            logprobs=np.asarray(sequence["logprobs"], np.float32).tobytes(),
        )
        if sequence.get("topk_logprobs") is not None:
            message.topk_sampled_logprobs.CopyFrom(_write_top(sequence["topk_logprobs"]))
    if answer.get("prompt_logprobs") is not None:
        # None becomes NaN
        prompt_logprobs = np.asarray(answer["prompt_logprobs"], np.float32)
        response.prompt_logprobs = prompt_logprobs.tobytes()
    if answer.get("topk_prompt_logprobs") is not None:
        response.topk_prompt_logprobs.CopyFrom(_write_top(answer["topk_prompt_logprobs"]))
    response.prompt_cache_hit_tokens = answer["prompt_cache_hit_tokens"]
    return response.SerializeToString()


def _write_top(positions: Sequence[Sequence[tuple[int, float]] | None]) -> Any:
    width = max((len(position or ()) for position in positions), default=0)
    tokens = np.zeros((len(positions), width), np.int32)
    logprobs = np.full((len(positions), width), _NO_LOGPROB, np.float32)
    for row, position in enumerate(positions):
        for column, (token, logprob) in enumerate(position or ()):
            tokens[row, column] = token
            logprobs[row, column] = logprob
    return _CLASSES["TopLogprobs"](
        token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=width, length=len(positions)
    )
