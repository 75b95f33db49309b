"""The record's recipes: features that see no data, views, weight standardisation, the search and its page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambdacgd.clipping import check_model
from reproduce import problems, record
from reproduce.augment import Views, moved, scrambled, seed_of
from reproduce.data import Examples, Splits
from reproduce.framework import Settings
from reproduce.frontier import DP_SGD, OURS
from reproduce.patches import KINDS, Components, DrawnFeatures, Patches
from reproduce.pool import SEARCHES
from reproduce.problems import Data, capturable, make_model, mixes_of, physical_batch_size, views_of
from reproduce.random_images import dead_leaves
from reproduce.record import BY_NAME, PLANS, record_cells, record_search
from reproduce.record_models import Head, ScatteringCNN, ScatteringLinear, WideResNet
from reproduce.runs import PlanBook, Result, TrainingRun
from reproduce.scattering import Scattering
from reproduce.search import stored
from reproduce.trainer import plan_requests, train

FEW = KINDS["few"]


def images(count: int = 3, channels: int = 1, size: int = 32) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(5)) * 2 - 1


# --- scattering -------------------------------------------------------------------------------------------------------


def test_scattering_has_the_maps_it_should() -> None:
    assert Scattering()(images(2, 3)).shape == (2, 243, 8, 8)
    assert Scattering(16)(images(1, 1, 16)).shape == (1, 81, 4, 4)
    assert not list(Scattering().parameters())


def test_scattering_is_the_convolutions_it_says() -> None:
    net, x = Scattering(), images(1)
    padded = F.pad(x, (4,) * 4, mode="reflect")[0, 0]
    wave, wider = (torch.fft.ifft2(spectra[i].to(torch.complex64)) for spectra, i in ((net.fine, 3), (net.coarse, 5)))

    def convolved(a: Tensor, b: Tensor) -> Tensor:  # circular, from its definition
        out = torch.zeros(a.shape, dtype=b.dtype)
        for i in range(len(a)):
            for j in range(len(a)):
                out += b[i, j] * a.roll((i, j), (0, 1))
        return out

    def smoothed(a: Tensor) -> Tensor:  # by a Gaussian of 1.6 pixels of the image, at every fourth of them
        pixel = 40 // len(a)
        place = pixel * torch.arange(len(a))
        apart = torch.minimum(place, 40 - place)
        line = torch.exp(-(apart**2) / (2 * 1.6**2))
        whole = convolved(a, torch.outer(line, line) * pixel**2 / (2 * math.pi * 1.6**2))
        return whole[:: 4 // pixel, :: 4 // pixel][1:-1, 1:-1]

    first = convolved(padded, wave).abs()
    out = net(x)[0]
    for place, wanted in (
        (0, padded),
        (1 + 3, first),
        (1 + 8 + 5, convolved(padded, wider).abs()[::2, ::2]),
        (1 + 16 + 3 * 8 + 5, convolved(first, wider).abs()[::2, ::2]),
    ):
        torch.testing.assert_close(out[place], smoothed(wanted), atol=1e-5, rtol=1e-4)


def test_wavelets_have_no_mean_and_lengthen_nothing() -> None:
    net = Scattering()
    waves = torch.cat([net.fine, net.coarse])
    assert float(waves[:, 0, 0].abs().max()) < 1e-6
    torch.testing.assert_close(net.smooth.sum(1), torch.ones(8))
    line = torch.fft.fft(net.smooth[0].roll(-4)).real
    mirrored = waves.flip(1, 2).roll((1, 1), (1, 2))
    power = (waves.square() + mirrored.square()).sum(0) / 2 + torch.outer(line, line).square()
    assert float(power.max()) <= 1 + 1e-4  # |x|² is not exceeded by what the filters give (Littlewood and Paley)
    flat = net(torch.full((1, 1, 32, 32), 0.7))[0]
    torch.testing.assert_close(flat[0], torch.full((8, 8), 0.7))
    assert float(flat[1:].abs().max()) < 1e-5


def test_scattering_moves_little_where_pixels_move_by_one_and_turns_with_the_image() -> None:
    net, x = Scattering(), images(4)
    smooth = F.avg_pool2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), 5, 1)
    by_one = smooth.roll(1, 3)
    moved_maps = (net(by_one) - net(smooth)).norm() / net(smooth).norm()
    moved_pixels = (by_one - smooth).norm() / smooth.norm()
    assert moved_maps < moved_pixels / 2
    turned = net(smooth.rot90(1, (2, 3)))
    quarter = [1 + 8 * j + (l + 4) % 8 for j in range(2) for l in range(8)]  # angles go by π/8, modulo π
    # The middle: borders are padded alike, but a subsampled grid does not turn onto itself.
    ours = net(smooth)[:, 1:17].rot90(1, (2, 3))[..., 2:6, 2:6].mean((2, 3))
    torch.testing.assert_close(turned[:, quarter][..., 2:6, 2:6].mean((2, 3)), ours, rtol=0.3, atol=2e-3)


# --- views ------------------------------------------------------------------------------------------------------------


def test_views_depend_on_run_step_example_and_view_alone() -> None:
    x = images(6, 3, 8)
    look = Views("one", 2, torch.device("cpu"), padding=2)
    examples = torch.tensor([4, 4, 9, 9, 0, 0])
    first = look(x, examples)
    assert torch.equal(first, look(x, examples))
    part = look(x[2:4], examples[2:4])  # cut elsewhere
    assert torch.equal(part, first[2:4])
    bits = scrambled(seed_of("one"), torch.tensor(1), torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    others = [
        scrambled(seed_of("two"), torch.tensor(1), torch.arange(1000), torch.zeros(1000, dtype=torch.int64)),
        scrambled(seed_of("one"), torch.tensor(2), torch.arange(1000), torch.zeros(1000, dtype=torch.int64)),
        scrambled(seed_of("one"), torch.tensor(1), torch.arange(1000), torch.ones(1000, dtype=torch.int64)),
    ]
    assert len(bits.unique()) == 1000
    assert (bits >= 0).all()
    assert all(not (bits == other).any() for other in others)


def test_every_view_is_of_its_own_example_alone() -> None:
    x = images(10, 3, 8).repeat_interleave(5, 0)
    examples = torch.arange(10).repeat_interleave(5)
    look = Views("one", 5, torch.device("cpu"), mixed=2, padding=2)
    mine, others = look(x, examples), examples != 3
    changed = x.clone()
    changed[others] = torch.randn_like(x[others])
    assert torch.equal(look(changed, examples)[~others], mine[~others])
    alone = look(x[~others], examples[~others])  # in a batch of its own
    assert torch.equal(alone, mine[~others])


def test_mixes_lie_between_two_plain_views_and_the_others_are_plain() -> None:
    x, examples = images(200, 1, 8).repeat_interleave(5, 0), torch.arange(200).repeat_interleave(5)
    plain = Views("one", 5, torch.device("cpu"), padding=2)(x, examples).view(200, 5, -1)
    mixed = Views("one", 5, torch.device("cpu"), mixed=2, padding=2)(x, examples).view(200, 5, -1)
    assert torch.equal(mixed[:, :3], plain[:, :3])
    pairs, weights = [0, 0, 0], []
    for views, mix in [(mixed[i, :3], mixed[i, view]) for i in range(200) for view in (3, 4)]:
        fits = []
        for one, other in ((0, 1), (0, 2), (1, 2)):
            difference = views[one] - views[other]
            if not difference.any():  # one of 50 pairs of views is the same crop
                fits.append((math.inf, 0.0))
                continue
            weight = float((mix - views[other]) @ difference / (difference @ difference))
            fits.append((float((views[other] + weight * difference - mix).abs().max()), weight))
        left, weight = min(fits)
        assert left < 1e-5
        assert -1e-5 <= weight <= 1 + 1e-5
        pairs[fits.index((left, weight))] += 1
        weights.append(weight)
    assert min(pairs) > 100  # 133 expected, nine standard deviations are 85
    assert abs(sum(weights) / 400 - 0.5) < 0.08  # 5.5 standard deviations
    look = Views("one", 5, torch.device("cpu"), mixed=2, padding=2)
    look.step.fill_(2)
    assert not torch.equal(look(x, examples).view(200, 5, -1)[:, 3], mixed[:, 3])


def test_the_random_numbers_of_views_are_even() -> None:
    bits = scrambled(seed_of("one"), torch.tensor(7), torch.arange(90_000), torch.zeros(90_000, dtype=torch.int64))
    for values in ((bits >> 1) % 9, (bits >> 24) % 9):
        counts = torch.bincount(values, minlength=9).double()
        assert float((counts - 10_000).abs().max()) < 5 * math.sqrt(10_000)
    assert abs(float((bits & 1).double().mean()) - 0.5) < 5 * 0.5 / 300
    pairs = torch.bincount(((bits >> 1) % 9) * 9 + (bits >> 24) % 9, minlength=81).double()
    assert float(((pairs - 90_000 / 81) ** 2 / (90_000 / 81)).sum()) < 160  # χ² with 80 degrees of freedom


def test_crops_and_mirrors_are_what_slicing_gives() -> None:
    x = images(4, 3, 8)
    down, right = torch.tensor([0, 4, 2, 1]), torch.tensor([3, 0, 2, 4])
    flipped = torch.tensor([False, True, False, True])
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    out = moved(x, down, right, flipped, 2)
    for i in range(4):
        want = padded[i, :, down[i] : down[i] + 8, right[i] : right[i] + 8]
        assert torch.equal(out[i], want.flip(2) if flipped[i] else want)
    assert torch.equal(out[2], x[2])


# --- models -----------------------------------------------------------------------------------------------------------


def test_clipping_follows_standardised_weights() -> None:
    torch.manual_seed(0)
    model = WideResNet(10, 1, groups=4)
    x, y = images(5, 3, 8), torch.arange(5)
    report = check_model(model, (x, y), loss=lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    assert "5 examples" in str(report)


def test_heads_take_features_in_sixteen_bits() -> None:
    x = torch.randn(2, 243, 8, 8).half()
    for head in (ScatteringLinear(), ScatteringCNN()):
        out = head(x)
        assert out.shape == (2, 10)
        assert out.dtype == torch.float32
    assert float(ScatteringLinear()(x).detach().abs().max()) < 1  # begins with its bias alone
    flat = torch.randn(2, 8).half()
    head = Head(6)
    torch.nn.init.normal_(head.output.weight)
    other = flat.clone()
    other[:, 6:] = 0
    assert torch.equal(head(flat), head(other))  # reads the first six
    assert Head(6, 4)(flat).shape == (2, 10)


# --- drawn images -----------------------------------------------------------------------------------------------------


def test_random_images_come_from_their_generator_alone() -> None:
    one, two = (dead_leaves(6, 16, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    other = dead_leaves(6, 16, generator=torch.Generator().manual_seed(4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert one.dtype == torch.uint8
    assert one.shape == (6, 3, 16, 16)
    assert float(one.float().std((1, 2, 3)).min()) > 0


def test_patches_are_compared_by_shape_and_not_by_brightness_or_contrast() -> None:
    drawn = dead_leaves(40, 16, generator=torch.Generator().manual_seed(3)).float() / 127.5 - 1
    net = Patches(drawn, 12, 5, torch.Generator().manual_seed(1))
    x = drawn[:4]
    out = net(x)
    assert out.shape == (4, 12, 12, 12)
    torch.testing.assert_close(net(x + 0.3), out, rtol=1e-3, atol=1e-3)
    assert float((net(3 * x) - out).norm() / out.norm()) < 0.6  # the floor aside, as long as before
    torch.testing.assert_close(net(x[..., 2:9, 3:11]), out[..., 2:5, 3:7], rtol=1e-3, atol=1e-4)
    # Whitened: neighbouring patches of drawn images look less alike than neighbouring pixels do.
    assert 0.3 < float(out.std()) < 3
    assert float(torch.corrcoef(out.movedim(1, 0).flatten(1)).fill_diagonal_(0).abs().mean()) < 0.2


@pytest.mark.parametrize(("count", "numbers"), [(60, 12), (20, 30)])
def test_components_are_uncorrelated_and_scaled_by_their_variance(count: int, numbers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(numbers, numbers, generator=generator) * torch.linspace(1, 3, numbers)
    rows = torch.randn(count, numbers, generator=generator) @ mixing
    made = Components(rows.clone(), 8, 0.5)(rows)
    covariance = made.T @ made / count
    torch.testing.assert_close(covariance, covariance.diagonal().diag(), atol=2e-3, rtol=0)
    torch.testing.assert_close(covariance.diagonal(), torch.ones(8), atol=0.05, rtol=0)
    less = Components(rows.clone(), 8, 0.25)(rows).square().mean(0)
    torch.testing.assert_close(less.mean(), torch.tensor(1.0), atol=1e-3, rtol=0)
    assert (less.diff() < 0).all()  # the largest first, and larger


def test_drawn_features_are_of_an_image_alone_and_the_same_of_its_mirror_image() -> None:
    net = DrawnFeatures(FEW, torch.device("cpu"))
    again = DrawnFeatures(FEW, torch.device("cpu"))
    x = images(3, 3)
    made = net(x)
    assert made.shape == (3, FEW.kept)
    torch.testing.assert_close(net(x.flip(3)), made, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(net(x[1:2]), made[1:2], rtol=1e-3, atol=1e-3)
    assert torch.equal(again(x), made)  # by its seed, whatever was drawn before
    assert not list(net.parameters())


def test_roots_are_taken_of_numbers_with_their_sign_before_components() -> None:
    plain, rooted = (DrawnFeatures(kind, torch.device("cpu")) for kind in (FEW, replace(FEW, exponent=0.5)))
    x = images(3, 3)
    before, after = plain._raw(x), rooted._raw(x)
    assert (before < 0).any()
    torch.testing.assert_close(after * after.abs(), before, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rooted(x), rooted.components(after))
    assert not torch.allclose(rooted(x), plain(x))


# --- runs -------------------------------------------------------------------------------------------------------------


def run_of(model: str, task: str = "cifar10", name: str = OURS) -> TrainingRun:
    lam = "auto" if name == OURS else None
    return TrainingRun(task, model, name, 8.0, 16, 1, 0.5, 0.3, lam, examples=80)


def photographs(channels: tuple[int, ...] = (3, 32, 32)) -> Splits:
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> Examples:
        return Examples(torch.rand(count, *channels, generator=generator), torch.arange(count) % 10)

    return Splits(part(100), part(40), 10)


def test_names_say_how_many_views_a_model_sees() -> None:
    assert views_of("wrn/k4") == 4
    assert views_of("cnn") == 1
    assert (views_of("cnn/k4+2"), mixes_of("cnn/k4+2")) == (6, 2)
    assert mixes_of("cnn") == mixes_of("cnn/k4") == 0
    assert capturable(run_of("cnn/k4"))
    assert not capturable(run_of("wrn/k4"))
    assert physical_batch_size(run_of("wrn/k4")) == 256
    assert physical_batch_size(run_of("cnn/k4")) is None
    assert isinstance(make_model(run_of("cnn/k4")), nn.Sequential)


@pytest.mark.parametrize(
    ("model", "task", "shape"),
    [
        ("cnn/k2", "cifar10", (3, 32, 32)),
        ("cnn/k2+1", "cifar10", (3, 32, 32)),
        ("cnn-plain", "cifar10", (3, 32, 32)),
        ("linear", "cifar10-scattering", (243, 8, 8)),
        ("cnn", "cifar10-scattering", (243, 8, 8)),
        ("linear", "cifar10-few", (32,)),
        ("mlp", "cifar10-few", (32,)),
    ],
)
def test_recipes_train(model: str, task: str, shape: tuple[int, ...]) -> None:
    run = run_of(model, task)
    result = train(run, Data(task, photographs(shape), torch.device("cpu")), PlanBook(make=True))
    assert set(result["accuracy"]) >= {"last"}
    assert result["training_examples"] == 64
    assert result["parameters"] > 0


def test_a_wide_network_trains_with_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(problems.PROBLEMS["cifar10"].models, "wrn", lambda: WideResNet(10, 1))
    monkeypatch.setattr(problems, "LARGE", {"wrn": 8})
    data = Data("cifar10", photographs((3, 8, 8)), torch.device("cpu"))
    result = train(run_of("wrn/k2", name=DP_SGD), data, PlanBook(make=True))
    assert result["parameters"] < 200_000


def test_features_are_kept_in_sixteen_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_cifar10", lambda folder: photographs())
    scattered = problems.load_scattering(None)
    assert scattered.train.inputs.shape == (100, 243, 8, 8)
    assert scattered.train.inputs.dtype == torch.float16
    drawn = problems.load_drawn("few", None)
    assert drawn.test.inputs.shape == (40, FEW.kept)
    assert drawn.test.inputs.dtype == torch.float16


# --- the search -------------------------------------------------------------------------------------------------------


class Landscape:
    """The best is at a rate, (B, k) and ζ; ``asked`` keeps runs."""

    def __init__(self, factor: float, point: tuple[int, int], clip: float, cell: dict[str, Any]) -> None:
        self.factor, self.point, self.clip, self.cell = factor, point, clip, cell
        self.asked: list[TrainingRun] = []

    def get(self, run: TrainingRun) -> Result:
        self.asked.append(run)
        centre = self.cell["centres"][self.cell["points"].index([run.batch_size, run.epochs])]
        far = abs(math.log2(run.learning_rate * run.max_grad_norm / 0.3 / centre / self.factor))
        other = ((run.batch_size, run.epochs) != self.point) + (run.max_grad_norm != self.clip)
        facts: dict[str, Any] = {"sigma": 1.0, "rmse": 1.0, "lambda": None, "certificate": {}, "seconds": 2.0}
        facts |= {"training_examples": 50_000, "parameters": 1000, "sharing": 2}
        return facts | {"accuracy": {"last": 0.7 - 0.05 * far - 0.02 * other}}


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("clip", [0.1, 0.3, 0.9])
def test_a_search_finds_rate_batch_size_epochs_and_clip(factor: float, clip: float) -> None:
    cell = next(c for c in record_cells(Settings()) if c["recipe"] == "scattering-cnn" and c["method"] == OURS)
    for size, epochs in cell["points"]:
        known = Landscape(factor, (size, epochs), clip, cell)
        row = stored(record_search(cell), known)
        assert row is not None
        assert (row["batch_size"], row["epochs_chosen"], row["max_grad_norm"]) == (size, epochs, clip)
        assert {run.seed for run in known.asked if run.split == "test"} == {1, 2, 3, 4, 5}
        assert all(run.seed == 0 for run in known.asked if run.split == "validation")
        assert row["views"] == epochs * 50_000
        assert len(row["tried"]) <= 9


def test_every_plan_of_every_recipe_is_in_the_book() -> None:
    cells = record_cells(Settings())
    book = PlanBook(PLANS)
    assert all(request in book for cell in cells for request in plan_requests(cell))
    assert {cell["recipe"] for cell in cells} == set(BY_NAME)
    assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)
    assert SEARCHES["record"] is record_search


def test_the_page_says_what_was_reached_and_what_was_not() -> None:
    common = {
        "scores": [0.6, 0.62], "standard_error": 0.01, "parameters": 155_530, "gpu_seconds": 3.0, "batch_size": 1024,
        "epochs_chosen": 40, "tried": [{}] * 8, "learning_rate": 1.0, "max_grad_norm": 0.3, "weights": "last",
        "lambda": 0.3, "sigma": 1.0, "rmse": 2.0, "validation": 0.6,
    }  # fmt: skip
    rows = [
        common | {"recipe": "scattering-linear", "method": OURS, "epsilon": 1.0, "test": 0.612, "views": 2e6},
        common | {"recipe": "wide-linear", "method": DP_SGD, "epsilon": 2.0, "test": 0.6, "views": 2e6},
        common | {"recipe": "wrn-views", "method": OURS, "epsilon": 8.0, "test": 0.9, "views": 17e6},
    ]
    text = record.page(rows)
    assert "goal 60.9%: without drawn images reached by 0.3 points (61.2 ± 1.0" in text
    assert "with drawn images missed by 7.0 points" in text
    assert "goal 78.7%: without drawn images nothing is tested yet" in text  # too many views
    assert "(ε, δ) does not cover that search" in text
    assert "24 runs" in text
    rows += [
        rows[1] | {"method": OURS, "test": 0.68},
        rows[1] | {"recipe": "wide-mlp", "test": 0.7, "validation": 0.5},
    ]
    [line] = [line for line in record.page(rows).splitlines() if line.startswith("- ε = 2")]
    assert "missed by 7.0 points" in line
    assert "and, equal on validation, reached by 1.0 points" in line
    assert "70.0" not in line  # the best test accuracy decides nothing
