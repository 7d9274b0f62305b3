"""Images among token ids, and their pixels."""

import base64
import dataclasses
import io
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpu_rl import tokenizers
from tpu_rl.commands import roles
from tpu_rl.errors import InputError
from tpu_rl.tasks.pictures import PicturesData, PicturesSource
from tpu_rl.tokenizers.images import MARK

FIRST = 46
PER_IMAGE = 16


@pytest.fixture(scope="module")
def tokenizer():
    directory = Path(roles.model_path("builtin:pictures"))
    return tokenizers.with_images(
        tokenizers.load(directory),
        directory,
        4,
        tower=roles.models.from_config(directory).config.vision,
        first_id=FIRST,
        folder=Path(),
    )


def file_of(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def picture(color=(200, 40, 10), size=(32, 32)):
    return Image.new("RGB", size, color)


def test_a_prompt_has_ids_of_features_and_decodes_to_one_mark(tokenizer):
    row = {"prompt": f"a{MARK}b{MARK}", "images": [picture(), picture()]}
    ids, weights, pieces = tokenizer.encode_row(row)
    assert pieces.shape == (2, 3, 32, 32)
    assert weights == [0.0] * len(ids)
    a, b = tokenizer.encode("ab")
    first, second = (range(FIRST + k * PER_IMAGE, FIRST + (k + 1) * PER_IMAGE) for k in (0, 1))
    assert ids == [*tokenizer.prefix_ids, a, *first, b, *second]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False).endswith("a<image>b<image>")
    assert (
        tokenizer.decode(tokenizer.encode_row(row | {"prompt": MARK * 2}).ids, False).count(
            "<image>"
        )
        == 2
    )
    # A text that merely spells the token of images is a text.
    assert max(tokenizer.encode_prompt("<image>")) < FIRST


def test_a_template_that_reads_parts_gets_them(tokenizer, tmp_path):
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}<eos>{% endfor %}"
    )
    (tmp_path / "template").write_text(template)
    chat = tokenizers.configure(tokenizer, tokenizers.TokenizerConfig(str(tmp_path / "template")))
    prompt = [{"role": "user", "content": f"{MARK}see <image>"}]
    assert chat.encode_row({"prompt": prompt, "images": [picture()]}).ids.count(FIRST) == 1
    messages = [
        {"role": "user", "content": f"{MARK}see"},
        {"role": "assistant", "content": "red"},
    ]
    demonstration = chat.encode_demonstration(messages)
    ids, weights, _ = chat.with_images({"images": [picture()]}, *demonstration)
    learned = [i for i, weight in zip(ids, weights, strict=True) if weight]
    assert chat.decode(learned, skip_special=False) == "red<eos>"
    assert ids[:PER_IMAGE] == [*range(FIRST, FIRST + PER_IMAGE)]
    # A template may write another turn than the one that its generation prompt begins.
    (tmp_path / "template").write_text(template + "{% if add_generation_prompt %}go{% endif %}")
    chat = tokenizers.configure(tokenizer, tokenizers.TokenizerConfig(str(tmp_path / "template")))
    messages[1]["content"] = f"red{MARK}"
    demonstration = chat.encode_demonstration(messages)
    ids, weights, _ = chat.with_images({"images": [picture()] * 2}, *demonstration)
    learned = [i for i, weight in zip(ids, weights, strict=True) if weight]
    assert chat.decode(learned, skip_special=False) == "red<eos>"
    assert chat.decode(ids, skip_special=False).endswith("see<eos>gored<image><eos>")


