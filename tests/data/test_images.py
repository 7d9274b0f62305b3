"""Rows with images in the forms that people publish."""

import pytest

from tpu_rl.data import shapes
from tpu_rl.data.messages import IMAGE_MARK as MARK

PNG = b"\x89PNG"
DATA_URL = "data:image/png;base64,iVBO"


def user(*parts):
    return {"role": "user", "content": list(parts)}


TEXT = {"type": "text", "text": "what?"}
PLACE = {"type": "image"}
ANSWER = {"role": "assistant", "content": "a cat"}


@pytest.mark.parametrize(
    ("row", "images", "content"),
    [
        # TRL's: a column beside parts that say where.
        ({"images": [PNG], "messages": [user(PLACE, TEXT), ANSWER]}, [PNG], f"{MARK}what?"),
        ({"image": {"bytes": PNG}, "messages": [user(TEXT), ANSWER]}, None, f"{MARK}what?"),
        ({"images": [PNG, "b.png"], "messages": [user(TEXT), ANSWER]}, None, f"{MARK * 2}what?"),
        # OpenAI's: the image is in its part.
        (
            {
                "messages": [
                    user(TEXT, {"type": "image_url", "image_url": {"url": DATA_URL}}),
                    ANSWER,
                ]
            },
            [DATA_URL],
            f"what?{MARK}",
        ),
        ({"messages": [user({"type": "image", "path": "c.png"}, TEXT), ANSWER]}, ["c.png"], None),
        # LLaVA's: a placeholder in a text of ShareGPT's form.
        (
            {
                "image": "coco/1.jpg",
                "conversations": [
                    {"from": "human", "value": "<image>\nwhat?"},
                    {"from": "gpt", "value": "a cat"},
                ],
            },
            ["coco/1.jpg"],
            f"{MARK}\nwhat?",
        ),
    ],
)
def test_images_get_one_column_and_their_places(row, images, content):
    normal = shapes.normalize(row, ("messages",))
    if images is not None:
        assert normal["images"] == images
    if content is not None:
        assert normal["messages"][0] == {"role": "user", "content": content}
    assert "image" not in normal


def test_a_prompt_and_a_pair_begin_with_their_image():
    normal = shapes.normalize({"images": [PNG], "prompt": "what?"}, ("prompt",))
    assert normal["prompt"] == f"{MARK}what?"
    pair = {
        "images": [PNG],
        "prompt": [user(PLACE, TEXT)],
        "chosen": [ANSWER],
        "rejected": [ANSWER],
    }
    normal = shapes.normalize(pair, ("prompt", "chosen", "rejected"))
    assert normal["prompt"][0]["content"] == f"{MARK}what?"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"images": [PNG, PNG], "prompt": "<image> what?"},
            "1 places for images, and the row has 2",
        ),
        ({"messages": [user(PLACE, TEXT), ANSWER]}, "1 places for images, and the row has 0"),
        (
            {"images": [PNG], "messages": [user({"type": "image", "path": "c.png"}), ANSWER]},
            "give them in one place",
        ),
    ],
)
def test_places_and_images_must_agree(row, message):
    with pytest.raises(ValueError, match=message):
        shapes.normalize(row, ("messages",) if "messages" in row else ("prompt",))


def test_columns_of_other_meanings_stay():
    row = {"prompt": "run it", "image": "debian:12", "images": None}
    assert shapes.normalize(row, ("prompt",)) == row
