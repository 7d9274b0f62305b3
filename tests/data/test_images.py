"""Rows with images in the forms that people publish."""

import json

import pytest
from PIL import Image

from tpu_rl.data import files, images, row_stream, shapes, stored_rows
from tpu_rl.data.messages import IMAGE_MARK as MARK

PNG = b"\x89PNG"
DATA_URL = "data:image/png;base64,iVBO"
BASE64 = "iVBORw0KGgo" + "A" * 80
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBO"}


def user(*parts):
    return {"role": "user", "content": list(parts)}


TEXT = {"type": "text", "text": "what?"}
PLACE = {"type": "image"}
ANSWER = {"role": "assistant", "content": "a cat"}


@pytest.mark.parametrize(
    ("row", "files_of_row", "content"),
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
        # The name of a file tells that it is one, without a tag too.
        ({"image": "1.JPG", "messages": [user(TEXT), ANSWER]}, ["1.JPG"], f"{MARK}what?"),
        ({"images": DATA_URL, "messages": [user(TEXT), ANSWER]}, [DATA_URL], f"{MARK}what?"),
        (
            {"image": BASE64, "messages": [user(TEXT), ANSWER]},
            [f"data:;base64,{BASE64}"],
            f"{MARK}what?",
        ),
        # Anthropic's, Qwen's parts without a type, and OpenAI's responses.
        (
            {"messages": [user({"type": "image", "source": SOURCE}, TEXT), ANSWER]},
            ["data:;base64,iVBO"],
            f"{MARK}what?",
        ),
        (
            {
                "messages": [
                    user({"image": "file:///c.png"}, {"text": "what?"}),
                    {"role": "assistant", "content": [{"type": "output_text", "text": "a cat"}]},
                ]
            },
            ["file:///c.png"],
            f"{MARK}what?",
        ),
        # Ollama's and the Cauldron's, and parts under ShareGPT's name.
        (
            {"messages": [{"role": "user", "content": "what?", "images": ["a.png"]}, ANSWER]},
            ["a.png"],
            f"{MARK}what?",
        ),
        (
            {"images": [PNG], "texts": [{"user": "what?", "assistant": "a cat", "source": "x"}]},
            [PNG],
            f"{MARK}what?",
        ),
        (
            {"conversations": [user({"type": "image", "data": "iVBO"}, TEXT), ANSWER]},
            ["data:;base64,iVBO"],
            f"{MARK}what?",
        ),
        # Qwen's and Llama's tokens.
        (
            {
                "images": [PNG, PNG],
                "messages": [
                    {
                        "role": "user",
                        "content": "<|vision_start|><|image_pad|><|vision_end|>a<|image_pad|>",
                    },
                    ANSWER,
                ],
            },
            None,
            f"{MARK}a{MARK}",
        ),
        (
            {"images": [PNG], "messages": [user({"type": "text", "text": "<|image|>a"}), ANSWER]},
            None,
            f"{MARK}a",
        ),
    ],
)
def test_images_get_one_column_and_their_places(row, files_of_row, content):
    normal = shapes.normalize(row, ("messages",))
    if files_of_row is not None:
        assert normal["images"] == files_of_row
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
        ({"images": [PNG], "image": "b.png", "prompt": "what?"}, "give them in one column"),
        ({"images": [PNG, {"bytes": None}], "prompt": "what?"}, "image 2 of 2 in `images` is miss"),
        ({"images": [PNG], "rejected_images": [b"b"], "prompt": "what?"}, "`rejected_images`"),
        ({"video": "a.MP4", "prompt": "what?"}, "the row has a file in `video`"),
        (
            {"images": [PNG], "objects": {"bbox": [[1, 2, 3, 4]]}, "prompt": "<image> <bbox>"},
            "`objects`, which is not read",
        ),
    ],
)
def test_places_and_images_must_agree(row, message):
    with pytest.raises(ValueError, match=message):
        shapes.normalize(row, ("messages",) if "messages" in row else ("prompt",))


def test_columns_of_other_meanings_stay():
    row = {"prompt": "run it", "image": "debian:12", "images": None}
    assert shapes.normalize(row, ("prompt",)) == row


