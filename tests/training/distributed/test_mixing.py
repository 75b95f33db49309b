"""A sharded model that mixes examples is refused on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lambdacgd.clipping import ClippingError, attach
from tests.training.distributed import launch


class Centred(nn.Module):
    """Statistics of the batch, detached or of the raw input: no gradient shows them."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.first, self.last, self.mixes = nn.Linear(4, 8), nn.Linear(8, 3), mixes

    def forward(self, x):
        h = self.first(x)
        return self.last((h - h.mean(0).detach() if self.mixes else h).tanh())


def probe(mixes: bool) -> str:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Centred(mixes)
    for layer in (model.first, model.last):
        fully_shard(layer)
    fully_shard(model)
    clipper = attach(model)
    clipper._forward_pass.sharded = True  # as `Clipper.keep_sums_in` says it
    rank = torch.distributed.get_rank()
    try:
        model(torch.randn(6 - rank, 4))
    except ClippingError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("mixes", [True, False])
def test_a_sharded_model_is_compared_by_values(mixes):
    for said in launch.run(2, probe, mixes):
        assert ("mixes the examples" in said) == mixes
