"""Parameters that no layer rule covers: class tokens, position embeddings, LayerScale, a user's own layer.

While their module's forward runs they are stand-ins (`BatchFree`): tensors without a batch dimension that remember how
they were made. Operations among them stay batch-free. Where one meets a tensor whose first dimension is the batch it is
split into one copy per example, so that the backward pass yields its per-example gradient: by broadcasting for
elementwise operations, by the Linear rule for products, by ``torch.func`` (vmap of the operation's vjp) for anything
else. Per-example gradients are then pulled back through the batch-free operations to the parameter. Nothing is
approximated; what does not fit is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lambdacgd.clipping.backward import Record, Stored
from lambdacgd.clipping.bounds import accumulator, uncast
from lambdacgd.clipping.layers.linear import tapped_linear
from lambdacgd.clipping.rules import Call, Layer, Recorder, autocast_dtype, exchanged, tap
from lambdacgd.errors import ClippingError
from lambdacgd.torch_private import WithoutTorchFunction, tree_flatten, tree_leaves, tree_map, tree_unflatten

_ELEMENTWISE = {
    name
    for base in ("add", "sub", "mul", "div", "true_divide", "divide", "multiply", "subtract")
    for name in (base, f"{base}_", f"__{base}__", f"__r{base}__", f"__i{base}__")
} | {"rsub", "__truediv__", "__rtruediv__", "__itruediv__", "where", "maximum", "minimum", "addcmul", "lerp"}
# Not elementwise, but a mask or bias of attention scores is broadcast over the examples all the same.
_ELEMENTWISE |= {"scaled_dot_product_attention"}
_SPREADING = {"expand", "expand_as", "repeat", "broadcast_to", "tile"}
_CASTING = {"type_as", "to", "new_zeros", "new_ones", "new_full", "new_empty"}


class Root(NamedTuple):
    """A leaf that batch-free values were computed from; ``finish`` turns its per-example gradient into records."""

    layer: Layer
    name: str
    leaf: Tensor
    finish: Recorder
    parameter: bool  #: a parameter itself, not rows looked up in one
    elsewhere: bool = False  #: outside its own module


class BatchFree(torch.Tensor):
    """A tensor without a batch dimension, on its way to being used with one. Holds the autograd graph to its roots."""

    _roots: tuple[Root, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with WithoutTorchFunction():
            return Operation(func, args, kwargs or {}).run()


def stand_in(value: Tensor, roots: tuple[Root, ...]) -> Tensor:
    out: BatchFree = value.as_subclass(BatchFree)
    out._roots = roots
    return out


def plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, BatchFree) else value


def refuse_stand_ins(output: Any, batch: int) -> None:
    """Refuse a model's output that is a stand-in still: it does not have the batch first."""
    if any(isinstance(x, BatchFree) for x in tree_leaves(output)):
        raise ClippingError(f"the model's output does not have the batch ({batch} examples) first. Keep it first.")


def _leaf(layer: Layer, name: str, value: Tensor) -> Tensor:
    """Where the graph of batch-free operations begins. Only `_pull_back` may ask for its gradient: one that comes by
    the backward pass went through something that `BatchFree` did not see, such as a ``torch.autograd.Function``.
    """

    def refuse(leaf: Tensor) -> None:
        leaf.grad = None
        raise layer.refuse(
            f"parameter '{name}' received a gradient that was not clipped: it took part in a torch.autograd.Function, "
            "or was written into another tensor. Use PyTorch's own operations on it, or freeze it."
        )

    leaf = value.detach().requires_grad_()
    leaf.register_post_accumulate_grad_hook(refuse)
    return leaf


def parameter_stand_in(layer: Layer, name: str, parameter: Tensor, *, elsewhere: bool = False) -> Tensor:
    """The stand-in for a parameter while its module's forward runs, or ``elsewhere``."""
    leaf = _leaf(layer, name, parameter)
    dtype = accumulator(parameter.dtype)

    def finish(gradients: Tensor) -> Iterator[Record]:
        yield Stored(name, gradients.to(dtype))

    return stand_in(leaf, (Root(layer, name, leaf, finish, True, elsewhere),))


