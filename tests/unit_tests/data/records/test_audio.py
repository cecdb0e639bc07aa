# SPDX-License-Identifier: Apache-2.0
"""Records with audio: tokens and spectrograms are those of transformers; mistakes are named with their record."""

import base64
import json
import re
import sys
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
import transformers

from megatron.bridge.data.config import FinetuningDatasetConfig, MockAudioConversationProvider
from megatron.bridge.data.finetuning.rows import PackedRows, SampleRows
from megatron.bridge.data.loaders import build_iterators, collate
from megatron.bridge.data.media.audio_files import decode_audio
from megatron.bridge.data.media.media_rules import MediaRules
from megatron.bridge.data.media.references import AudioReference
from megatron.bridge.data.preview.collect import preview
from megatron.bridge.data.preview.render import to_html
from megatron.bridge.data.records.encoding import RecordEncoder
from megatron.bridge.data.records.preparation import prepare
from megatron.bridge.data.records.record_config import EncodingRules
from megatron.bridge.data.records.samples import Samples
from megatron.bridge.data.records.sources import FileSource, HubSource
from megatron.bridge.data.tokenizer import HuggingFaceTokenizer
from megatron.bridge.data.vlm_datasets.audio import PITCHES
from megatron.bridge.models.vision.media import costs, share_out
from tests import toy_audio, toy_vision
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not toy_audio.HAS_AUDIO, reason=toy_audio.NO_AUDIO)

