# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that names code does not run it; what checkpoints consist of is read as by pickle and torch."""

import io
import os
import pickle
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch

from megatron.bridge.checkpoint import loading
from megatron.bridge.cli.main import main
from megatron.bridge.utils import unpickling
from megatron.bridge.utils.unpickling import UntrustedPickleError

SAVED = Path("tests/fixtures/v0.1/pretrain/iter_0000003").resolve()


class Attack:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def attack(tmp_path):
    attack = Attack(tmp_path / "ran")
    yield attack
    assert not attack.folder.exists(), "code of the checkpoint ran"


@pytest.fixture
def checkpoint(tmp_path):
    """A copy without a manifest, as a stranger would send it: nothing is verified before it is read."""
    copy = shutil.copytree(SAVED, tmp_path / SAVED.name)
    (copy / "manifest.json").unlink()
    change_metadata(copy, lambda metadata: setattr(metadata.storage_meta, "save_id", None))
    return copy


def change_metadata(checkpoint, change):
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["checkpoint", "inspect"],
        ["checkpoint", "verify"],
        ["checkpoint", "diff", str(SAVED)],
    ],
)
def test_commands_refuse_a_metadata_file_that_names_code(checkpoint, attack, capsys, command):
    change_metadata(checkpoint, lambda metadata: setattr(metadata.storage_meta, "save_id", attack))
    assert main([*command, str(checkpoint)]) == 1
    said = capsys.readouterr()
    assert "posix.mkdir" in said.err + said.out
    assert "--trust-checkpoint" in said.err + said.out


def test_an_object_that_names_code_is_refused(checkpoint, attack):
    poisoned = io.BytesIO()
    torch.save([attack], poisoned)
    file = checkpoint / "__0_0.distcp"
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(poisoned.getvalue())

    def point_there(metadata):
        for key, place in metadata.storage_data.items():
            if key.fqn.startswith(loading.COMMON_STATE):
                place.offset, place.length = size, len(poisoned.getvalue())

    change_metadata(checkpoint, point_there)
    with pytest.raises(UntrustedPickleError, match="mkdir"):
        loading.load_common(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "builtins getattr",
        "builtins bytearray",
        "os system",
        "torch load",
        "torch.storage _load_from_bytes",
        "pathlib PosixPath.open",
        "torch.distributed.checkpoint.metadata dataclass",
    ],
)
def test_metadata_may_name_nothing_else(name):
    module, attribute = name.split()
    stream = io.BytesIO(
        b"\x80\x04" + b"".join(_text(word) for word in (module, attribute)) + b"\x93."
    )
    with pytest.raises(UntrustedPickleError, match=f"{module}.{attribute}"):
        unpickling.read_metadata(stream, "it")


def _text(word):
    return b"\x8c" + bytes([len(word)]) + word.encode()


def test_a_trusted_checkpoint_is_read_like_any_pickle(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"path": Attack(tmp_path / "ran")}, file)
    with unpickling.trusting(True):
        unpickling.read_torch(file, "it")
    assert (tmp_path / "ran").is_dir()
    with pytest.raises(UntrustedPickleError, match="mkdir"):
        unpickling.read_torch(file, str(file))


def test_plain_values_and_arrays_are_read(tmp_path):
    value = {
        "array": numpy.arange(3),
        "scalars": (1, 2.5, "text", None, True, b"bytes", 1 + 2j),
        "sets": {1, 2},
        "ordered": OrderedDict(a=torch.ones(2, dtype=torch.bfloat16)),
        "random": numpy.random.RandomState(1).get_state(),
    }
    unpickling.check_readable(value, "it")


def test_a_callback_whose_state_could_not_be_read_again_is_refused_when_it_is_saved():
    with pytest.raises(
        UntrustedPickleError, match=r"(?s)the state of callback Mine.*trust_checkpoint"
    ):
        unpickling.check_readable({"best": Attack("x")}, "the state of callback Mine")


def test_a_storage_inside_a_pickle_names_no_code(attack):
    poisoned = io.BytesIO()
    torch.save(attack, poisoned)
    data = (
        b"\x80\x04" + _text("megatron.core.safe_globals") + _text("safe_load_from_bytes") + b"\x93"
    )
    data += pickle.dumps(poisoned.getvalue(), 4)[2:-1] + b"\x85R."
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        unpickling.read_states(data, "it", "megatron.energon")
