"""The zoo: which architectures of transformers, built small and with random weights, can be trained privately.

A cell is one model. It is supported if the clipped sums of a batch are those of one example at a time, in float64: both
are computed here, ours and, where it runs, Opacus's. A model that is not taken is shown with what was said.

``zoo-probe`` takes two steps of each in train mode, in three precisions, and shows how far an example's rows lay apart
where another one was exchanged (`lambdacgd.clipping.probe`): what passes for rounding, and false alarms.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdacgd.clipping import attach, convert, probe
from lambdacgd.clipping.check import clipped_sum, example, gradients_of
from lambdacgd.clipping.probe import tensors_in
from lambdacgd.errors import ClippingError
from reproduce.framework import Cell, Experiment, Row, Settings, table

EXAMPLES, TOKENS, WORDS = 6, 10, 50


def _models() -> dict[str, tuple[str, str, str, dict[str, Any]]]:
    data = json.loads(Path(__file__).with_name("zoo.json").read_text())
    return {
        name: (f"{stem}Config", f"{stem}{head}", kind, data["shared"].get(shared, {}) | options)
        for name, (stem, head, kind, shared, options) in data["models"].items()
    }


#: name -> (configuration, model, kind of input, options of the configuration), small enough for a CPU
MODELS = _models()


def inputs(kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """A batch for a model of that kind."""
    ids = torch.randint(3, WORDS, (EXAMPLES, TOKENS))
    size = options.get("image_size", 16)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    return {
        "words": lambda: {"input_ids": ids},
        "text": lambda: {"input_ids": ids, "attention_mask": mask},
        "sentence": lambda: {"input_ids": torch.cat([ids[:, :-1], torch.full((EXAMPLES, 1), 2)], 1)},
        "pair": lambda: {"input_ids": ids, "decoder_input_ids": torch.randint(3, WORDS, (EXAMPLES, 7))},
        "image": lambda: {"pixel_values": torch.randn(EXAMPLES, 3, size, size).double()},
        "video": lambda: {"pixel_values": torch.randn(EXAMPLES, options["num_frames"], 3, size, size).double()},
        "sound": lambda: {"input_values": torch.randn(EXAMPLES, 120).double()},
        "patches": lambda: {"input_values": torch.randn(EXAMPLES, 16, 8).double()},
        "series": lambda: {"past_values": torch.randn(EXAMPLES, 12, 3).double()},
        "spectrum": lambda: {
            "input_features": torch.randn(EXAMPLES, 8, 20).double(),
            "decoder_input_ids": torch.randint(3, WORDS, (EXAMPLES, 7)),
        },
    }[kind]()


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the zoo with random weights, in float64, and a batch for it."""
    import transformers

    configuration, model, kind, options = MODELS[name]
    torch.manual_seed(1)
    random.seed(1)
    config = getattr(transformers, configuration)(**copy.deepcopy(options))
    made = getattr(transformers, model)(config).double()
    for p in made.parameters():  # some begin as zero or one
        with torch.no_grad():
            p.add_(0.05 * torch.randn_like(p))
    return made, inputs(kind, options)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A bent projection of the model's first output, averaged over each example, then over examples."""
    first = next(x for x in tensors_in(model(**batch)) if x.is_floating_point() and x.requires_grad)
    flat = first.flatten(1)
    direction = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype) + 0.1
    return torch.tanh(flat @ direction / flat.shape[1] ** 0.5).mean() + flat.square().mean(1).mean()


def _median_norm(gradients: Sequence[dict[str, Tensor]]) -> float:
    return float(torch.stack([_length(each) for each in gradients]).median())


def _length(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([x.square().sum() for x in tensors.values()]).sum().sqrt()


def ours(name: str) -> str:
    """ "yes", or what was said."""
    model, batch = build(name)
    convert(model).eval()  # dropout differs between an example alone and together with others
    with torch.no_grad():  # RWKV's weights are rescaled by its first pass in this mode
        model(**batch)
    expected = gradients_of(model, loss, [example(batch, i) for i in range(EXAMPLES)])
    zeta = _median_norm(expected)
    clipper = attach(model, zeta)
    clipper.backward(loss(model, batch))
    return _same(clipper.take(), clipped_sum(expected, zeta))


def opacus(name: str) -> str:
    """ "yes", or what was said."""
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    model, batch = build(name)
    model = ModuleValidator.fix(model) if ModuleValidator.validate(model, strict=False) else model
    _without_dropout(model.double().train())  # it sees layers in train mode only
    expected = gradients_of(model, loss, [example(batch, i) for i in range(EXAMPLES)])
    sampled = GradSampleModule(model)
    loss(sampled, batch).backward()
    zeta = _median_norm(expected)
    grads = {n.removeprefix("_module."): p.grad_sample for n, p in sampled.named_parameters() if p.requires_grad}
    if any(g is None for g in grads.values()):
        used = {n for n in expected[0] if any(e[n].any() for e in expected)}
        if any(grads[n] is None for n in used):
            raise RuntimeError("some parameters got no gradient")
        grads = {n: torch.zeros(EXAMPLES, *expected[0][n].shape) if g is None else g for n, g in grads.items()}
    whole = {n: (torch.stack(g).sum(0) if isinstance(g, list) else g) for n, g in grads.items()}
    for n, g in whole.items():
        if g.shape[0] != EXAMPLES:
            raise RuntimeError(f"gradients of {g.shape[0]} examples for {EXAMPLES} ({n})")
    found = torch.stack([g.flatten(1).square().sum(1) for g in whole.values()]).sum(0).sqrt()
    factor = (zeta / found).clamp_max(1)
    total = {n: torch.einsum("b,b...->...", factor.to(g), g) for n, g in whole.items()}
    return _same(total, clipped_sum(expected, zeta))


def _without_dropout(model: nn.Module) -> None:
    """Every rate of dropout, stochastic depth and layer drop is zero."""
    for module in model.modules():
        held = [module, getattr(module, "config", None)]
        for owner in held:
            for name, value in vars(owner).items() if owner is not None else ():
                if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(owner).__name__)):
                    vars(owner)[name] = 0.0


