# SPDX-License-Identifier: Apache-2.0
"""Records from every kind of source, and the same samples of them in memory, prepared, resumed and in parallel."""

import json
from dataclasses import replace

import datasets
import pytest
import torch

from megatron.bridge.data.builders.hf_dataset import HFDatasetConfig
from megatron.bridge.data.config import (
    BlendedDatasetConfig,
    DatasetRequest,
    FinetuningDatasetConfig,
)
from megatron.bridge.data.records import preparation as preparing
from megatron.bridge.data.records.encoding import FILLED, RecordEncoder
from megatron.bridge.data.records.preparation import EARLIER_VERSION, content_key, prepare
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.sources import (
    FileSource,
    HoldOutSource,
    HubSource,
    LimitedSource,
    RenamedSource,
)
from megatron.bridge.data.tokenizer import NullTokenizer
from megatron.bridge.recipes import smollm2_135m_finetune_config
from tests.refusals import refused

RECORDS = [
    {"prompt": f"{number} and ", "completion": "so on " * (number % 5 + 1)} for number in range(40)
]
RULES = EncodingRules(max_tokens=33)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "training.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def records_of(source):
    return [record for _, record in source.records()]


def test_all_files_hold_the_same_records(tmp_path, jsonl):
    table = datasets.Dataset.from_list(RECORDS)
    table.to_parquet(str(tmp_path / "table.parquet"))
    table.save_to_disk(tmp_path / "saved")
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    datasets.DatasetDict({"train": table, "extra": table.select([1])}).save_to_disk(
        tmp_path / "dict"
    )
    for path in (jsonl, tmp_path / "table.parquet", arrow):
        assert records_of(FileSource(path)) == RECORDS
    assert records_of(HubSource(str(tmp_path / "saved"), None, "train")) == RECORDS
    assert records_of(HubSource(str(tmp_path / "dict"), None, "extra")) == RECORDS[1:2]
    assert records_of(LimitedSource(FileSource(jsonl), 3)) == RECORDS[:3]
    with refused("test", "train, extra"):
        records_of(HubSource(str(tmp_path / "dict"), None, "test"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_by_name_is_loaded_and_divided(tmp_path, tokenizer, streaming):
    """A folder of files is the one kind of named data set that needs no hub."""
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "train.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in RECORDS)
    )
    config = HFDatasetConfig(
        dataset_name=str(tmp_path / "named"), seq_length=64, val_proportion=0.3, streaming=streaming
    )
    train, valid = (records_of(config.source(split)) for split in ("train", "valid"))
    assert sorted([*train, *valid], key=RECORDS.index) == RECORDS
    assert 4 <= len(valid) <= 20
    other = replace(config, seed=1)
    assert records_of(other.source("valid")) != valid
    built = config.build(DatasetRequest((4, 4, 4), tokenizer))
    assert (len(built.train), len(built.valid), built.test) == (4, 4, None)
    missing = replace(config, train_split="nothing")
    with refused(f"dataset.dataset_name={tmp_path / 'named'}", "split nothing"):
        records_of(missing.source("train"))


def test_parts_are_the_same_for_streams_of_any_length(jsonl):
    held_out = records_of(HoldOutSource(FileSource(jsonl), 0.25, 7, True))
    shorter = records_of(HoldOutSource(LimitedSource(FileSource(jsonl), 20), 0.25, 7, True))
    assert held_out[: len(shorter)] == shorter


def doubled(record, tokenizer):
    """An own form; every third record is left out."""
    if record["prompt"].startswith(("0", "3", "6", "9")):
        return None
    return {
        "input": record["prompt"] * 2,
        "output": record["completion"] + str(tokenizer.eos_token),
    }


def test_a_function_makes_records(jsonl, tokenizer):
    rules = replace(RULES, max_tokens=100, process_example_fn=doubled)
    prepared = prepare(FileSource(jsonl), RecordEncoder(tokenizer, rules))
    left = [record for record in RECORDS if doubled(record, tokenizer.hf)]
    assert len(prepared.samples) == len(left) < len(RECORDS)
    assert tokenizer.detokenize(prepared.samples[0].tokens).startswith(
        f"<s>{left[0]['prompt'] * 2}"
    )
    assert f"{len(RECORDS) - len(left)} dropped by process_example_fn" in "".join(
        prepared.report.lines()
    )


def same(one, other):
    """Equal samples and reports."""
    assert [
        part.tolist() for part in (one.samples.tokens, one.samples.trained, one.samples.bounds)
    ] == [
        part.tolist()
        for part in (other.samples.tokens, other.samples.trained, other.samples.bounds)
    ]
    assert one.report == other.report


@pytest.mark.parametrize("workers", [1, 2])
def test_prepared_samples_equal_those_in_memory(tmp_path, jsonl, tokenizer, monkeypatch, workers):
    monkeypatch.setattr(preparing, "PART_RECORDS", 7)
    rules = replace(RULES, max_tokens=20, truncation="drop")
    source = FileSource(jsonl)
    expected = prepare(source, RecordEncoder(tokenizer, rules))
    assert expected.report.dropped
    made = prepare(source, RecordEncoder(tokenizer, rules), tmp_path / "made", workers)
    same(made, expected)
    monkeypatch.setattr(preparing, "_write_samples", None)  # what is there is not made again
    same(prepare(source, RecordEncoder(tokenizer, rules), tmp_path / "made"), expected)
    assert [path.name for path in (tmp_path / "made").iterdir()] == [
        content_key(source, tokenizer, rules)
    ]


def test_an_interrupted_prepare_goes_on(tmp_path, jsonl, tokenizer, monkeypatch):
    monkeypatch.setattr(preparing, "PART_RECORDS", 7)
    source, tokenised = FileSource(jsonl), []
    write = preparing._write_part

    def counted(path, part):
        if len(tokenised) == 3:
            raise KeyboardInterrupt
        tokenised.append(path.name)
        write(path, part)

    monkeypatch.setattr(preparing, "_write_part", counted)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, RecordEncoder(tokenizer, RULES), tmp_path / "made")
    monkeypatch.setattr(
        preparing, "_write_part", lambda *args: (tokenised.append(args[0].name), write(*args))
    )
    made = prepare(source, RecordEncoder(tokenizer, RULES), tmp_path / "made")
    same(made, prepare(source, RecordEncoder(tokenizer, RULES)))
    assert tokenised == [f"{number:06}.npz" for number in range(6)], "each part was tokenised once"