@pytest.mark.parametrize("side", [0, 1])
def test_both_answers_of_a_pair_see_the_same_images(side):
    answers = [[ANSWER], [{"role": "assistant", "content": [PLACE, TEXT]}]]
    row = {
        "images": [PNG],
        "prompt": "what?",
        "chosen": answers[side],
        "rejected": answers[1 - side],
    }
    with pytest.raises(ValueError, match=f"`chosen` has {side} places for images and `rejected`"):
        shapes.normalize(row, ("prompt", "chosen", "rejected"))


@pytest.mark.parametrize("has_prompt", [False, True])
def test_images_of_a_prompt_that_both_conversations_repeat_are_taken_once(has_prompt):
    asked = user({"type": "image_url", "image_url": {"url": DATA_URL}}, TEXT)
    row = {
        "chosen": [asked, ANSWER],
        "rejected": [asked, {"role": "assistant", "content": "a dog"}],
        **({"prompt": [asked]} if has_prompt else {}),
    }
    normal = shapes.normalize(row, ("prompt", "chosen", "rejected"))
    assert normal["images"] == [DATA_URL]
    assert normal["prompt"] == [{"role": "user", "content": f"{MARK}what?"}]
    assert normal["chosen"] == [ANSWER]


def test_a_column_that_the_user_names_holds_files():
    row = {"picture": "scans/17", "prompt": "what?"}
    normal = shapes.normalize(row, ("prompt",), ("images=picture",))
    assert normal["images"] == ["scans/17"]
    assert normal["prompt"] == f"{MARK}what?"


@pytest.mark.parametrize("text", ["<image> a cat", " a cat"])
def test_the_image_of_a_text_without_a_prompt_is_its_prompt(text):
    normal = shapes.normalize({"images": [PNG], "text": text}, ("prompt", "completion"))
    assert (normal["prompt"], normal["completion"]) == (MARK, " a cat")


def test_a_query_follows_its_history():
    row = {"query": "<image>and?", "response": "red", "images": [PNG], "history": [["a", "b"]]}
    normal = shapes.normalize(row, ("prompt", "completion"))
    assert [turn["content"] for turn in normal["prompt"]] == ["a", "b", f"{MARK}and?"]
    assert normal["completion"] == "red"
    pair = shapes.normalize(row | {"rejected_response": "blue"}, ("prompt", "chosen", "rejected"))
    assert (pair["chosen"], pair["rejected"]) == ("red", "blue")


def test_columns_that_look_like_pictures_are_found():
    row = {
        "images": [PNG],
        "image_path": "a.png",
        "image_1": {"bytes": b"\x89PNG", "path": None},
        "shots": ["a.jpg", "b.jpg"],
        "answer": "see <img src=a.png",
        "sound": {"bytes": b"RIFF____WAVE", "path": None},
        "completion": "a.png and b",
    }
    assert images.unnamed_pictures(row) == ["image_path", "image_1", "shots"]


def test_a_picture_is_no_long_text_and_part_of_its_prompt():
    picture = bytes(range(256)) * 20_000
    stored_rows.require_plain({"images": [{"bytes": picture}]}, "row 1")
    rows = [{"prompt": "what?", "images": [{"bytes": bytes([i % 2])}]} for i in range(3)]
    assert files.warnings(rows[:2], []) == []
    assert files.warnings(rows, rows[:1])[0] == "1 prompts repeat earlier ones"


def test_messages_as_text_have_images_in_their_parts():
    row = {"message": json.dumps([user({"type": "image", "image": "a.png"}, TEXT)])}
    normal = shapes.normalize(row, ("prompt",), ("prompt=message",))
    assert normal["images"] == ["a.png"]
    assert normal["prompt"] == [{"role": "user", "content": f"{MARK}what?"}]


def test_names_of_columns_reach_into_lists():
    row = {"prompt": "what?", "answers": ["red", {"text": "blue"}]}
    names = ("first=answers.0", "last=answers.-1.text")
    normal = shapes.normalize(row, ("prompt",), names)
    assert (normal["first"], normal["last"]) == ("red", "blue")
    for name in ("answer=answers.2", "answer=answers.red", "answer=prompt.0"):
        with pytest.raises(ValueError, match="there is no column"):
            shapes.normalize(row, ("prompt",), (name,))


def test_a_pil_image_has_the_digest_of_its_pixels():
    made = [Image.new("RGB", (2, 2), color) for color in ("red", "red", "blue")]
    digests = [row_stream.row_digest({"images": [image]}) for image in made]
    assert digests[0] == digests[1] != digests[2]