def standing_in(layers: Iterable[Layer], *, every: bool = False) -> contextlib.AbstractContextManager[None]:
    """While the model runs, parameters that are read outside their own module (`Layer.elsewhere`) are stand-ins; or
    ``every`` one, to see which are read.
    """
    return exchanged(
        (within, local, parameter_stand_in(layer, name, parameter, elsewhere=True))
        for layer in layers
        for within, local, name, parameter in layer.slots
        if every or name in layer.elsewhere
    )


def own_parameters_of(layer: Layer) -> contextlib.AbstractContextManager[None]:
    """While a layer itself runs, its parameters are its own again. What else put something there keeps it: FSDP2 lays
    gathered parameters in the place of its shards.
    """
    return exchanged((s.within, s.local, s.value) for s in layer.slots if isinstance(s.within[s.local], BatchFree))


def lookup(layer: Layer, value: Tensor, index: Tensor, recorder: Recorder) -> Tensor:
    """The stand-in for the output of an embedding whose ``index`` has no batch dimension."""
    name = layer.names["weight"]
    leaf = _leaf(layer, name, value)

    def finish(gradients: Tensor) -> Iterable[Record]:
        return recorder(gradients, index.expand(gradients.shape[0], *index.shape))

    return stand_in(leaf, (Root(layer, name, leaf, finish, False),))