def test_the_name_of_prepared_samples_follows_their_content(tmp_path, jsonl, tokenizer):
    source = FileSource(jsonl)
    keys = {
        content_key(source, tokenizer, rules)
        for rules in (
            RULES,
            replace(RULES, max_tokens=32),
            replace(RULES, train_on="everything"),
            replace(RULES, chat_template="{{ 1 }}"),
            replace(RULES, process_example_fn=doubled),
            replace(RULES, chat_template_options={"a": 1}),
        )
    }
    jsonl.write_text(jsonl.read_text().replace("1 and", "1 or"))
    assert len(keys | {content_key(source, tokenizer, RULES)}) == 7
    with refused("dataset.process_example_fn=", "source code", "dataset.prepared_dir"):
        content_key(
            source, tokenizer, replace(RULES, process_example_fn=eval("lambda record: record"))
        )
    with refused("dataset.streaming=True", "dataset.revision"):
        HubSource("a", None, "train", streaming=True).fingerprint()


def test_the_name_of_prepared_samples_stays(tmp_path):
    """Moving or renaming code must not make what earlier versions prepared unusable."""
    path = tmp_path / "training.jsonl"
    path.write_text('{"prompt": "1 2 ", "completion": "3"}\n')
    rules = EncodingRules(max_tokens=33, truncation="drop", chat_template_options={"a": 1})
    source, tokenizer = FileSource(path), NullTokenizer(50)
    earlier = content_key(source, tokenizer, rules, EARLIER_VERSION)
    assert earlier == "e1605339a84a69e2c53d2691"
    assert content_key(source, tokenizer, rules) == "3f1057734f2237275d55d8ef"


def test_damaged_sources_are_named(tmp_path, jsonl):
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "\xff"}')
    for name, part in (("bad.parquet", "parquet"), ("bad.jsonl:1", "UTF-8")):
        with refused(str(tmp_path / name), part):
            records_of(FileSource(tmp_path / name.removesuffix(":1")))
    with refused("a.csv", ".parquet"):
        records_of(FileSource(tmp_path / "a.csv"))
    (tmp_path / "training.parquet").touch()
    config = FinetuningDatasetConfig(seq_length=8, dataset_root=str(tmp_path))
    with refused("training.jsonl", "training.parquet", "remove or rename one"):
        config.source("train")