def test_pixels_are_those_of_the_processor_in_every_form(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(file_of(picture()))
    content = file_of(picture())
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    ids = tokenizer.encode_prompt(MARK)
    expected = (np.array([200, 40, 10]) / 255 - 0.5) / 0.5
    for source in (content, {"bytes": content}, picture(), url, str(tmp_path / "a.png")):
        pixels = tokenizer.with_images({"images": [source]}, ids).pieces
        assert pixels.shape == (1, 3, 32, 32)
        np.testing.assert_allclose(pixels[0].mean((1, 2)), expected, atol=1e-5)
    assert tokenizer.encode_row({"prompt": "a"}).pieces is None


def test_an_image_may_be_several_runs_of_features_with_text_between(tokenizer):
    """Each tile of an image has its run, as in Idefics 3; the other token of the text counts."""
    reader = tokenizer.images
    ids, weights = reader.expand(
        [1, 4, 9, 4, 7], [1.0] * 5, [("a", 2, "b", 1), (2,)], lambda text: [ord(text) - 77]
    )
    assert ids == [1, 20, FIRST, FIRST + 1, 21, FIRST + 2, 9, FIRST + 3, FIRST + 4, 7]
    assert weights == [1, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert reader.collapse(ids) == [1, 20, 4, 21, 4, 9, 4, 7]
    assert reader.count(ids) == 1
    # Nothing is learned from tokens that the model never writes.
    reader = dataclasses.replace(reader, unsampled=(4, 9))
    assert reader.expand([1, 4, 9], [1.0] * 3, [(1,)], list)[1] == [1, 0, 0]


def bomb():
    """A PNG that claims to have 50,000 x 50,000 pixels."""
    header = (50_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])

    def chunk(kind, content):
        sum_ = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + sum_

    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def with_file(content, name="a.png"):
    """Return what writes a file, and returns its name."""

    def write(folder):
        (folder / name).write_bytes(content)
        return name

    return write


def as_bytes(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def made(function, name):
    """Return what makes a file that is no ordinary one, and returns its name."""

    def make(folder):
        function(folder / name)
        return name

    return make


def nested(depth):
    value = {"bytes": file_of(picture())}
    for _ in range(depth):
        value = {"image": value}
    return value


def two_halves(mode="RGB"):
    """Return a picture whose left half is red and right half blue, 40 x 20."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    return image.convert(mode)


NO_FORM = "a path, bytes or a data URL"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("missing.png", "there is no file"),
        (b"", "of no picture"),
        (b"no picture", "of no picture"),
        (file_of(picture())[:60], ""),
        (file_of(picture((1, 2, 3), (64, 64)), "JPEG")[:400], ""),
        (bomb(), "2500000000 pixels"),
        ("https://example.com/a.png", "not fetched from the network"),
        ("data:image/png;base64,???", "no base64"),
        (7, NO_FORM),
        (None, NO_FORM),
        ({"bytes": None, "path": None}, NO_FORM),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "of no picture"),
        (b"%PDF-1.4", "of no picture"),
        ("\0", ""),
        ("a" * 5000, ""),
        ([file_of(picture())], NO_FORM),
        (with_file(b""), "of no picture"),
        (with_file(b"<!doctype html><title>404</title>"), "of no picture"),
        (with_file(file_of(two_halves())[:-40]), ""),
        (with_file(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "a.eps"), "of no picture"),
        (as_bytes(Image.new("L", (8000, 7000))), "8,000 x 7,000 pixels"),
        (Image.new("1", (8000, 7000)), "8,000 x 7,000 pixels"),
        (as_bytes(Image.new("L", (1, 20_000))), "1 x 20,000 pixels"),
        (as_bytes(Image.new("L", (20_000, 1))), "20,000 x 1 pixels"),
        (as_bytes(Image.new("F", (8, 8)), "TIFF"), "32 bits"),
        ("data:image/png,abc", "no base64"),
        ("data:", "no base64"),
        ("http://example.com/a.png", "not fetched from the network"),
        ("ftp://example.com/a.png", "there is no file"),
        (".", "there is no file"),
        ("../../../../../../etc/hostname", "of no picture"),
        ("~no_such_user/a.png", ""),
        (made(os.mkfifo, "pipe.png"), "there is no file"),
        (made(lambda path: path.symlink_to(path), "loop.png"), "there is no file"),
        (made(os.mkdir, "folder.png"), "there is no file"),
        ("/dev/zero", "there is no file"),
        ({}, NO_FORM),
        ({"caption": "a cat"}, NO_FORM),
        ({"bytes": [1, 2, 3]}, NO_FORM),
        (nested(10), NO_FORM),
        (np.zeros((4, 4, 3), np.uint8), NO_FORM),
        (1.5, NO_FORM),
        (True, NO_FORM),
        ("\ud800.png", ""),
    ],
)
def test_a_picture_that_cannot_be_read_has_one_clear_error(tokenizer, tmp_path, source, why):
    reader = dataclasses.replace(tokenizer.images, folder=str(tmp_path))
    tokenizer = dataclasses.replace(tokenizer, images=reader)
    value = source(tmp_path) if callable(source) else source
    with pytest.raises(InputError, match=r"image 1 of 1 cannot be read") as error:
        tokenizer.encode_row({"images": [value], "prompt": MARK})
    assert why in error.value.why


def turned():
    """Return a file whose EXIF data say that its left side is its upper one."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return as_bytes(two_halves(), exif=exif)


def animated():
    frames = [Image.new("RGB", (40, 20), "blue")]
    return as_bytes(two_halves(), "GIF", save_all=True, append_images=frames)


SIXTEEN_BITS = np.full((20, 40), 128 * 256, np.uint16)


@pytest.mark.parametrize(
    ("source", "size", "pixel", "color"),
    [
        (as_bytes(two_halves(), "JPEG", quality=95), (40, 20), (39, 9), (0, 0, 255)),
        (as_bytes(two_halves("CMYK"), "JPEG", quality=95), (40, 20), (39, 9), (0, 0, 255)),
        (as_bytes(two_halves("P")), (40, 20), (39, 9), (0, 0, 255)),
        (as_bytes(two_halves("P"), transparency=255), (40, 20), (39, 9), (0, 0, 255)),
        (as_bytes(two_halves("RGBA")), (40, 20), (39, 9), (0, 0, 255)),
        (as_bytes(Image.new("1", (40, 20), 1)), (40, 20), (39, 9), (255, 255, 255)),
        (as_bytes(Image.fromarray(SIXTEEN_BITS)), (40, 20), (39, 9), (128, 128, 128)),
        (animated(), (40, 20), (39, 9), (0, 0, 255)),
        # The file's left side is up, so that blue is down.
        (turned(), (20, 40), (9, 39), (0, 0, 255)),
        (as_bytes(picture(size=(1, 1))), (1, 1), (0, 0), (200, 40, 10)),
        (with_file(as_bytes(picture(), "BMP"), "é 图.png"), (32, 32), (9, 9), (200, 40, 10)),
        (with_file(file_of(picture()), "a.txt"), (32, 32), (9, 9), (200, 40, 10)),
        ({"bytes": None, "path": {"bytes": file_of(picture())}}, (32, 32), (9, 9), (200, 40, 10)),
        ({"bytes": b"", "image": picture()}, (32, 32), (9, 9), (200, 40, 10)),
        (two_halves("CMYK"), (40, 20), (39, 9), (0, 0, 255)),
    ],
)
def test_odd_pictures_are_read_as_people_see_them(tokenizer, tmp_path, source, size, pixel, color):
    value = source(tmp_path) if callable(source) else source
    reader = dataclasses.replace(tokenizer.images, folder=str(tmp_path))
    [image] = reader.opened([value])
    assert (image.size, image.mode) == (size, "RGB")
    np.testing.assert_allclose(image.getpixel(pixel), color, atol=4)
    text = dataclasses.replace(tokenizer, images=reader).encode_row(
        {"images": [value], "prompt": MARK}
    )
    assert text.pieces.shape == (1, 3, 32, 32)


def test_images_and_places_must_agree(tokenizer):
    row = {"images": [file_of(picture())]}
    with pytest.raises(InputError, match="1 images, and its text 2 places"):
        tokenizer.encode_row(row | {"prompt": MARK * 2})
    text_only = tokenizers.load(roles.model_path("builtin:arithmetic"))
    with pytest.raises(InputError, match="reads texts only"):
        text_only.with_images(row, [1])


def test_pictures_answer_their_questions(tokenizer):
    source = PicturesSource(PicturesData(), "train", 50)
    for index in range(50):
        row = source[index]
        pixels = np.asarray(Image.open(io.BytesIO(row["images"][0]))).reshape(4, 8, 4, 8, 3)
        cells = pixels.transpose(0, 2, 1, 3, 4).reshape(4, 4, 64, 3)
        words = row["prompt"].strip(f"{MARK}\n?").split()
        rgb = {"red": (220, 30, 30), "green": (20, 160, 60), "blue": (40, 70, 230)}
        has = (cells == rgb[words[1]]).all(-1).any(-1)
        if words[0] == "count":
            assert row["answer"] == str(has.sum())
        else:
            found_row, column = map(int, row["answer"].split(","))
            assert has[found_row - 1, column - 1]
            assert has.sum() == 1