def _same(sums: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    size = _length(wanted)
    worst = max(float((sums[n] - wanted[n]).norm() / size) for n in wanted)
    return "yes" if worst < 1e-6 else f"wrong by {worst:.1e}"


def _asked(ask: Callable[[], str]) -> str:
    """What ``ask`` answers, or what it raises: the table says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ask()
        except ClippingError as error:
            return f"refused: {error}"
        except Exception as error:  # whatever others raise, or an operation that has no kernel for 16 bits
            return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def check(cell: Cell, settings: Settings) -> Row:
    """One model, by us and by Opacus."""
    return {"ours": _asked(lambda: ours(cell["model"])), "opacus": _asked(lambda: opacus(cell["model"]))}


def page(rows: list[Row]) -> str:
    """The table of support."""
    lines = [[row["model"], _short(row["ours"]), _short(row["opacus"])] for row in rows]
    counts = [sum(r[who] == "yes" for r in rows) for who in ("ours", "opacus")]
    said = f"Supported: {counts[0]} of {len(rows)} by λCGD, {counts[1]} by Opacus."
    return f"{table(['model', 'λCGD', 'Opacus'], lines)}\n\n{said}"


def _short(answer: str) -> str:
    return answer.partition(":")[0] if answer.startswith(("yes", "refused")) else "wrong" if "wrong" in answer else "no"


def cells(settings: Settings) -> Sequence[Cell]:
    """All models; with --quick, every eighth."""
    names = list(MODELS)[::8] if settings.quick else list(MODELS)
    return [{"model": name, "transformers": metadata.version("transformers")} for name in names]


EXPERIMENT = Experiment(
    name="zoo",
    what="which architectures of transformers can be trained privately, by us and by Opacus",
    cells=cells,
    compute=check,
    columns=("model", "ours", "opacus"),
    page=page,
    revision=3,
)


# --- two steps in train mode ------------------------------------------------------------------------------------------

PRECISIONS = ("float32", "bfloat16", "autocast")


class Distances:
    """While it is entered, the largest relative distance of rows that the probe compared."""

    def __init__(self) -> None:
        self.largest, self._compare = 0.0, probe.layouts_of

    def __enter__(self) -> Distances:
        probe.layouts_of = self._look
        return self

    def __exit__(self, *error: object) -> None:
        probe.layouts_of = self._compare

    def _look(self, x: Tensor, y: Tensor, count: int, exchanged: int, tolerance: float, floor: float) -> set[str]:
        apart = probe.differences(x, y) if x.shape[0] == y.shape[0] and x.shape[0] % count == 0 else None
        if apart is not None:
            relative, row = apart[0] / apart[1].clamp_min(floor), torch.arange(x.shape[0])
            layouts = row // (x.shape[0] // count) != exchanged, row % count != exchanged
            self.largest = max(self.largest, min(float(relative[rows].max()) for rows in layouts))
        return self._compare(x, y, count, exchanged, tolerance, floor)


def train(cell: Cell, settings: Settings) -> Row:
    """Two probed steps of one model."""
    device, low = torch.device(settings.torch_device), torch.bfloat16
    kind = low if cell["precision"] == "bfloat16" else torch.float32

    def two_steps() -> str:
        model, batch = build(cell["model"])
        convert(model).to(device, kind).train()
        batch = {k: v.to(device, kind) if v.is_floating_point() else v.to(device) for k, v in batch.items()}
        clipper = attach(model)
        for _ in range(2):
            with torch.autocast(device.type, low, enabled=cell["precision"] == "autocast"):
                value = loss(model, batch)
            value.float().backward()
            clipper.take()
        return "yes"

    with Distances() as distances:
        said = _asked(two_steps)
    return {"distance": distances.largest, "trains": said, "device": device.type}


def trained_page(rows: list[Row]) -> str:
    """Distances by precision, and what was refused."""
    lines = []
    for precision in PRECISIONS:
        fine = [r["distance"] for r in rows if r["precision"] == precision and r["trains"] == "yes"]
        lines.append([precision, len(fine), sum(d > 0 for d in fine), f"{max(fine, default=0.0):.1e}"])
    refused = [f"- {r['model']}, {r['precision']}: {r['trains'][:160]}" for r in rows if r["trains"] != "yes"]
    head = table(["precision", "trained", "rows apart", "largest distance"], lines)
    return "\n".join([head, "", "Refused:", "", *refused])


def training_cells(settings: Settings) -> Sequence[Cell]:
    """All models in all precisions; with --quick, every eighth model."""
    return [c | {"precision": p, "on": settings.torch_device} for c in cells(settings) for p in PRECISIONS]


TRAINED = Experiment(
    name="zoo-probe",
    what="how far an example's rows lie apart where another one is exchanged, over architectures of transformers",
    cells=training_cells,
    compute=train,
    columns=("model", "precision", "trains", "distance"),
    page=trained_page,
    revision=1,
)
