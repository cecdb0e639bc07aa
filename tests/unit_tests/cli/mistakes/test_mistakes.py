# SPDX-License-Identifier: Apache-2.0
"""A hundred mistakes, each named in one sentence before the first step, with an exit code and no traceback."""

import shutil

import pytest

from megatron.bridge.cli.main import main
from tests.unit_tests.cli.mistakes import places
from tests.unit_tests.cli.mistakes.table import MISTAKES, RUN
from tests.workers import forget_model_parallel, leave


@pytest.fixture(scope="module")
def tmp(tmp_path_factory):
    """The files of ``places``, with a checkpoint of a run and a damaged copy of it."""
    folder = tmp_path_factory.mktemp("mistakes")
    places.make(folder)
    assert main([*RUN, f"checkpoint.save={folder}/saved"]) == 0
    shutil.copytree(folder / "saved", folder / "damaged")
    data = max((folder / "damaged").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-10])
    yield folder
    forget_model_parallel()


def test_there_are_a_hundred():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 100


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_mistake_is_named(mistake, tmp, capfd):
    capfd.readouterr()
    code, err = _run([argument.replace("{tmp}", str(tmp)) for argument in mistake.arguments], capfd)
    assert code in (1, 2)
    words = [word.replace("{tmp}", str(tmp)) for word in mistake.words]
    said = [line for line in err.splitlines() if "error: " in line]
    assert len(said) <= 4, f"a mistake that breaks several rules breaks few: {err}"
    assert any(all(word in line for word in words) for line in said), (words, err)
    assert "Traceback" not in err
    assert "step 1/" not in err, "training began"


def _run(arguments, capfd):
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse
        code = end.code
    finally:
        leave()
    return code, capfd.readouterr().err
