# SPDX-License-Identifier: Apache-2.0
"""Experts shared out over processes: each reads its own, and a Megatron checkpoint carries them to any layout."""

import pytest
from megatron.core import parallel_state

from megatron.bridge import AutoBridge
from megatron.bridge.cli.main import main
from megatron.bridge.models.hf_pretrained.safetensors_writer import Writer
from megatron.bridge.utils import unpickling
from tests.families import harness
from tests.families.rows import ROWS
from tests.workers import forget_model_parallel


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(name):
        if name not in made:
            made[name] = harness.make_reference(ROWS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return case


def what_is_held(case, layout):
    """Share of the checkpoint that this rank reads, and the experts whose weights it has."""
    bridge, model = harness.build(case, layout)
    tasks = bridge.plan(model).tasks
    experts = {task.mapping.hf_names[0].split(".")[5] for task in tasks if task.ep_rank is not None}
    mine = {
        int(task.mapping.hf_names[0].split(".")[5])
        for task in tasks
        if task.ep_rank is not None and task.param_weight is not None
    }
    size = sum(path.stat().st_size for path in case.checkpoint.glob("*.safetensors"))
    return bridge.hf_pretrained.state.bytes_read / size, len(experts), mine


def test_a_rank_reads_and_holds_its_own_experts_only(two_workers, cases):
    found = two_workers.run(what_is_held, cases("qwen3_moe_idle_experts"), "ep2")
    assert all(share < 0.6 for share, _, _ in found)
    assert [(total, mine) for _, total, mine in found] == [
        (30, set(range(15))),
        (30, set(range(15, 30))),
    ]


def written_by(case, layout, output):
    """Names of the tensors that this rank wrote."""
    bridge, model = harness.build(case, layout)
    names, write = [], Writer.write

    def noted(self, name, start, rows):
        names.append(name)
        write(self, name, start, rows)

    Writer.write = noted
    try:
        bridge.save_hf_pretrained(model, output, show_progress=False)
    finally:
        Writer.write = write
    return names


@pytest.mark.parametrize(
    ("layout", "workers"), [("ep2", "two_workers"), ("tp2ep2", "four_workers")]
)
def test_every_tensor_is_written_once_by_its_owner(request, cases, tmp_path, layout, workers):
    case = cases("mixtral")
    pool = request.getfixturevalue(workers)
    names = pool.run(written_by, case, layout, tmp_path / "out")
    assert harness.different_files(case, tmp_path / "out") == []
    first = {name for name in names[0] if ".experts." in name}
    assert first  # the other experts are written by another rank, not sent to the first
    everywhere = [name for rank in names for name in set(rank)]
    experts = [name for name in everywhere if ".experts." in name]
    assert len(experts) == len(set(experts)) > len(first)


def import_checkpoint(case, layout, megatron):
    bridge, model = harness.build(case, layout)
    bridge.save_megatron_model(model, megatron)


def export_checkpoint(case, layout, megatron, output):
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    overrides = {
        name: value for name, value in harness.LAYOUTS[layout].items() if "p2p" not in name
    }
    with unpickling.trusting(True):  # one row has a layer spec of its own
        model = bridge.load_megatron_model(megatron, mp_overrides=overrides, wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, output, show_progress=False)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "glm4_moe_next_tokens",
        "qwen3_moe_sequential",
        pytest.param(
            "ernie45_moe", marks=pytest.mark.slow
        ),  # corrections that Hugging Face stores as one row
        pytest.param(
            "granitemoe_biases", marks=pytest.mark.slow
        ),  # a bias of the output projection alone
    ],
)
@pytest.mark.parametrize(("first", "second"), [("ep2", "etp2"), ("etp2", "ep2"), ("ep2", "pp2")])
def test_across_layouts_through_a_megatron_checkpoint(
    two_workers, cases, tmp_path, name, first, second
):
    case = cases(name)
    two_workers.run(import_checkpoint, case, first, tmp_path / "megatron")
    two_workers.run(export_checkpoint, case, second, tmp_path / "megatron", tmp_path / "out")
    problems = [
        line
        for line in harness.different_files(case, tmp_path / "out")
        if "config.json" not in line
    ]
    assert problems == []


def streamed(case, layout):
    """Sums of all tensors as this rank receives them, in order."""
    bridge, model = harness.build(case, layout)
    assert parallel_state.get_expert_model_parallel_world_size() == 2
    found = bridge.export_hf_weights(model, show_progress=False)
    return [(name, weight.double().sum().item()) for name, weight in found]


def test_a_stream_gives_every_rank_all_experts(two_workers, cases):
    case = cases("mixtral")
    stored = harness.read_weights(case.checkpoint)
    expected = {name: weight.double().sum().item() for name, weight in stored.items()}
    for found in two_workers.run(streamed, case, "ep2"):
        assert len(found) == len(expected)
        assert dict(found) == expected
        numbers = [
            int(name.split(".")[5])
            for name, _ in found
            if "layers.0" in name and name.endswith("w2.weight")
        ]
        assert numbers == list(range(6))


def whole_experts(case, folder):
    """What differs after a conversion of a model whose user set its tensor-parallel size and nothing else."""
    bridge = AutoBridge.from_hf_pretrained(case.checkpoint)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size, provider.sequence_parallel = 2, True
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(model, folder / "out", show_progress=False)
    words = [
        "--hf-model",
        str(case.checkpoint),
        "--megatron-path",
        str(folder / "megatron"),
        "--no-progress",
    ]
    forget_model_parallel()
    codes = [main(["convert", "--tp", "2", *words])]
    codes.append(main(["export", "--tp", "2", *words, "--hf-path", str(folder / "streamed")]))
    return codes, [harness.different_files(case, folder / name) for name in ("out", "streamed")]


def test_experts_with_biases_are_whole_under_tensor_parallelism(two_workers, cases, tmp_path):
    case = cases("gpt_oss")
    for codes, problems in two_workers.run(whole_experts, case, tmp_path):
        assert codes == [0, 0]
        assert problems == [[], []]
