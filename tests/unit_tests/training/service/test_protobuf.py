# SPDX-License-Identifier: Apache-2.0
"""Bodies in protocol buffers: the bytes are those that ``tinker`` 0.38 writes and reads."""

import pytest

from megatron.bridge.training.service import protobuf
from megatron.bridge.utils.errors import UserError

REQUEST = bytes.fromhex(
    "0a096d3a747261696e3a3010031a88010a100a0e0a0c05000000060000000700000012210a0a616476616e746167657312130a0c"
    "0000803f00000000000080bf1801220103121f0a086c6f6770726f627312130a0c000080bf000000c0000000bf180122010312300a"
    "0d7461726765745f746f6b656e73121f0a180600000000000000070000000000000008000000000000001802220103220370706f2a"
    "1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e83f30013a1f0a12636c69705f6c6f775f7468726573686f6c"
    "64120909000000000000e83f"
)
OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080bf000000c000"
    "0040c01218000000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d11000000000000f8"
    "3f"
)
SAMPLE = bytes.fromhex(
    "0a400801120803000000040000001a08000000bf000080be22280a1003000000090000000400000000000000121"
    "0000000bf000000c0000080be804fc3c71802200212080000c07f000080bf2004"
)


def test_a_request_for_gradients():
    found = protobuf.read_forward_backward(REQUEST)
    assert found.pop("forward_backward_input") == {
        "loss_fn": "ppo",
        "loss_fn_config": {"clip_low_threshold": 0.75},
        "data": [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
                "loss_fn_inputs": {
                    "advantages": {"dtype": "float32", "shape": [3], "data": [1.0, 0.0, -1.0]},
                    "logprobs": {"dtype": "float32", "shape": [3], "data": [-1.0, -2.0, -0.5]},
                    "target_tokens": {"dtype": "int64", "shape": [3], "data": [6, 7, 8]},
                },
            }
        ],
    }
    facts = {"model_id": "m:train:0", "seq_id": 3, "forward_only": True, "unknown_fields": []}
    assert found == facts


def test_fields_of_later_clients_are_named_and_damage_is_refused():
    later = REQUEST + bytes.fromhex("a20603616263")  # field 100
    assert protobuf.read_forward_backward(later)["unknown_fields"] == ["ForwardBackwardRequest.100"]
    with pytest.raises(UserError, match="not a ForwardBackwardRequest"):
        protobuf.read_forward_backward(REQUEST[:-3])
    with pytest.raises(UserError, match="not a ForwardBackwardRequest"):
        protobuf.read_forward_backward(bytes.fromhex("1a090a070a050a0305000000"[:22]))


def test_answers():
    assert protobuf.write_forward_backward([[-1.0, -2.0], [-3.0]], {"loss:sum": 1.5}) == OUTPUT
    sequence = {
        "stop_reason": "length",
        "tokens": [3, 4],
        "logprobs": [-0.5, -0.25],
        "topk_logprobs": [[(3, -0.5), (9, -2.0)], [(4, -0.25)]],
    }
    answer = {
        "sequences": [sequence],
        "prompt_logprobs": [None, -1.0],
        "prompt_cache_hit_tokens": 4,
    }
    assert protobuf.write_sample(answer) == SAMPLE
