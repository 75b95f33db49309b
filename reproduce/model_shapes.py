"""Parameter shapes of the models the noise is measured on, by formula: noise needs no forward pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

Shapes = dict[str, tuple[int, ...]]


def cnn() -> Shapes:
    """Six 3×3 convolutions and a linear layer on 32×32 images: 0.3M parameters."""
    shapes: Shapes = {}
    widths = [3, 32, 32, 64, 64, 128, 128]
    for k, (inputs, outputs) in enumerate(pairwise(widths)):
        shapes |= {f"conv{k}.weight": (outputs, inputs, 3, 3), f"conv{k}.bias": (outputs,)}
    return shapes | _linear("head", 2048, 10)


def wide_resnet_40_4() -> Shapes:
    """WideResNet-40-4 with group normalisation, ten classes: 9M parameters."""
    shapes: Shapes = {"stem.weight": (16, 3, 3, 3)}
    inputs = 16
    for stage, outputs in enumerate((64, 128, 256)):
        for block in range(6):
            at = f"stage{stage}.{block}"
            shapes |= _norm(f"{at}.norm1", inputs) | {f"{at}.conv1.weight": (outputs, inputs, 3, 3)}
            shapes |= _norm(f"{at}.norm2", outputs) | {f"{at}.conv2.weight": (outputs, outputs, 3, 3)}
            if inputs != outputs:
                shapes[f"{at}.shortcut.weight"] = (outputs, inputs, 1, 1)
            inputs = outputs
    return shapes | _norm("norm", inputs) | _linear("head", inputs, 10)


def vit(width: int, layers: int, patch: int) -> Shapes:
    """A vision transformer on 224×224 images with ten classes."""
    shapes: Shapes = {
        "class_token": (1, 1, width),
        "positions": (1, (224 // patch) ** 2 + 1, width),
        "patches.weight": (width, 3, patch, patch),
        "patches.bias": (width,),
    }
    for k in range(layers):
        at = f"layer{k}"
        shapes |= _norm(f"{at}.norm1", width) | _linear(f"{at}.qkv", width, 3 * width)
        shapes |= _linear(f"{at}.out", width, width) | _norm(f"{at}.norm2", width)
        shapes |= _linear(f"{at}.up", width, 4 * width) | _linear(f"{at}.down", 4 * width, width)
    return shapes | _norm("norm", width) | _linear("head", width, 10)


def bert(width: int, layers: int) -> Shapes:
    """A BERT encoder with pooler and a two-class head."""
    shapes: Shapes = {"words": (30522, width), "positions": (512, width), "types": (2, width)}
    shapes |= _norm("embedding.norm", width)
    for k in range(layers):
        at = f"layer{k}"
        for name in ("query", "key", "value", "out"):
            shapes |= _linear(f"{at}.{name}", width, width)
        shapes |= _linear(f"{at}.up", width, 4 * width) | _linear(f"{at}.down", 4 * width, width)
        shapes |= _norm(f"{at}.norm1", width) | _norm(f"{at}.norm2", width)
    return shapes | _linear("pooler", width, width) | _linear("head", width, 2)


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


MODELS: dict[str, Callable[[], Shapes]] = {
    "cnn": cnn,
    "wrn-40-4": wide_resnet_40_4,
    "vit-b": lambda: vit(768, 12, 16),
    "vit-l": lambda: vit(1024, 24, 16),
    "vit-h": lambda: vit(1280, 32, 14),
    "bert-tiny": lambda: bert(128, 2),
    "bert-base": lambda: bert(768, 12),
    "bert-large": lambda: bert(1024, 24),
    "flat-20m": lambda: {"weight": (20_000_000,)},
}
