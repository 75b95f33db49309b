"""A feature extractor that has seen no photograph: a WideResNet that learnt to tell random images apart.

``learn`` draws images (`random_images`), shows two random views of each, and moves the features of the two together
and those of different images apart, as Baradad et al. (2021) do. Nothing of CIFAR-10 goes in, so it costs no privacy.
`features` then makes numbers of photographs, which heads are trained on; or training goes on from the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lambdacgd.errors import InvalidInput
from reproduce.random_images import dead_leaves
from reproduce.record_models import WideResNet

FILE = Path(__file__).resolve().parents[1] / "results" / "record" / "prior.pt"
PARTS = (256, 1024, 512)  # of the features: the last stage's mean, its quarters' means, those of the stage before
_SIZE, _CROP = 40, 32
_EMBEDDING = 128


def random_views(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random view of each image, in [−1, 1]: a part of 8 to 100% of it, mirrored, its colours changed."""
    n, device = len(images), images.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, 1, 1, 1, generator=generator, device=device)

    share = uniform(0.08, 1.0).sqrt().view(n)
    ratio = torch.exp(uniform(math.log(3 / 4), math.log(4 / 3)) / 2).view(n)
    wide, high = (share * ratio).clamp_max(1), (share / ratio).clamp_max(1)
    mirrored = torch.where(uniform(0, 1).view(n) < 0.5, -1.0, 1.0)
    affine = torch.zeros(n, 2, 3, device=device)
    affine[:, 0, 0], affine[:, 1, 1] = wide * mirrored, high
    affine[:, 0, 2] = uniform(-1, 1).view(n) * (1 - wide)
    affine[:, 1, 2] = uniform(-1, 1).view(n) * (1 - high)
    grid = F.affine_grid(affine, [n, 3, _CROP, _CROP], align_corners=False)
    x = F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)
    x = x * uniform(0.6, 1.4)
    x = x.mean((1, 2, 3), keepdim=True).lerp(x, uniform(0.6, 1.4))
    weights = torch.tensor([0.299, 0.587, 0.114], device=device).view(1, 3, 1, 1)
    grey = (x * weights).sum(1, keepdim=True)
    x = grey + (x - grey) * torch.where(uniform(0, 1) < 0.2, 0.0, uniform(0.6, 1.4))
    x = x + torch.randn(n, 3, 1, 1, generator=generator, device=device) * 0.05  # in the place of a turn of hue
    return x.clamp(0, 1) * 2 - 1


def contrast(features: Tensor, temperature: float = 0.2) -> Tensor:
    """NT-Xent of features [2n, d], whose rows i and n + i belong together."""
    unit = F.normalize(features.float(), dim=1)
    alike = unit @ unit.T / temperature
    alike.fill_diagonal_(-math.inf)
    n = len(features) // 2
    other = torch.arange(2 * n, device=features.device).roll(n)
    return F.cross_entropy(alike, other)


def learn(
    path: Path,
    seconds: float,
    device: torch.device,
    *,
    batch: int = 1024,
    images: int = 262_144,
    rate: float = 0.5,
    seed: int = 0,
    depth: int = 16,
    width: int = 4,
    steps: int | None = None,
    say: Any = print,
) -> str:
    """Train for so long, from the weights in ``path`` if it is there, and write them there.

    Args:
        path: The file; ``prior.json`` beside it says what it is.
        seconds: How long to train. The rate rises for a twentieth of it and then falls to zero.
        device: Where to train.
        batch: Images a step; each is seen twice.
        images: How many are kept; a part of them is drawn anew all the time.
        rate: The learning rate.
        seed: Of weights and images.
        depth: Of the WideResNet.
        width: Of the WideResNet.
        steps: Stop after so many steps, for tests.
        say: Is told how it goes.

    Returns:
        The prior's name, from a digest of its weights.
    """
    began = time.monotonic()
    torch.manual_seed(seed)
    model = WideResNet(depth, width, _EMBEDDING).to(device)
    seen = 0
    if path.exists():
        content = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict({name: value.float() for name, value in content["weights"].items()})
        seen, seed = content["views"], seed + 1 + content["views"]
    generator = torch.Generator(device).manual_seed(seed)
    drawn = 4096 if images >= 4096 else images
    kept = torch.cat([dead_leaves(drawn, _SIZE, generator=generator) for _ in range(images // drawn)])
    say(f"{len(kept)} random images after {time.monotonic() - began:.1f} s")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    fast = device.type == "cuda"
    began, done, losses = time.monotonic(), 0, torch.zeros((), device=device)
    while True:
        share = (time.monotonic() - began) / seconds if steps is None else done / steps
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(share / 0.05 + 0.01, 0.5 * (1 + math.cos(math.pi * share)))
        if done % 16 == 15:
            place = (done // 16 * drawn) % len(kept)
            kept[place : place + drawn] = dead_leaves(drawn, _SIZE, generator=generator)
        chosen = kept[torch.randint(len(kept), (batch,), generator=generator, device=device)]
        x = torch.cat([random_views(chosen, generator), random_views(chosen, generator)])
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            out = model(x)
        loss = contrast(out)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses += loss.detach()
        done += 1
        if done % 200 == 0:
            passed = time.monotonic() - began
            say(
                f"{passed:.0f} s, {done} steps, {2 * batch * done / passed:.0f} views/s, loss {float(losses) / 200:.3f}"
            )
            losses.zero_()
    seen += 2 * batch * done
    weights = {name: value.half().cpu() for name, value in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": weights, "views": seen, "depth": depth, "width": width}, path)
    facts = {"name": name_of(path), "views": seen, "seconds": round(time.monotonic() - began, 1)}
    path.with_suffix(".json").write_text(json.dumps(facts) + "\n")
    say(json.dumps(facts))
    return str(facts["name"])


def name_of(path: Path = FILE) -> str | None:
    """The prior's name, by its weights; where only ``prior.json`` is there, what that says; else None."""
    if path.exists():
        return "prior-" + hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    about = path.with_suffix(".json")
    return str(json.loads(about.read_text())["name"]) if about.exists() else None


@cache
def load(name: str, path: Path = FILE) -> WideResNet:
    """The prior of that name.

    Raises:
        InvalidInput: The file is not there, or holds another one.
    """
    if not path.exists() or name_of(path) != name:
        raise InvalidInput("prior", name, f"it is not in {path}; python -m reproduce prior makes one")
    content = torch.load(path, weights_only=True)
    model = WideResNet(content["depth"], content["width"], _EMBEDDING)
    model.load_state_dict({key: value.float() for key, value in content["weights"].items()})
    return model.eval()


@torch.no_grad()
def features(model: WideResNet, images: Tensor) -> Tensor:
    """Numbers of images in [−1, 1]: means of two stages' maps, over all and over quarters, of both mirrorings."""
    straight, mirrored = _maps(model, images), _maps(model, images.flip(3))
    both = [(a + b.flip(3)) / 2 for a, b in zip(straight, mirrored, strict=True)]
    return torch.cat([part.flatten(1) for part in both], 1)


def _maps(model: WideResNet, images: Tensor) -> list[Tensor]:
    stages = model.stages(images)
    last, before = model.norm(stages[2]), stages[1]
    return [last.mean((2, 3), keepdim=True), F.adaptive_avg_pool2d(last, 2), F.adaptive_avg_pool2d(before, 2)]
