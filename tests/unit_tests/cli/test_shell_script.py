# SPDX-License-Identifier: Apache-2.0
"""Shell scripts of Megatron-LM are read without running them; the error has the command that prints arguments."""

import shlex
import subprocess

import pytest

from megatron.bridge.cli.main import main
from megatron.bridge.cli.migrate.megatron_lm import translate
from megatron.bridge.cli.migrate.shell_script import ShellScript
from megatron.bridge.utils.errors import UserError

SCRIPT = """#!/bin/bash
# Runs a small model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=2   # of one machine
NUM_NODES=${SLURM_NNODES_OF_TEST:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<path>
DATA_PATH="${2:-corpus}"
mkdir -p "$CHECKPOINT_PATH"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 4   # few
    --hidden-size 64
    # --hidden-size 128
    --num-attention-heads 4
    --seq-length 32
    --max-position-embeddings 32
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size $((WORLD_SIZE * 4)) --train-iters 5 --lr 1e-3)
DATA_ARGS=("--split 99,1,0")
TRAINING_ARGS+=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127)
{extra}
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    "${TRAINING_ARGS[@]}" ${DATA_ARGS[@]} \\
    --save $CHECKPOINT_PATH
echo done
"""
BRANCH = """if [ "$GPUS_PER_NODE" = 2 ]; then
    TRAINING_ARGS+=(--bf16)
fi
"""


def script(extra=""):
    return SCRIPT.replace("{extra}", extra)


def words_of_shell(text, tmp_path, *arguments):
    """What bash gives to torchrun."""
    path = tmp_path / "train.sh"
    path.write_text(f'torchrun() {{ printf "%s\\n" "$@"; exit; }}\n{text}')
    done = subprocess.run(
        ["bash", path, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    return done.stdout.split()


def test_command_is_that_of_the_shell(tmp_path):
    command = ShellScript(script(), "train.sh", ["runs/one"]).command()
    expected = words_of_shell(script(), tmp_path, "runs/one")
    assert shlex.split(command)[1:] == expected
    settings = translate(command).translation.settings
    assert settings["train.global_batch_size"] == "16"
    assert settings["checkpoint.save"] == "runs/one"


def test_command_line_of_the_tool(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(script())
    assert main(["from-megatron-lm", f"{path} runs/one", "--overrides"]) == 0
    assert "model.num_layers=4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "arguments", "reason"),
    [
        (BRANCH, ["one"], r"\$TRAINING_ARGS is assigned in a branch or a loop"),
        ("", [], r"\$1 is an argument of the script"),
        (
            "TRAINING_ARGS+=(--seed $(date +%s))",
            ["one"],
            r"\$\(date \+%s\) is the output of a command",
        ),
        ("TRAINING_ARGS+=(--seed $SEED_OF_NOBODY)", ["one"], r"\$SEED_OF_NOBODY has no value"),
    ],
)
def test_what_only_the_shell_knows_is_refused(extra, arguments, reason):
    with pytest.raises(UserError, match=f"train.sh: {reason}.*> command.txt"):
        ShellScript(script(extra), "train.sh", arguments).command()


def test_the_way_out_works(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(script(BRANCH))
    with pytest.raises(UserError) as error:
        ShellScript(path.read_text(), path.name, ["one"]).command()
    remedy = str(error.value).partition("bash -c '")[2].partition("' > ")[0]
    done = subprocess.run(
        ["bash", "-c", remedy, "bash", "one"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    settings = translate(done.stdout.replace("done", "")).translation.settings
    assert "bf16: true" in settings["mixed_precision"]


def test_script_without_a_command_is_refused():
    with pytest.raises(UserError, match=r"no command with a Python script.*command\.txt"):
        ShellScript("A=1\n", "train.sh").command()


def test_scripts_of_other_models_are_refused():
    with pytest.raises(UserError, match=r"pretrain_vlm\.py: .*--hf-model"):
        translate("torchrun --nproc-per-node 1 pretrain_vlm.py --num-layers 2")