def test_a_blend_has_the_shares_of_its_weights_at_every_moment(tmp_path, tokenizer):
    parts = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for stem in ("training", "validation"):
            lines = [
                json.dumps({"prompt": f"{name}{number}", "completion": "x"}) + "\n"
                for number in range(5)
            ]
            (tmp_path / name / f"{stem}.jsonl").write_text("".join(lines))
        parts.append(
            FinetuningDatasetConfig(seq_length=16, dataset_root=str(tmp_path / name), do_test=False)
        )
    parts[1].do_validation = False
    config = BlendedDatasetConfig(seq_length=16, datasets=parts, weights=[3, 1])
    train, valid, test = config.build(DatasetRequest((40, 6, 6), tokenizer))
    assert test is None
    texts = [tokenizer.detokenize(train[place]["tokens"].tolist()) for place in range(40)]
    shares = torch.tensor([text.startswith("<s>a") for text in texts]).float()
    for count in range(1, 41):
        assert abs(shares[:count].sum() - 0.75 * count) <= 1
    assert len({text for text in texts[:20] if text.startswith("<s>b")}) == 5, (
        "an epoch of each part is whole"
    )
    assert all(
        tokenizer.detokenize(valid[place]["tokens"].tolist()).startswith("<s>a")
        for place in range(6)
    )
    parts[1].seq_length = 8
    assert any(
        "dataset.datasets" in problem and "seq_length" in problem for problem in config.problems()
    )


def test_columns_get_the_names_of_a_format(jsonl):
    renamed = RenamedSource(FileSource(jsonl), {"prompt": "input", "completion": "output"})
    expected = [{"input": record["prompt"], "output": record["completion"]} for record in RECORDS]
    assert [record for _, record in renamed.records()] == expected
    assert renamed.fingerprint() != FileSource(jsonl).fingerprint()
    with refused(f"{jsonl}:1", "no promt", "dataset.columns", "prompt, completion"):
        list(RenamedSource(FileSource(jsonl), {"promt": "input"}).records())
    with refused(f"{jsonl}:1", "completion", "dataset.columns"):
        list(RenamedSource(FileSource(jsonl), {"prompt": "completion"}).records())


def test_data_of_a_recipe_may_be_a_file_a_saved_dataset_or_a_hub_id(jsonl, tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    (tmp_path / "tables").mkdir()
    datasets.Dataset.from_list(RECORDS).to_parquet(tmp_path / "tables" / "part-0.parquet")
    for root in (jsonl, tmp_path / "saved", tmp_path / "tables"):
        dataset = smollm2_135m_finetune_config(dataset_root=str(root)).dataset
        held_out, rest = (dataset.limited_source(split).records() for split in ("valid", "train"))
        found = [record["prompt"] for _, record in (*held_out, *rest)]
        assert sorted(found) == sorted(record["prompt"] for record in RECORDS)
    assert (
        smollm2_135m_finetune_config(dataset_root="some/hub-id").dataset.dataset_name
        == "some/hub-id"
    )
    folder = smollm2_135m_finetune_config(dataset_root=str(tmp_path)).dataset
    assert folder.dataset_root == str(tmp_path)


def calling(name, arguments):
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    return {"messages": messages, "tools": [tool]}


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", "saved"])
def test_a_table_adds_no_arguments(tmp_path, tokenizer, suffix):
    """Two calls with different arguments are those of the same records in JSON lines."""
    records = [calling("look", {"q": "rain"}), calling("add", {"x": "1", "y": "2"})]
    lines = tmp_path / "records.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in records))
    table = datasets.Dataset.from_list(records)
    if suffix == "saved":
        table.save_to_disk(tmp_path / "saved")
        source = HubSource(str(tmp_path / "saved"), None, "train")
    elif suffix == ".parquet":
        table.to_parquet(tmp_path / "records.parquet")
        source = FileSource(tmp_path / "records.parquet")
    else:
        table.save_to_disk(tmp_path / "saved")
        (arrow,) = (tmp_path / "saved").glob("*.arrow")
        source = FileSource(arrow)
    encoder = RecordEncoder(tokenizer, replace(RULES, max_tokens=4096, chat_template=TEMPLATE))
    expected, given = (
        encoder(list(one.records())) for one in (FileSource(lines), RenamedSource(source, {}))
    )
    decoded = [tokenizer.detokenize(sample.tokens) for sample in given.samples]
    assert decoded == [tokenizer.detokenize(sample.tokens) for sample in expected.samples]
    assert given.report.notes[FILLED] == 2
    assert not expected.report.notes[FILLED]


def test_a_column_of_json_keeps_nulls(tmp_path, tokenizer):
    record = calling("look", {"q": ""})
    call = record["messages"][1]["tool_calls"][0]
    call["function"]["arguments"] = '{"q": null}'
    datasets.Dataset.from_list([record]).to_parquet(tmp_path / "records.parquet")
    encoder = RecordEncoder(tokenizer, replace(RULES, max_tokens=4096, chat_template=TEMPLATE))
    encoded = encoder(list(FileSource(tmp_path / "records.parquet").records()))
    assert '{"q": null}' in tokenizer.detokenize(encoded.samples[0].tokens)