class Operation:
    """One of PyTorch's operations on stand-ins, and perhaps on tensors with the batch."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.name = func, getattr(func, "__name__", str(func))
        self.flat, self.tree = tree_flatten((args, kwargs))
        self.roots = tuple({id(r): r for x in self.flat if isinstance(x, BatchFree) for r in x._roots}.values())
        self.layer = self.roots[0].layer
        self.sizes, self.batch = self.layer.forward_pass.sizes, self.layer.forward_pass.batch

    def on(self, values: list[Any]) -> Any:
        """The operation on other values."""
        args, kwargs = tree_unflatten(values, self.tree)
        return self.func(*args, **kwargs)

    def place(self, what: str) -> str:
        return f"{self.layer}, parameter '{self.roots[0].name}' {what}"

    def refuse(self, why: str) -> ClippingError:
        return self.layer.refuse(
            f"parameter '{self.roots[0].name}': {why}; its per-example gradient cannot be followed there. Move it into "
            "a module of its own whose forward takes and returns tensors with the batch first, or freeze it."
        )

    def run(self) -> Any:
        flat, name = self.flat, self.name
        lends = name in _CASTING and not isinstance(flat[0], BatchFree)  # its type or device
        if lends or not torch.is_grad_enabled():
            return self.on([plain(x) for x in flat])  # nothing comes back to parameters
        others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, BatchFree) and x.dim() > 0]
        if name in _CASTING:  # now the other tensor lends them
            others = []
        elementwise = name in _ELEMENTWISE
        places = (self.place(f"in {name}, tensor {k}") for k in range(len(others)))
        rows = [self.sizes.rows(place, x, second=elementwise) for place, x in zip(places, others, strict=True)]
        kinds = {each for each in rows if each}
        if len(kinds) > 1 and self.sizes.learning:  # one of them only looks like it, until another size comes by
            kinds = {min(kinds)}
        batched = [x for x, each in zip(others, rows, strict=True) if each in kinds]
        self._refuse_what_is_lost(batched)
        self._compare(batched)
        if not batched or name == "expand_as":
            out = self.on([plain(x) for x in flat])
            if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(out)):
                self.note()
            spreads = name in _SPREADING and isinstance(out, Tensor) and isinstance(flat[0], BatchFree)
            spread = self._spread(flat[0], out) if spreads and self.batch > 1 else None
            return _wrap(out, self.roots) if spread is None else spread
        self.note()
        if len(kinds) > 1:
            raise self.refuse(f"in {name} it meets tensors that have different numbers of rows for every example")
        if not elementwise:
            return self._product(batched)
        depth = max(x.dim() for x in batched)
        if any(x.dim() > depth for x in others):
            raise self.refuse(f"in {name} it meets tensors with and without the batch first")
        if kinds == {-1}:  # [time, batch, …]
            return self.on([self._split(x, depth - 1).unsqueeze(0) if isinstance(x, BatchFree) else x for x in flat])
        every = self.batch * max(kinds)
        return self.on([self._split(x, depth, every) if isinstance(x, BatchFree) else x for x in flat])

    def note(self) -> None:
        """Tell a pass of the probe which parameters are read outside their own module."""
        if self.layer.forward_pass.watch is not None:
            self.layer.forward_pass.watch.elsewhere |= {root.name for root in self.roots if root.elsewhere}

    def _compare(self, batched: list[Tensor]) -> None:
        """Show a pass of the probe what parameters meet. Where they are split, it sees each example's own gradient."""
        with_batch = {id(x) for x in batched}
        for x in () if self.name in _CASTING else self.flat:
            free = id(x) not in with_batch
            if isinstance(x, Tensor) and not isinstance(x, BatchFree) and (free or self.name not in _ELEMENTWISE):
                self.layer.compare(x, free=free)

    def _refuse_what_is_lost(self, batched: list[Tensor]) -> None:
        """Only ``x += w`` on a tensor with the batch first leaves the tensor that was written to with w's gradient. And
        what carries a gradient and has no batch first is made of all examples (``h.std()``): its gradient would be
        lost, since a batch-free result passes gradients on to parameters alone.
        """
        name = self.name
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
            if isinstance(self.flat[0], BatchFree):
                raise self.refuse(f"it is changed in place by {name}")
            if not batched or name not in _ELEMENTWISE:
                raise self.refuse(f"it is written into another tensor by {name} (torch.where, torch.cat are followed)")
        for x in () if batched or name in _CASTING else self.flat:
            if isinstance(x, Tensor) and not isinstance(x, BatchFree) and x.requires_grad:
                raise self.refuse(
                    f"in {name} it meets a tensor of shape {tuple(x.shape)}, which depends on the examples but does "
                    f"not have the batch ({self.batch}) first"
                )

    # --- elementwise --------------------------------------------------------------------------------------------------

    def _split(self, x: BatchFree, depth: int, rows: int = 0) -> Tensor:
        """``x`` as [B, 1, …, *shape] with ``depth`` dimensions, per example, or for all ``rows`` of the examples."""
        rows = rows or self.batch
        if x.dim() < depth:
            shape = (rows, *([1] * (depth - 1 - x.dim())), *x.shape)
        elif x.dim() == depth and x.shape[0] == 1:
            shape = (rows, *x.shape[1:])
        else:
            raise self.refuse(f"its shape {tuple(x.shape)} meets a tensor of {depth} dimensions along the batch")
        value, own = _graph_value(x), x._roots
        call = Call(self.layer, lambda gradient: _pull_back(value, own, gradient))
        return _Split.apply(self.layer.backward_pass.anchor, value.detach(), call, shape)

    def _spread(self, x: BatchFree, out: Tensor) -> Tensor | None:
        """``cls_token.expand(B, -1, -1)`` and the like: None if the result has no batch dimension."""
        again = x.dim() == out.dim() and x.shape[0] > 1  # table.repeat(B, 1, 1): every example has all its rows
        if again and out.shape[0] != self.batch * x.shape[0]:
            return None
        each = self.sizes.rows(self.place("expanded"), out)
        if not each or (again and each != x.shape[0]):
            return None
        per_example = self._split(x, out.dim() + 1).flatten(0, 1) if again else self._split(x, out.dim(), out.shape[0])
        rest = [o // s for o, s in zip(out.shape[1:], per_example.shape[1:], strict=True)]
        spread = per_example.repeat(1, *rest) if any(r != 1 for r in rest) else per_example
        return spread.contiguous() if out.is_contiguous() else spread  # who repeats may view the result

    # --- products and anything else -----------------------------------------------------------------------------------

    def _product(self, batched: list[Tensor]) -> Any:
        """``F.linear(x, weight)`` and ``x @ weight`` by the Linear rule, everything else by torch.func."""
        args, kwargs = tree_unflatten(self.flat, self.tree)
        product = self.name in ("matmul", "__matmul__")
        if (product or self.name == "linear") and not kwargs and len(args) in (2, 3):
            x, weight, bias = (*args, None)[:3]
            own = all(_is_parameter(t) if isinstance(t, BatchFree) else not _learns(t) for t in (weight, bias))
            if any(x is b for b in batched) and x.dim() > 1 and weight.dim() == 2 and own:
                names = [t._roots[0].name if isinstance(t, BatchFree) else None for t in (weight, bias)]
                matrix = plain(weight).t() if product else plain(weight)
                return tapped_linear(self.layer, x, matrix, plain(bias), names, transposed=product)
        return self._vmapped({id(b) for b in batched})

    def _vmapped(self, with_batch: set[int]) -> Tensor:
        """Any operation of batched and batch-free tensors: vmap of its vjp over the examples, from saved inputs."""
        flat = self.flat
        ours = [i for i, x in enumerate(flat) if isinstance(x, BatchFree)]
        batched = [i for i, x in enumerate(flat) if id(x) in with_batch]
        rest = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and id(x) not in with_batch]
        fixed = [plain(x).detach() if isinstance(x, BatchFree) else x for x in flat]
        out = self.on(fixed)
        if not isinstance(out, Tensor) or not self.sizes.rows(self.place(f"result of {self.name}"), out):
            raise self.refuse(f"the result of {self.name} has no batch dimension in front")
        values = [_graph_value(flat[i]) for i in ours]
        dtype = autocast_dtype(out)
        low = torch.autocast(out.device.type, dtype, enabled=dtype is not None, cache_enabled=False)  # as it is now

        def recorder(gradient: Tensor, *saved: Tensor) -> Iterator[Record]:
            row = list(fixed)
            for i, x in zip(rest, saved[len(batched) :], strict=True):
                row[i] = x

            def of_example(pieces: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, ...]:
                def again(*own: Tensor) -> Tensor:
                    for i, piece in zip(batched, pieces, strict=True):
                        row[i] = piece.unsqueeze(0)
                    for i, value in zip(ours, own, strict=True):
                        row[i] = value
                    return self.on(row)

                return torch.func.vjp(again, *(row[i] for i in ours))[1](g.unsqueeze(0))

            try:
                with low:
                    every = torch.func.vmap(of_example, randomness="error")(saved[: len(batched)], gradient)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self.refuse(f"{self.name} does not run on one example at a time ({error})") from error
            for i, value, gradients in zip(ours, values, every, strict=True):
                yield from _pull_back(value, flat[i]._roots, gradients)

        # A copy: the operation may have kept its output for its own backward pass, and the tap marks it as changed.
        return tap(self.layer, out.clone(), recorder, *(flat[i] for i in batched), *(fixed[i] for i in rest))


