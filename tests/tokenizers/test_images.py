"""Images among token ids, and their pixels."""

import base64
import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpu_rl import tokenizers
from tpu_rl.commands import roles
from tpu_rl.environments.pictures import PicturesData, PicturesSource
from tpu_rl.errors import InputError
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


def bomb():
    """A PNG that claims to have 50,000 x 50,000 pixels."""
    header = (50_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])

    def chunk(kind, content):
        sum_ = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + sum_

    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("missing.png", "there is no file"),
        (b"", "cannot identify"),
        (b"no picture", "cannot identify"),
        (file_of(picture())[:60], ""),
        (file_of(picture((1, 2, 3), (64, 64)), "JPEG")[:400], ""),
        (bomb(), "2500000000 pixels"),
        ("https://example.com/a.png", "not fetched from the network"),
        ("data:image/png;base64,???", "no base64"),
        (7, "a path, bytes or a data URL"),
        (None, "a path, bytes or a data URL"),
        ({"bytes": None, "path": None}, "a path, bytes or a data URL"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot identify"),
        (b"%PDF-1.4", "cannot identify"),
        ("\0", ""),
        ("a" * 5000, ""),
        ([file_of(picture())], "a path, bytes or a data URL"),
    ],
)
def test_a_picture_that_cannot_be_read_has_one_clear_error(tokenizer, source, why):
    with pytest.raises(InputError, match=r"image 1 of 1 cannot be read") as error:
        tokenizer.encode_row({"images": [source], "prompt": MARK})
    assert why in error.value.why


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
        has = (cells == rgb[words[1] if words[0] == "count" else words[2]]).all(-1).any(-1)
        if words[0] == "count":
            assert row["answer"] == str(has.sum())
        else:
            found_row, column = map(int, row["answer"].split(","))
            assert has[found_row - 1, column - 1]
