"""Actions on screens, points and boxes: tables, and the forms of GUI-R1, UI-R1 and VLM-R1."""

import pytest

from tests.fixtures.reward_scores import score
from tpu_rl.errors import InputError
from tpu_rl.verifiers import actions

CLICK = {"action": "click", "box": [10, 20, 30, 40]}
TYPE = {"action": "type", "gt_bbox": [0, 0, 9, 9], "input_text": "New  York"}


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("<answer>[{'action': 'click', 'point': [10, 40]}]</answer>", CLICK, 1),
        ('{"action": "CLICK", "coordinate": [10.5, 20]}', CLICK, 1),
        ('{"action": "click", "point": [9, 20]}', CLICK, 1 / 2),
        ('{"action": "scroll", "point": [15, 25]}', CLICK, 1 / 2),
        ('{"action": "click", "point": "here"}', CLICK, 1 / 2),
        ('{"action": "click", "point": [1, 2, 3]}', CLICK, 1 / 2),
        ('{"action": "click"}', CLICK, 1 / 2),
        ('{"action": "type", "point": [1, 2], "text": "new york"}', TYPE, 1),
        ('{"action": "type", "point": [1, 2], "text": "york"}', TYPE, 2 / 3),
        ('{"action": "scroll"}', '{"action": "scroll"}', 1),
        ("click (15, 25)", CLICK, 0),
        ("[]", CLICK, 0),
        ("<think>{'action': 'click', 'point': [15, 25]}", CLICK, 0),
        ("", CLICK, 0),
    ],
)
def test_the_share_of_right_parts_of_an_action(text, gold, value):
    assert score("action", [text], answer=[gold]) == [pytest.approx(value)]


def test_points_in_boxes():
    texts = ["(10, 20)", "not [1, 1] but (30.0, 40)", "[9, 20]", "[20, 30, 22, 32]", "no", ""]
    assert score("point_in_box", texts, answer=[[10, 20, 30, 40]] * 6) == [1, 1, 0, 1, 0, 0]
    assert score("point_in_box", ["(1, 1)"], answer=["[0, 0, 1, 1]"]) == [1]


def test_overlaps_of_boxes():
    texts = ["[0, 0, 2, 2]", "[1, 0, 3, 2]", "(2, 0, 3, 2)", "[1, 1, 0, 0]", "[0, 0, 2]"]
    answer = [[0, 0, 2, 2]] * 5
    assert score("box_iou", texts, answer=answer) == [1, pytest.approx(1 / 3), 0, 0, 0]
    assert score("box_iou(threshold=0.3)", texts, answer=answer) == [1, 1, 0, 0, 0]
    assert actions.iou((0, 0, 0, 0), (0, 0, 0, 0)) == 0


@pytest.mark.parametrize(
    ("name", "gold"),
    [
        ("action", {}),
        ("action", None),
        ("action", {"action": "click", "box": [1, 2]}),
        ("point_in_box", [1, 2, 3]),
        ("point_in_box", None),
        ("box_iou", [3, 0, 1, 1]),
        ("box_iou", "left"),
        ("box_iou", [0, 0, float("nan"), 1]),
    ],
)
def test_references_that_cannot_be_read_are_input_errors(name, gold):
    with pytest.raises(InputError, match="column 'answer' of the data"):
        score(name, ["(1, 1)"], answer=[gold])