def _wrap(out: Any, roots: tuple[Root, ...]) -> Any:
    if not isinstance(out, Tensor):
        return tree_map(lambda x: _wrap(x, roots) if isinstance(x, Tensor) else x, out)
    return stand_in(out, roots) if out.requires_grad else out


class _Split(torch.autograd.Function):
    """One copy of a batch-free value per example; the backward pass collects [B, *shape]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, call: Call, shape: tuple[int, ...]) -> Tensor:
        ctx.call, ctx.inner = call, value.shape
        return value.reshape(1, *shape[1:]).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with uncast(gradient):
            ctx.call.deliver(gradient.reshape(gradient.shape[0], *ctx.inner))
        return None, None, None, None


def _pull_back(value: Tensor, roots: tuple[Root, ...], gradients: Tensor) -> Iterator[Record]:
    """Per-example gradients of a batch-free value [B, *shape] carried back to each root it was computed from."""
    pulled: tuple[Tensor | None, ...] = (gradients,)
    if len(roots) > 1 or value is not roots[0].leaf:
        leaves, given = [r.leaf for r in roots], gradients.to(value.dtype)
        with torch.enable_grad():
            pulled = torch.autograd.grad(
                value, leaves, given, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
    for root, gradient in zip(roots, pulled, strict=True):
        if gradient is not None:
            yield from root.finish(gradient)


def _graph_value(x: BatchFree) -> Tensor:
    """The plain tensor with its graph; the leaf itself if nothing was done to it."""
    value = x.as_subclass(torch.Tensor)
    for root in x._roots:
        leaf = root.leaf
        if value.data_ptr() == leaf.data_ptr() and value.shape == leaf.shape and value.dtype == leaf.dtype:
            return leaf if value.stride() == leaf.stride() else value
    return value


def _is_parameter(x: BatchFree) -> bool:
    """Whether a stand-in is a parameter itself, nothing done to it yet."""
    return len(x._roots) == 1 and x._roots[0].parameter and _graph_value(x) is x._roots[0].leaf


def _learns(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
