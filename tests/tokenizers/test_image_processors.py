"""Ids and pixels of messages with images, beside those of transformers' processors."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.gemma4_models import write_gemma4
from tests.fixtures.image_models import write_gemma, write_idefics, write_internvl
from tests.fixtures.qwen_models import write_inputs
from tpu_rl import models, tokenizers
from tpu_rl.commands import config as configuration
from tpu_rl.commands import roles
from tpu_rl.errors import InputError
from tpu_rl.tokenizers.images import MARK

PATCHES = ("pixel_values", "image_position_ids")
SIZES = [(32, 32), (100, 30), (31, 97), (200, 200), (5, 7)]


def reader_of(directory):
    config = models.from_config(directory, images=True).config
    tokenizer = tokenizers.with_images(
        tokenizers.load(directory),
        directory,
        config.vision.image_token,
        tower=config.vision,
        around=config.vision.around,
        first_id=config.vocab.size,
        folder=directory,
    )
    return tokenizer, config


def processor_of(directory, config):
    from transformers import (
        AutoImageProcessor,
        Gemma3Processor,
        Gemma4Processor,
        Idefics3Processor,
        InternVLProcessor,
        PreTrainedTokenizerFast,
    )

    extra = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    if config.vision.written == "token":
        extra = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
        extra |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    is_internvl = json.loads(config.vision.source)["model_type"] == "internvl"
    if is_internvl:
        extra = {"start_image_token": "<img>", "end_image_token": "</img>"}
        extra |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    is_gemma = config.vision.around is not None
    backend = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        bos_token="<bos>",
        eos_token="<end>",
        pad_token="<end>",
        extra_special_tokens=extra if is_gemma or is_internvl else {},
    )
    pixels = AutoImageProcessor.from_pretrained(directory, backend="pil")
    count = config.vision.features_per_piece
    template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    # Without the processors of videos and of sound, which need torch.
    if config.vision.written == "token":
        return pictures_only(Gemma4Processor)(None, pixels, backend, None, template)
    if is_internvl:
        return pictures_only(InternVLProcessor)(pixels, backend, None, count, template)
    if is_gemma:
        return Gemma3Processor(pixels, backend, template, image_seq_length=count)
    return Idefics3Processor(pixels, backend, image_seq_len=count, chat_template=template)


def pictures_only(processor: Any) -> Any:
    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)

    return type(
        "PictureProcessor",
        (processor,),
        {"check_argument_for_proper_class": check_argument_for_proper_class},
    )


def pictures():
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in SIZES
    ]


def row_of(texts, images):
    """Return a row whose message has an image before each text but the first."""
    content = texts[0] + "".join(f"{MARK}{text}" for text in texts[1:])
    return {"prompt": [{"role": "user", "content": content}], "images": images}


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_gemma, write_idefics, write_internvl])
def test_ids_and_pixels_are_those_of_the_processor(tmp_path, write):
    write(tmp_path)
    tokenizer, config = reader_of(tmp_path)
    processor: Any = processor_of(tmp_path, config)
    for texts in (["", "What?"], ["a\n", "\nb"], ["", "", "\n\nx"]):
        for start in range(len(SIZES) - 1):
            images = pictures()[start : start + len(texts) - 1]
            ours = tokenizer.encode_row(row_of(texts, images))
            messages = [{"role": "user", "content": parts_of(texts)}]
            text = processor.apply_chat_template(messages, add_generation_prompt=True)
            theirs = processor(images=[images], text=[text], return_tensors="np")
            ids = [config.vision.image_token if i >= config.vocab.size else i for i in ours.ids]
            assert ids == theirs["input_ids"][0].tolist()
            pixels = theirs["pixel_values"].reshape(-1, 3, 32, 32)
            np.testing.assert_array_equal(ours.pieces, pixels)
            features = [i - config.vocab.size for i in ours.ids if i >= config.vocab.size]
            assert features == [*range(len(pixels) * config.vision.features_per_piece)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["large", "small"])
def test_ids_and_patches_are_those_of_gemma_4(tmp_path, name):
    write_gemma4(tmp_path, name)
    tokenizer, config = reader_of(tmp_path)
    processor: Any = processor_of(tmp_path, config)
    for texts in (["", "What?"], ["a\n", "\nb"], ["", "", "\n\nx"]):
        for start in range(len(SIZES) - 1):
            images = pictures()[start : start + len(texts) - 1]
            ours = tokenizer.encode_row(row_of(texts, images))
            messages = [{"role": "user", "content": parts_of(texts)}]
            text = processor.apply_chat_template(messages, add_generation_prompt=True)
            theirs = processor(images=[images], text=[text], return_tensors="np")
            ids = [config.vision.image_token if i >= config.vocab.size else i for i in ours.ids]
            assert ids == theirs["input_ids"][0].tolist()
            pieces = [
                config.vision.pieces({key: theirs[key][[i]] for key in PATCHES})[0]
                for i in range(len(images))
            ]
            np.testing.assert_array_equal(ours.pieces, np.concatenate(pieces))
    random = np.random.default_rng(1)
    sizes = [(24, 40), (1, 200), (200, 1), *random.integers(1, 150, (24, 2)).tolist()]
    blank = [Image.new("RGB", tuple(size)) for size in sizes]
    layouts = tokenizer.images.layouts(blank)
    assert layouts == tokenizer.images.read(blank)[1]
    assert max(count for (count,) in layouts) <= 70
    assert tokenizer.images.whole_images == ((config.vocab.size, 70) if name == "large" else None)


def parts_of(texts):
    parts = [{"type": "text", "text": texts[0]}] if texts[0] else []
    for text in texts[1:]:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def test_texts_that_spell_tokens_of_images_are_texts(tmp_path):
    write_gemma(tmp_path)
    tokenizer, _ = reader_of(tmp_path)
    row = {"prompt": [{"role": "user", "content": "a<boi><soft>\n"}]}
    ids = tokenizer.encode_row(row).ids
    assert "<boi><soft>" in tokenizer.decode(ids)


def test_pan_and_scan_is_refused(tmp_path):
    write_gemma(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_pan_and_scan": True}))
    tokenizer, _ = reader_of(tmp_path)
    with pytest.raises(InputError, match="pan and scan"):
        tokenizer.encode_row(row_of(["", "What?"], pictures()[:1]))


@pytest.mark.parametrize("write", [write_gemma, write_idefics])
def test_an_image_is_as_long_as_its_size_says(tmp_path, write):
    write(tmp_path)
    tokenizer, _ = reader_of(tmp_path)
    random = np.random.default_rng(1)
    for height, width in random.integers(1, 150, (24, 2)).tolist():
        picture = Image.new("RGB", (width, height))
        row = row_of(["a", "", "b"], [picture, Image.new("L", (height, width))])
        assert tokenizer.row_length(row) == len(tokenizer.encode_row(row).ids)
    with pytest.raises(InputError, match="there is no file"):
        tokenizer.row_length(row_of(["", ""], ["none.png"]))


def test_an_image_that_lies_on_its_side_has_its_sides_exchanged(tmp_path):
    write_idefics(tmp_path)
    tokenizer, _ = reader_of(tmp_path)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (90, 30)).save(tmp_path / "side.jpg", exif=turned)
    row = row_of(["", ""], ["side.jpg"])
    upright = row_of(["", ""], [Image.new("RGB", (30, 90))])
    assert tokenizer.row_length(row) == len(tokenizer.encode_row(row).ids)
    assert tokenizer.row_length(row) == tokenizer.row_length(upright)


def test_tiles_are_named_row_by_row(tmp_path):
    write_idefics(tmp_path)
    _, config = reader_of(tmp_path)
    processed = {
        "pixel_values": np.zeros((1, 3, 3, 32, 32)),
        "pixel_attention_mask": np.ones((1, 3, 32, 32)),
        "rows": [[2]],
        "cols": [[1]],
    }
    pieces, layout = config.vision.pieces(processed)
    fake = "<fake_token_around_image>"
    assert pieces.shape == (3, 3, 32, 32)
    tiles = (f"{fake}<row_1_col_1>", 4, f"\n{fake}<row_2_col_1>", 4)
    assert layout == (*tiles, f"\n\n{fake}<global-img>", 4, fake)
    with pytest.raises(ValueError, match="pads tiles"):
        config.vision.pieces(processed | {"pixel_attention_mask": np.zeros((1, 3, 32, 32))})


@pytest.mark.parametrize(
    "file",
    [
        {"min_pixels": 64, "max_pixels": 2048},
        {"size": {"shortest_edge": 64, "longest_edge": 2048}},
        {},
    ],
)
def test_the_largest_image_is_a_setting_that_the_saved_model_has(tmp_path, file):
    write_inputs(tmp_path, "qwen2_5_vl")
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4} | file
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    flags = ["sft", "--model.path", str(tmp_path), "--data.path", str(tmp_path / "rows.jsonl")]
    config = configuration.parse([*flags, "--data.max-pixels", "512", "--data.min-pixels", "64"])
    tokenizer = roles.load_tokenizer(config, tmp_path)
    row = {"prompt": MARK, "images": [Image.new("RGB", (64, 32))]}
    # A feature is 8 x 8 pixels: 32 are scaled to the 8 of 32 x 16 pixels.
    ids, _, pieces = tokenizer.encode_row(row)
    assert pieces is not None
    assert pieces.shape[0] == 8
    assert tokenizer.row_length(row) == len(ids)
    saved = tmp_path / "saved"
    saved.mkdir()
    assert tokenizer.images is not None
    tokenizer.images.save(saved)
    (saved / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    reader = dataclasses.replace(tokenizer.images, directory=str(saved), pixels=(None, None))
    assert reader.layouts(row["images"]) == [(8,)]
    with pytest.raises(InputError, match="1,000 pixels at least and 512 at most"):
        tokenizers.with_pixels(tokenizer, (1000, 512))


def test_an_image_processor_of_one_size_has_no_largest_image(tmp_path):
    write_idefics(tmp_path)
    tokenizer, _ = reader_of(tmp_path)
    with pytest.raises(InputError, match="no least or most number of pixels") as error:
        tokenizers.with_pixels(tokenizer, (None, 512))
    assert "--data.max-pixels" in error.value.where
    text_only = dataclasses.replace(tokenizer, images=None)
    with pytest.raises(InputError, match="reads texts only"):
        tokenizers.with_pixels(text_only, (None, 512))