NAMES = ("qwen2_audio", "voxtral")
ANSWER = {"role": "assistant", "content": "Seven."}
TEXT = {"type": "text", "text": "Which digit?"}
FILES = {  # name -> seconds, rate, channels
    "a.wav": (0.5, 16_000, 1),
    "b.mp3": (0.9, 44_100, 2),
    "c.flac": (0.31, 8_000, 1),
    "d.ogg": (0.77, 22_050, 1),
    "e.wav": (0.4, 48_000, 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The toys, each with all recordings."""
    made = {}
    for name in NAMES:
        folder = toy_audio.save(name, tmp_path_factory.mktemp(name))
        for place, (file, facts) in enumerate(FILES.items()):
            toy_audio.recording(folder, file, *facts, seed=10 * place)
        toy_audio.recording(folder, "long.wav", 2.5)
        toy_audio.recording(folder, "short.wav", 0.005)
        toy_audio.recording(folder.parent, "outside.wav", 0.2)
        content = (folder / "a.wav").read_bytes()
        (folder / "cut.flac").write_bytes((folder / "c.flac").read_bytes()[:400])
        (folder / "text.wav").write_text("no audio")
        (folder / "clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + content)
        (folder / "empty.wav").write_bytes(content[:44])
        made[name] = folder
    return made


@pytest.fixture(scope="module")
def encoders(folders):
    return {name: encoder_of(folder) for name, folder in folders.items()}


def encoder_of(folder, **rules):
    media = MediaRules(str(folder), str(folder), **rules)
    return RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1000, media=media))


def encode(encoder, record):
    return encoder([("file:3", record)]).samples[0]


def chat(*parts, **keys):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **keys}


def audio(value, key="audio", **more):
    return {"type": "audio", key: value, **more}


def spellings(folder):
    content = (folder / "a.wav").read_bytes()
    data = base64.b64encode(content).decode()
    turns = [{"from": "human", "value": "<audio>Which digit?"}, {"from": "gpt", "value": "Seven."}]
    samples = toy_audio.their_waveform(folder / "a.wav")
    numbers = [float(sample) for sample in samples]
    return {
        "path": chat(audio("a.wav"), TEXT),
        "under path": chat(audio("a.wav", "path"), TEXT),
        "file url": chat(audio(f"file://{folder}/a.wav", "audio_url"), TEXT),
        "bytes": chat(audio({"bytes": content, "path": None}), TEXT),
        "array": chat(audio({"array": numbers, "sampling_rate": 16_000}), TEXT),
        "array of datasets": chat(
            audio({"array": samples, "sampling_rate": 16_000, "path": "x.wav"}), TEXT
        ),
        "array in the part": chat(audio(numbers, "array", sampling_rate=16_000), TEXT),
        "openai": chat(
            {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, TEXT
        ),
        "data url": chat(audio(f"data:audio/wav;base64,{data}", "url"), TEXT),
        "without a type": chat({"audio": "a.wav"}, TEXT),
        "bare part": chat({"type": "audio"}, TEXT, audios=["a.wav"]),
        "mark": {"conversations": turns, "audio": "a.wav"},
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_write_audio_gives_the_same_sample(folders, encoders, name):
    encoder = encoders[name]
    samples = {key: encode(encoder, record) for key, record in spellings(folders[name]).items()}
    first = samples["path"]
    expected = encoder.media.pixels(first.images)
    for key, sample in samples.items():
        assert sample.tokens.tolist() == first.tokens.tolist(), key
        assert sample.trained.tolist() == first.trained.tolist(), key
        tensors = encoder.media.pixels(sample.images)
        assert all(tensors[which].equal(value) for which, value in expected.items()), key


@pytest.mark.parametrize("file", FILES)
def test_waveforms_equal_those_of_transformers(folders, encoders, file):
    folder = folders["voxtral"]
    (reference,) = encoders["voxtral"].media.references([("audio", file)], "here")
    found = decode_audio(reference, 16_000)
    expected = toy_audio.their_waveform(folder / file)
    assert found.dtype == expected.dtype == np.float32
    assert np.array_equal(found, expected)


def conversation(files):
    return {
        "messages": [
            {"role": "user", "content": [audio(files[0]), TEXT, *map(audio, files[1:])]},
            {"role": "assistant", "content": "Seven."},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
            {"role": "assistant", "content": "None."},
        ]
    }


@pytest.mark.parametrize("files", [["a.wav"], ["b.mp3", "c.flac"], list(FILES)], ids=len)
def test_samples_equal_those_of_the_processor_of_qwen2_audio(folders, encoders, files):
    folder = folders["qwen2_audio"]
    processor = transformers.Qwen2AudioProcessor(
        transformers.AutoFeatureExtractor.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    record = conversation(files)
    text = processor.apply_chat_template(record["messages"], tokenize=False)
    sounds = [toy_audio.their_waveform(folder / file) for file in files]
    expected = processor(text=text, audio=sounds, sampling_rate=16_000, return_tensors="pt")
    sample = encode(encoders["qwen2_audio"], record)
    assert sample.tokens.tolist() == expected["input_ids"][0].tolist()
    tensors = encoders["qwen2_audio"].media.pixels(sample.images)
    assert sorted(tensors) == ["feature_attention_mask", "input_features"]
    for key, value in tensors.items():
        assert value.dtype == expected[key].dtype
        assert torch.equal(value, expected[key]), key
    hf = encoders["qwen2_audio"].tokenizer.hf
    assert hf.decode(sample.tokens[sample.trained]) == "Seven.<|im_end|>\nNone.<|im_end|>\n"


@pytest.mark.parametrize("files", [["a.wav"], ["long.wav", "b.mp3"]], ids=len)
def test_spectrograms_equal_those_of_the_processor_of_voxtral(folders, encoders, files):
    folder = folders["voxtral"]
    sounds = [toy_audio.their_waveform(folder / file) for file in files]
    expected = toy_audio.voxtral_features(folder, sounds)
    sample = encode(encoders["voxtral"], conversation(files))
    (features,) = encoders["voxtral"].media.pixels(sample.images).values()
    assert torch.equal(features, expected)
    assert len(features) == {1: 1, 2: 4}[len(files)]


def test_conversations_of_voxtral_are_written_as_by_mistral_common(encoders):
    """The text is what mistral-common 1.13.1 decodes of its tokens (version v7), with audio of ten tokens."""
    sample = encode(
        encoders["voxtral"],
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *conversation(["a.wav", "c.flac"])["messages"],
            ]
        },
    )
    heard = "[BEGIN_AUDIO]" + 10 * "[AUDIO]"
    assert encoders["voxtral"].tokenizer.hf.decode(sample.tokens) == (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
        f"[INST]{heard}Which digit?{heard}[/INST]Seven.</s>[INST]And now?[/INST]None.</s>"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_length_has_as_many_tokens_as_the_tower_makes(encoders, name):
    media = encoders[name].media
    config = toy_audio.hf_config(name, encoders[name].tokenizer.hf)
    torch.manual_seed(0)
    model = getattr(transformers, toy_audio.ROWS[name].model)(config).model
    lengths = [480, 641, 8_000, 15_999, 16_000] + [16_001, 40_000] * (name == "voxtral")
    for length in lengths:
        tensors = media.rule.tensors(toy_audio.waveform(length / 16_000))
        if name == "voxtral":
            rows = len(model.get_audio_features(**tensors).pooler_output)
        else:
            _, rows = model.audio_tower._get_feat_extract_output_lengths(
                tensors["feature_attention_mask"].sum(-1)
            )
        assert media.rule.count(length) == int(rows)
        blank = media.rule.blank(length)
        assert {key: value.shape for key, value in blank.items()} == {
            key: value.shape for key, value in tensors.items()
        }
        if "feature_attention_mask" in blank:
            assert blank["feature_attention_mask"].equal(tensors["feature_attention_mask"])


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_hold_the_audio_of_their_samples_in_order(encoders, name):
    encoder = encoders[name]
    files = [["a.wav"], ["b.mp3", "c.flac"], ["d.ogg"]]
    samples = Samples.of([encode(encoder, conversation(each)) for each in files])
    rows = PackedRows(samples, 512, 0, media=encoder.media)
    assert len(rows) == 1
    assert rows.image_tokens(0) == sum(
        encoder.media.total_tokens(samples.images_of(index)) for index in range(3)
    )
    _, batch = collate([(0, rows[0])])
    alone = SampleRows(samples, None, 0, media=encoder.media)
    expected = [collate([(index, alone[index])])[1]["media"] for index in range(3)]
    for key, value in batch["media"].items():
        assert torch.equal(value, torch.cat([each[key] for each in expected]))
    placeholders = np.isin(batch["tokens"][0].numpy(), encoder.media.token_ids)
    assert placeholders.sum() == rows.image_tokens(0)
    labels = np.isin(batch["labels"][0].numpy(), encoder.media.token_ids)
    assert not batch["loss_mask"][0].numpy()[labels].any()


@pytest.mark.parametrize("name", NAMES)
def test_ranks_decode_what_they_encode(encoders, name):
    media = encoders[name].media
    files = ["a.wav", "b.mp3", "c.flac", *(["long.wav"] if name == "voxtral" else [])]
    references = media.references([("audio", file) for file in files], "here")
    whole = media.pixels(references)
    owners = share_out(costs(whole), 2)
    for rank in range(2):
        media.share = (rank, 2)
        share = media.pixels(references)
        mine = [index for index, owner in enumerate(owners) if owner == rank]
        assert mine
        for key, value in share.items():
            assert value.shape == whole[key].shape
            assert value[mine].equal(whole[key][mine])
        assert not share["input_features"].equal(whole["input_features"])
    media.share = (0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_prepared_samples_are_read_back(folders, encoders, name, tmp_path):
    data = tmp_path / "data.jsonl"
    records = [conversation(["a.wav", "b.mp3"]), chat(TEXT), conversation(["c.flac"])]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    made = prepare(FileSource(data), encoders[name], tmp_path / "made")
    again = prepare(FileSource(data), encoders[name], tmp_path / "made")
    for index in range(3):
        assert again.samples[index].images == made.samples[index].images
        assert all(isinstance(item, AudioReference) for item in again.samples[index].images)
    assert again.report.recordings == 3
    assert any("3 recordings" in line for line in again.report.lines())


def test_the_page_of_a_preview_plays_audio(folders, tmp_path):
    folder = folders["qwen2_audio"]
    lines = [json.dumps(chat(audio(file), TEXT)) + "\n" for file in ("c.flac", "b.mp3")]
    (tmp_path / "training.jsonl").write_text("".join(lines))
    config = FinetuningDatasetConfig(
        dataset_root=str(tmp_path),
        media_root=str(folder),
        hf_processor_path=str(folder),
        seq_length=256,
        do_validation=False,
        do_test=False,
    )
    tokenizer = HuggingFaceTokenizer(str(folder))
    data = build_iterators(config, tokenizer, (2, 0, 0), 1, 2)
    page = to_html(preview(config, data, tokenizer, (1, 2, 1)))
    assert "audio 0.3 s -&gt; 8 tokens" in page
    assert "audio 0.9 s -&gt; 22 tokens" in page
    players = re.findall(r'<audio controls [^>]*src="data:audio/wav;base64,([^"]+)"></audio>', page)
    assert len(players) == 2
    for player, file in zip(players, ("c.flac", "b.mp3"), strict=True):
        (folder / "played.wav").write_bytes(base64.b64decode(player))
        found = toy_audio.their_waveform(folder / "played.wav")
        expected = toy_audio.their_waveform(folder / file)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 2**-14


def test_a_changed_extractor_is_another_key(folders, tmp_path):
    folder = toy_audio.save("qwen2_audio", tmp_path)
    before = encoder_of(folder).media.key()
    assert before == encoder_of(folder).media.key()
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dither": 0.5}))
    assert encoder_of(folder).media.key() != before


def test_too_much_audio_is_refused_or_dropped(folders):
    encoder = encoder_of(folders["voxtral"], max_image_tokens=15)
    with refused("file:3", "20 tokens", "dataset.max_image_tokens=15"):
        encode(encoder, conversation(["a.wav", "b.mp3"]))
    encoder.rules = replace(encoder.rules, truncation="drop")
    found = encoder([("one", conversation(["a.wav", "b.mp3"])), ("two", chat(audio("a.wav")))])
    assert len(found.samples) == 1
    assert found.report.dropped.total() == 1


BOTH = {
    "a missing file": (chat(audio("x.wav"), TEXT), ("x.wav", "dataset.media_root")),
    "a file outside": (chat(audio("../outside.wav"), TEXT), ("outside", "dataset.media_root")),
    "text": (chat(audio("text.wav"), TEXT), ("text.wav", "cannot be read", "wav, flac")),
    "a video": (chat(audio("clip.mp4"), TEXT), ("clip.mp4", "cannot be read", "wav, flac")),
    "nothing": (chat(audio("empty.wav"), TEXT), ("empty.wav", "empty", "remove")),
    "the network": (
        chat(audio("https://example.com/a.wav", "url"), TEXT),
        ("https://example.com/a.wav", "dataset.fetch_urls"),
    ),
    "damaged base64": (
        chat({"type": "input_audio", "input_audio": {"data": "@@", "format": "wav"}}),
        ("base64",),
    ),
    "no base64": (
        chat({"type": "input_audio", "input_audio": {"data": 3, "format": "wav"}}),
        ("input_audio", "base64"),
    ),
    "no rate": (chat(audio({"array": [0.1, 0.2]}), TEXT), ("sampling_rate=None",)),
    "a rate of nothing": (
        chat(audio({"array": [0.1], "sampling_rate": 0}), TEXT),
        ("sampling_rate=0",),
    ),
    "a rate as text": (
        chat(audio([0.1, 0.2], "array", sampling_rate="16000"), TEXT),
        ("sampling_rate='16000'",),
    ),
    "integers": (
        chat(audio({"array": [3, 4], "sampling_rate": 8000}), TEXT),
        ("int64", "between -1 and 1"),
    ),
    "two channels": (
        chat(audio({"array": [[0.1], [0.2]], "sampling_rate": 8000}), TEXT),
        ("[2, 1]", "one channel"),
    ),
    "words": (
        chat(audio({"array": ["a"], "sampling_rate": 8000}), TEXT),
        ("array", "between -1 and 1"),
    ),
    "a file with a rate": (
        chat(audio("a.wav", sampling_rate=8000), TEXT),
        ("sampling_rate=8000", "remove"),
    ),
    "more marks than audio": (
        {"messages": [{"role": "user", "content": "<audio><audio>"}, ANSWER], "audio": "a.wav"},
        ("<audio>", "one audio for each"),
    ),
    "audio without marks": (chat(TEXT, audios=["a.wav"]), ("1 audios", "<audio>")),
    "an image": (chat({"type": "image", "image": "a.png"}, TEXT), ("an image", "audio only")),
    "a film": (chat({"type": "video", "video": "a.mp4"}, TEXT), ("a video", "audio only")),
    "audio of the assistant": (
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": [audio("a.wav")]},
            ]
        },
        ("role=assistant", "user"),
    ),
}


@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_mistakes_are_named(encoders, name, case):
    record, words = BOTH[case]
    with refused("file:3", *words):
        encode(encoders[name], record)


def test_recordings_that_qwen2_audio_cannot_take_are_refused(encoders):
    with refused("file:3", "long.wav", "2.5 seconds", "1 seconds", "split"):
        encode(encoders["qwen2_audio"], chat(audio("long.wav"), TEXT))
    with refused("file:3", "short.wav", "0.005 seconds", "remove"):
        encode(encoders["qwen2_audio"], chat(audio("short.wav"), TEXT))


def test_the_placeholder_as_text_is_refused(encoders):
    text = {"type": "text", "text": "<|AUDIO|>"}
    with refused("file:3", "2 placeholders", "1 "):
        encode(encoders["qwen2_audio"], chat(audio("a.wav"), text))


def test_damage_that_shows_when_decoding_is_named(folders, encoders):
    folder, media = folders["voxtral"], encoders["voxtral"].media
    (reference,) = media.references([("audio", "cut.flac")], "file:3")
    with refused("file:3", "cut.flac", "repair"):
        media.pixels([reference])
    (folder / "not.wav").write_bytes(_wav_of_nothing())
    (reference,) = media.references([("audio", "not.wav")], "file:3")
    with refused("file:3", "not.wav", "not finite"):
        media.pixels([reference])


def _wav_of_nothing():
    from megatron.bridge.data.media.audio_files import wav_file

    return wav_file(np.full(4000, np.nan, np.float32), 16_000, "FLOAT")


def test_a_file_that_became_shorter_is_named(folders, encoders):
    folder, media = folders["voxtral"], encoders["voxtral"].media
    toy_audio.recording(folder, "changed.wav", 0.5)
    (reference,) = media.references([("audio", "changed.wav")], "file:3")
    toy_audio.recording(folder, "changed.wav", 0.25)
    with refused("file:3", "changed.wav", "4,000", "8,000", "restore"):
        media.pixels([reference])


def test_audio_for_a_model_that_does_not_hear_is_refused(tmp_path):
    folder = toy_vision.save("qwen2_vl", tmp_path)
    with refused("file:3", "audio", "qwen2_vl", "qwen2_audio"):
        encode(encoder_of(folder), chat(audio("a.wav"), TEXT))
    deaf = RecordEncoder(HuggingFaceTokenizer(str(folder)), EncodingRules(1000))
    with refused("file:3", "audio", "dataset.hf_processor_path"):
        encode(deaf, chat(audio("a.wav"), TEXT))


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_a_missing_package_is_named(encoders, monkeypatch, package):
    media = encoders["voxtral"].media
    monkeypatch.setitem(sys.modules, package, None)
    with refused("file:3", package, "hf-megatron-bridge[audio]"):
        media.pixels(media.references([("audio", "c.flac")], "file:3"))


@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        ("preprocessor_config.json", "chunk_length", 2, ("200 frames", "max_source_positions=50")),
        ("preprocessor_config.json", "feature_size", 9, ("feature_size=9", "num_mel_bins=8")),
    ],
)
def test_files_that_contradict_each_other_are_named(tmp_path, file, key, value, words):
    folder = toy_audio.save("qwen2_audio", tmp_path)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, key: value}))
    with refused(*words):
        encoder_of(folder)


def test_a_model_without_a_placeholder_is_named(tmp_path):
    folder = toy_audio.save("voxtral", tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "audio_token_id": None}))
    with refused("audio_token_id", str(folder)):
        encoder_of(folder)


@pytest.mark.parametrize("name", ["min_pixels", "max_pixels", "fps", "max_frames"])
def test_limits_of_images_are_refused(folders, name):
    with refused(f"dataset.{name}=7", "audio", "unset"):
        encoder_of(folders["voxtral"], **{name: 7})


def test_generated_tones_are_named(folders):
    folder = str(folders["voxtral"])
    config = MockAudioConversationProvider(
        seq_length=128, hf_processor_path=folder, num_recordings=2, seconds=0.5, num_samples=8
    )
    tokenizer = HuggingFaceTokenizer(folder)
    data = build_iterators(config, tokenizer, (8, 0, 0), 1, 8)
    batch = next(data.train)
    assert batch["media"]["input_features"].shape == (2, 8, 100)
    answers = [record["messages"][1]["content"] for _, record in config.source("train").records()]
    assert {word for answer in answers for word in answer.split(", ")} == {"low", "middle", "high"}
    tones = [record for _, record in config.source("train").records()]
    for record in tones:
        *recordings, _ = record["messages"][0]["content"]
        names = record["messages"][1]["content"].split(", ")
        for part, name in zip(recordings, names, strict=True):
            spectrum = np.abs(np.fft.rfft(part["array"]))
            hertz = spectrum.argmax() * part["sampling_rate"] / len(part["array"])
            assert hertz == pytest.approx(PITCHES[name], abs=2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seconds": 0.01}, ("dataset.seconds=0.01", "30 seconds")),
        ({"num_recordings": -1}, ("dataset.num_recordings=-1",)),
        ({"num_samples": 0}, ("dataset.num_samples=0",)),
    ],
)
def test_mistakes_of_generated_tones_are_named(values, words):
    (problem,) = MockAudioConversationProvider(seq_length=128, **values).problems()
    assert all(word in problem for word in words)


def test_the_ends_of_a_text_are_known_where_the_tokenizer_is_mistrals(tmp_path):
    """transformers converts ``tekken.json``, which does not say which tokens these are."""
    letters = [bytes([value]) for value in range(256)]
    special = [*(f"<SPECIAL_{rank}>" for rank in range(24)), "[AUDIO]", "[BEGIN_AUDIO]"]
    special[1:5] = ["<s>", "</s>", "[INST]", "[/INST]"]
    content = {
        "config": {
            "pattern": "[^ ]+| +",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(letter).decode(), "token_str": None}
            for rank, letter in enumerate(letters)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert (tokenizer.hf.bos_token, tokenizer.eod) == ("<s>", 2)
    assert tokenizer.hf.convert_tokens_to_ids("[AUDIO]") == 24


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_columns_of_audio_are_not_decoded_by_datasets(folders, encoders, tmp_path, kind):
    """`datasets` would need torchcodec, and not give what transformers' processors hear."""
    folder, encoder = folders["voxtral"], encoders["voxtral"]
    file = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    turn = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = {"messages": datasets.List(turn), "audio": file, "audios": datasets.List(file)}
    content = {"bytes": (folder / "a.wav").read_bytes(), "path": None}
    question = [{"role": "user", "content": "<audio>Which digit?"}, ANSWER]
    rows = {
        "messages": [question, question],
        "audio": [content, None],
        "audios": [None, [content]],
    }
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    table = table.cast_column("audio", datasets.Audio())
    table = table.cast_column("audios", datasets.List(datasets.Audio()))
    if kind == "parquet":
        table.to_parquet(tmp_path / "rows.parquet")
        source = FileSource(tmp_path / "rows.parquet")
    else:
        table.save_to_disk(tmp_path / "rows")
        source = HubSource(str(tmp_path / "rows"), None, "train")
    samples = encoder(list(source.records())).samples
    expected = encode(encoder, chat(audio("a.wav"), TEXT))
    for sample in samples:
        assert sample.tokens.tolist() == expected.tokens.tolist()
        (found,) = encoder.media.pixels(sample.images).values()
        assert found.equal(encoder.media.pixels(expected.images)["input_features"])
