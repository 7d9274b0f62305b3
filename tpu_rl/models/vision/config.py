"""The configurations of towers that read images: their sizes, weights, pieces of images and tokens.

`TOWERS` in `vision.towers` says how each is read from files and computed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

TOP = "vision"
LAYERS = "vision_layers"
MERGERS = "vision_mergers"
"""The parts of the params tree: outside of layers, in layers, and the projectors of the layers that
DeepStack reads. The leaves of the last two are stacked."""

MATRICES = tuple(
    f"vision_{_name}" for _name in ("query", "key", "value", "output", "gate", "up", "down")
)
IMAGE_MATRICES = (
    *MATRICES,
    *("projector_in", "projector_out", "projector_merge", "projector_read", "projector_matrix"),
)
"""Matrices of a tower and its projector, [outputs, inputs] as in files."""

BOUNDS = ("_input_min", "_input_max", "_output_min", "_output_max")
"""Suffixes of the names of numbers to which the inputs and the outputs of a tower's matrix are
clipped; the prefix is the name of the matrix (Gemma 4)."""

NO_BOUND = 2.0**127
"""The size of bounds that clip nothing. Files have infinite ones, and params are finite."""

UNTRAINED = (*BOUNDS, "vision_feature_bias", "vision_feature_gain")
"""Ends of the names of weights that are measured and not learned: they never train."""

ONES = ("vision_feature_gain", "vision_attention_gain", "vision_mlp_gain")
"""Weights that are 1 in a random model, beside the gains of norms."""

UNIT_SIZE = ("vision_class", "vision_position", "vision_axis_positions")
"""Weights with a standard deviation of 1 in a random model, as large as what they are added to:
patches of pixels of size 1 give 1. Smaller ones are lost behind the first norm, and the tower does
not learn places."""

_WIDTH = ("vision_embed",)
_PATCH = ("channel", "patch_row", "patch_column")

WEIGHT_AXES: dict[str, tuple[str, ...]] = {
    "vision_class": _WIDTH,
    "vision_patch": (*_WIDTH, *_PATCH),
    "vision_position": ("vision_position", *_WIDTH),
    "vision_query": ("vision_heads", *_WIDTH),
    "vision_key": ("vision_kv_heads", *_WIDTH),
    "vision_value": ("vision_kv_heads", *_WIDTH),
    "vision_output": (*_WIDTH, "vision_heads"),
    "vision_gate": ("vision_mlp", *_WIDTH),
    "vision_up": ("vision_mlp", *_WIDTH),
    "vision_down": (*_WIDTH, "vision_mlp"),
    "vision_frames": (*_WIDTH, "channel", "patch_time", "patch_row", "patch_column"),
    "vision_pixels": (*_WIDTH, "pixels"),
    "vision_axis_positions": ("vision_axes", "vision_position", *_WIDTH),
    "vision_query_norm": ("vision_head_dim",),
    "vision_key_norm": ("vision_head_dim",),
    **dict.fromkeys(
        (
            *("vision_attention_post_norm", "vision_mlp_post_norm"),
            *("vision_attention_gain", "vision_mlp_gain"),
            *("vision_feature_bias", "vision_feature_gain", "projector_pooled_norm"),
        ),
        _WIDTH,
    ),
    "projector_merge": ("projector", "merged"),
    "projector_read": ("embed", "projector"),
    "projector_in": ("projector", *_WIDTH),
    "projector_out": ("embed", "projector"),
    "projector_matrix": ("embed", "merged_patches"),
}
"""Weight of a tower or its projector -> logical axes, as in `models.config.WEIGHT_AXES`."""

for _name in (*MATRICES, *("vision_patch", "vision_frames"), *IMAGE_MATRICES[len(MATRICES) : -1]):
    WEIGHT_AXES[f"{_name}_bias"] = WEIGHT_AXES[_name][:1]
for _name, _norm_axes in {
    **dict.fromkeys(
        (f"vision_{_place}" for _place in ("first", "attention", "mlp", "last")), _WIDTH
    ),
    "projector": _WIDTH,
    "projector_merged": ("merged",),
}.items():
    WEIGHT_AXES |= {f"{_name}_norm": _norm_axes, f"{_name}_norm_bias": _norm_axes}
for _name in MATRICES:
    WEIGHT_AXES |= {_name + _bound: () for _bound in BOUNDS}

PLAIN_NORMS = tuple(
    _name for _name in WEIGHT_AXES if _name.endswith("_norm") and _name != "projector_pooled_norm"
)
"""Norms whose scale is the gain itself, also where `NormConfig.unit_offset` is set."""

Written = Literal["all", "before", "token"]
"""The tokens of an image in texts that chat templates write: all of them; the first alone, which
stands before it (Gemma 3); or the one that stands for it alone (Gemma 4)."""

Layout = tuple[str | int, ...]
"""The tokens of an image in a text: a number is a run of so many features, and a text has control
tokens between runs."""

IMAGE_TOKEN = re.compile(
    r"(image|video|audio|vision(_start|_end)?|boi|eoi|boa|eoa)_token_(id|index)"
)
"""Names, in config.json, of the tokens that stand for images, videos and sound in texts."""

TILE_TOKEN = re.compile(r"<(row_\d+_col_\d+|global-img|fake_token_around_image|/?img|video)>")
"""Control tokens of the tokenizers of Idefics3 and InternVL, which config.json does not name."""


class WeightNames(NamedTuple):
    """The weights of a tower and its projector."""

    top: list[str]
    """Those outside of layers."""
    layer: list[str]
    merger: list[str] = []
    """Those of one of the projectors of DeepStack."""


def biased(*names: str) -> list[str]:
    """Return the names, each with that of its bias."""
    return [form for name in names for form in (name, f"{name}_bias")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A tower that reads images, and its projector (see `models.vision`)."""

    model_type: str
    """A key of `vision.towers.TOWERS`: Hugging Face's name of the family."""
    patch_size: int
    """Height and width of a patch, in pixels."""
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    activation: str
    """Key of `layers.ACTIVATIONS`, in the tower."""
    image_token: int
    """The id of the token that stands for an image in texts, before it is replaced."""
    around: tuple[int, int] | None = None
    """The ids of the tokens before and behind an image in texts, if there are any."""
    tile_tokens: tuple[int, ...] = ()
    """The ids of `TILE_TOKEN` in the tokenizer: they stand around the tiles of an image, and around
    the whole image (Idefics3, InternVL)."""
    gap: str = ""
    """The text before and behind the tokens around an image (Gemma 3)."""
    written: Written = "all"
    two_way: tuple[str, ...] = ()
    """The types of layers in which tokens of an image see the later ones of the same image (Gemma
    3: all layers)."""
    deep_layers: tuple[int, ...] = ()
    """The layers whose states DeepStack adds to the first layers of the text (Qwen3-VL)."""
    layer_input_token: int = 0
    """The id of the token whose own inputs of layers (`DecoderConfig.layer_input_size`) features
    have."""
    has_audio: bool = False
    """True if the files have a tower for sound, which is not read."""
    channels: int = 3
    eps: float = 1e-6
    """The epsilon of the tower's norms."""
    source: str = "{}"
    """The Hugging Face configuration around that of the text, as JSON."""

    @property
    def is_two_way(self) -> bool:
        """True if tokens of an image see later ones of it in some layers."""
        return bool(self.two_way)

    @property
    def has_tiles(self) -> bool:
        """True if an image is cut into tiles, each of which is a piece."""
        return False

    @property
    def tokens(self) -> set[int]:
        """The ids of tokens that stand for images, videos and sound in texts, or around them."""
        source = json.loads(self.source)
        named = {token_id for name, token_id in source.items() if IMAGE_TOKEN.fullmatch(name)}
        return {self.image_token, *(self.around or ()), *(named - {None}), *self.tile_tokens}

    @property
    def sizes_of_axes(self) -> dict[str, int]:
        """The sizes of the axes in `WEIGHT_AXES` that most towers share."""
        return {
            "vision_embed": self.hidden_size,
            "vision_heads": self.hidden_size,
            "vision_kv_heads": self.hidden_size,
            "vision_mlp": self.mlp_size,
            "channel": self.channels,
            "patch_row": self.patch_size,
            "patch_column": self.patch_size,
        }

    def advances(self, pieces: np.ndarray) -> np.ndarray | None:
        """Return the number of positions [..., F] that features of pieces [..., n, ...] take; None
        if each takes one, as a word does."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareVisionConfig(VisionConfig):
    """A tower that reads squares of pixels: whole images, or tiles (see `vision.square`)."""

    image_size: int
    """Height and width of a piece, in pixels."""
    num_read_layers: int
    """Number of the first layers that images go through; the states behind them are features."""
    projector_activation: str
    projector_bias: bool
    keeps_first: bool
    """True if the state of the tower's first token is a feature too: of CLIP's class token, or of
    the first patch."""
    has_class: bool = True
    """True if the tower's first token is a class token (CLIP, InternVL). False: SigLIP (arXiv
    2303.15343)."""
    has_first_norm: bool = True
    """True if there is a norm before the layers (CLIP)."""
    has_patch_bias: bool = False
    has_key_biases: bool = True
    """True if queries, keys and values have biases."""
    has_gains: bool = False
    """True if each branch of a layer is multiplied by a gain (InternVL)."""
    has_last_norm: bool = False
    """True if features are normed behind the last layer."""
    projector: Literal["mlp", "pooled", "shuffled", "shuffled_mlp"] = "mlp"
    """The way from states to features. "mlp": by two matrices (LLaVA). "pooled": by the mean in
    each square of patches, a norm and a matrix (Gemma 3). "shuffled": by a matrix of all states of
    a square (Idefics3). "shuffled_mlp": by a norm of these and two matrices (InternVL)."""
    merge: int = 1
    """Height and width, in patches, of the squares that become one feature."""

    @property
    def features_per_piece(self) -> int:
        """P: the number of features, and so of tokens, of a piece: an image, or a tile
        (Idefics3, InternVL)."""
        squares = (self.image_size // self.patch_size // self.merge) ** 2
        return squares + self.has_class + self.keeps_first - 1

    @property
    def weight_names(self) -> WeightNames:
        """The weights that the tower and its projector have."""
        top = ["vision_class"] * self.has_class
        top += biased("vision_patch") if self.has_patch_bias else ["vision_patch"]
        top += ["vision_position", *biased(*["vision_first_norm"] * self.has_first_norm)]
        # Files also have the last norm where features are states before it.
        top += biased("vision_last_norm") if self.projector != "shuffled_mlp" else []
        mlp = ("projector_in", "projector_out")
        top += {
            "mlp": biased(*mlp) if self.projector_bias else [*mlp],
            "pooled": ["projector_pooled_norm", "projector_matrix"],
            "shuffled": ["projector_matrix"],
            "shuffled_mlp": biased("projector_merged_norm", "projector_merge", "projector_read"),
        }[self.projector]
        projections = ("vision_query", "vision_key", "vision_value")
        layer = [
            *biased("vision_attention_norm"),
            *(biased(*projections) if self.has_key_biases else projections),
            *biased("vision_output"),
            *["vision_attention_gain"] * self.has_gains,
            *biased("vision_mlp_norm", "vision_up", "vision_down"),
            *["vision_mlp_gain"] * self.has_gains,
        ]
        return WeightNames(top, layer)

    @property
    def has_tiles(self) -> bool:
        return self.projector in ("shuffled", "shuffled_mlp")

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece (see `tokenizers.images`): channels, height and width."""
        return (self.channels, self.image_size, self.image_size)

    def sizes(self, text_size: int) -> dict[str, int]:
        """Return the sizes of the axes in `WEIGHT_AXES`, for texts of `text_size` dimensions."""
        in_square = self.merge**2 if self.has_tiles else 1
        return self.sizes_of_axes | {
            "vision_position": (self.image_size // self.patch_size) ** 2 + self.has_class,
            "projector": text_size,
            "merged_patches": in_square * self.hidden_size,
            "merged": in_square * self.hidden_size,
        }

    def pieces_of_prompt(self, tokens: int) -> int:
        """Return the number of pieces that the planner counts for a prompt: one image, or as many
        tiles as fill it."""
        return max(tokens // self.features_per_piece, 1) if self.has_tiles else 1

    def later_features(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of later features of the same image [..., n P] for each feature of
        pieces [..., n, C, H, W]."""
        *outer, count = pieces.shape[:-3]
        later = np.tile(np.arange(self.features_per_piece)[::-1], count)
        return np.broadcast_to(later, (*outer, len(later)))

    def layout(self, height: int, width: int, processor: Any) -> Layout:
        """Return the tokens of an image of so many pixels; see `tokenizers.images`."""
        if not self.has_tiles:
            return (self.features_per_piece,)
        patches = processor.get_number_of_image_patches(height, width)
        if self.projector == "shuffled_mlp":
            return self._run_of_tiles(patches)
        _, rows, columns = patches
        return _tiles(rows, columns, self.features_per_piece)

    def pieces(self, processed: Mapping[str, Any]) -> tuple[np.ndarray, Layout]:
        """Return an image as one piece, and its tokens; see `tokenizers.images`."""
        pixels = np.asarray(processed["pixel_values"], np.float32)
        pixels = pixels[0] if self.projector == "shuffled" else pixels
        if pixels.shape[1:] != self.piece_shape or not (self.has_tiles or len(pixels) == 1):
            raise ValueError(
                f"the image processor makes an array of the shape {pixels.shape}, and the "
                f"model's tower reads {self.piece_shape}"
            )
        if not self.has_tiles:
            return pixels, (self.features_per_piece,)
        if self.projector == "shuffled_mlp":
            return pixels, self._run_of_tiles(len(pixels))
        if not np.all(processed["pixel_attention_mask"]):
            raise ValueError("the image processor pads tiles, and the tower reads whole ones")
        rows, columns = (int(np.ravel(processed[name])[0]) for name in ("rows", "cols"))
        return pixels, _tiles(rows, columns, self.features_per_piece)

    def _run_of_tiles(self, count: int) -> Layout:
        """Return the tokens of an image of InternVL: its tiles and then, if there are several, the
        whole image."""
        return ("<img>", count * self.features_per_piece, "</img>")


def _tiles(rows: int, columns: int, features: int) -> Layout:
    """Return the tokens of an image of Idefics3: its tiles, row by row, and the whole image.

    A small image has no tiles (0 rows). The texts are those of transformers' Idefics3Processor.
    """
    fake = "<fake_token_around_image>"
    tokens: list[str | int] = []
    gap = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            tokens += [f"{gap}{fake}<row_{row}_col_{column}>", features]
            gap = ""
        gap = "\n"
    return (*tokens, f"{gap}{gap}{fake}<global-img>", features, fake)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableVisionConfig(VisionConfig):
    """A tower that reads a table of the patches of images of any size (see `vision.qwen`).

    A piece is the patches of one feature.
    """

    merge_size: int
    """m: m x m patches become one feature."""
    rope_theta: float = 10_000.0

    @property
    def features_per_piece(self) -> int:
        """A piece is the patches of one feature."""
        return 1

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece (see `vision.qwen`)."""
        return (3 + self.channels * (self.merge_size * self.patch_size) ** 2,)

    def pieces_of_prompt(self, tokens: int) -> int:
        """Return the number of pieces that the planner counts for a prompt: images fill it."""
        return tokens

    def later_features(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of later features of the same image [..., n] for each piece."""
        number, rows, columns = (pieces[..., i].astype(np.int32) for i in range(3))
        return np.maximum(rows * columns - 1 - number, 0)

    def layout(self, height: int, width: int, processor: Any) -> Layout:
        """Return the tokens of an image of so many pixels; see `tokenizers.images`."""
        patches = processor.get_number_of_image_patches(height, width)
        return (patches // self.merge_size**2,)

    def table(self, patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Return the pieces of an image of rows x columns features, whose patches [n, C p p] are
        piece by piece."""
        count = rows * columns
        grid = np.tile(np.array([0, rows, columns], np.float32), (count, 1))
        grid[:, 0] = np.arange(count)
        return np.concatenate([grid, patches.reshape(count, -1)], axis=1)

    def misfit(self, made: tuple[int, ...], grid: str) -> ValueError:
        """Return the error for an image processor that makes other patches."""
        return ValueError(
            f"the image processor makes {made} numbers of {grid} patches, and the model's tower "
            f"reads patches of {self.patch_size} x {self.patch_size} pixels, {self.merge_size} x "
            f"{self.merge_size} of them together"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(TableVisionConfig):
    """The tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, and its projector."""

    frames: int
    """Frames of a patch. A picture is so many equal ones."""
    has_rms_norms: bool = False
    """True if norms have neither means nor biases (Qwen2.5-VL)."""
    is_gated: bool = False
    """True if the MLP has a gate (Qwen2.5-VL)."""
    has_patch_bias: bool = False
    window: int | None = None
    """Height and width, in features, of the windows inside of which layers attend (Qwen2.5-VL).
    None: all attend to the whole image."""
    full_layers: tuple[int, ...] = ()
    """The layers that attend to the whole image although there are windows."""
    position_side: int | None = None
    """Height and width of the table of position embeddings, which is stretched over each image
    (Qwen3-VL). None: there is none."""

    @property
    def weight_names(self) -> WeightNames:
        def norm(name: str) -> list[str]:
            return [name] if self.has_rms_norms else biased(name)

        top = [
            *(biased("vision_frames") if self.has_patch_bias else ["vision_frames"]),
            *(["vision_position"] if self.position_side else []),
            *norm("projector_norm"),
            *biased("projector_merge", "projector_read"),
        ]
        layer = [
            *norm("vision_attention_norm"),
            *biased("vision_query", "vision_key", "vision_value", "vision_output"),
            *norm("vision_mlp_norm"),
            *(biased("vision_gate") if self.is_gated else []),
            *biased("vision_up", "vision_down"),
        ]
        merger = biased("projector_merged_norm", "projector_merge", "projector_read")
        return WeightNames(top, layer, merger if self.deep_layers else [])

    def sizes(self, text_size: int) -> dict[str, int]:
        merged = self.merge_size**2 * self.hidden_size
        return self.sizes_of_axes | {
            "vision_position": (self.position_side or 0) ** 2,
            "patch_time": self.frames,
            "merged": merged,
            "projector": merged,
        }

    def advances(self, pieces: np.ndarray) -> np.ndarray:
        """Return the number of positions [..., n] from each feature to the next token: 0 inside of
        an image, and behind its last feature its longer side, in features."""
        number, rows, columns = (pieces[..., i].astype(np.int32) for i in range(3))
        return np.where(number == rows * columns - 1, np.maximum(rows, columns), 0)

    def pieces(self, processed: Mapping[str, Any]) -> tuple[np.ndarray, Layout]:
        """Return the pieces of an image, and its tokens; see `tokenizers.images`."""
        pixels = np.asarray(processed["pixel_values"], np.float32)
        frames, height, width = (int(size) for size in np.asarray(processed["image_grid_thw"])[0])
        rows = height // self.merge_size
        columns = width // self.merge_size
        count = rows * columns
        of_patch = self.channels * self.patch_size**2
        shape = (count * self.merge_size**2, of_patch * self.frames)
        if frames != 1 or pixels.shape != shape:
            raise self.misfit(pixels.shape, f"{frames} x {height} x {width}")
        # Of the equal frames of a patch one is kept.
        patches = pixels.reshape(-1, self.channels, self.frames, self.patch_size**2)[:, :, 0]
        return self.table(patches, rows, columns), (count,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(TableVisionConfig):
    """The tower of Gemma 4, and its projector (see `vision.gemma4`)."""

    num_kv_heads: int
    head_dim: int
    num_positions: int
    """Rows and columns of patches that have a position embedding."""
    is_clipped: bool = False
    """True if inputs and outputs of the matrices of layers are clipped (`BOUNDS`; E2B and E4B)."""
    is_standardized: bool = False
    """True if features have a bias subtracted and are multiplied by a gain (31B and 26B-A4B)."""

    @property
    def weight_names(self) -> WeightNames:
        standard = ["vision_feature_bias", "vision_feature_gain"] if self.is_standardized else []
        top = ["vision_pixels", "vision_axis_positions", *standard, "projector_matrix"]
        layer = [
            *("vision_attention_norm", "vision_query", "vision_key", "vision_value"),
            *("vision_query_norm", "vision_key_norm", "vision_output"),
            *("vision_attention_post_norm", "vision_mlp_norm"),
            *("vision_gate", "vision_up", "vision_down", "vision_mlp_post_norm"),
        ]
        if self.is_clipped:
            layer += [matrix + bound for matrix in MATRICES for bound in BOUNDS]
        return WeightNames(top, layer)

    def sizes(self, text_size: int) -> dict[str, int]:
        return self.sizes_of_axes | {
            "vision_heads": self.num_heads * self.head_dim,
            "vision_kv_heads": self.num_kv_heads * self.head_dim,
            "vision_head_dim": self.head_dim,
            "vision_axes": 2,
            "vision_position": self.num_positions,
            "pixels": self.channels * self.patch_size**2,
            "merged_patches": self.hidden_size,
        }

    def pieces(self, processed: Mapping[str, Any]) -> tuple[np.ndarray, Layout]:
        """Return the pieces of an image, and its tokens; see `tokenizers.images`."""
        pixels = np.asarray(processed["pixel_values"], np.float32)[0]
        places = np.asarray(processed["image_position_ids"])[0]
        is_patch = (places >= 0).all(-1)
        # Patches row by row, and then padding.
        width, height = (int(size) for size in places[is_patch].max(0) + 1)
        side = self.merge_size
        rows = height // side
        columns = width // side
        if (
            pixels.shape[1] != self.channels * self.patch_size**2
            or is_patch.sum() != height * width
            or (rows * side, columns * side) != (height, width)
        ):
            raise self.misfit(pixels.shape, f"{height} x {width}")
        if max(height, width) > self.num_positions:
            raise ValueError(
                f"the image has {height} x {width} patches, and the model's tower has positions "
                f"for {self.num_positions} in a row or a column"
            )
        patches = pixels[is_patch].reshape(rows, side, columns, side, -1).swapaxes(1, 2)
        return self.table(patches, rows, columns), (rows * columns,)


AnyVisionConfig = SquareVisionConfig | QwenVisionConfig | Gemma4VisionConfig
