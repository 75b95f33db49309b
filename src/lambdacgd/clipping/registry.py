"""Which rule sees into which layer. One small file a family under `layers`; `register` adds yours.

A rule is called in place of the module's forward as ``rule(site, *args, **kwargs)``, runs ``site.hidden(...)`` and
returns the output through `capture.tap`. It applies to a class and to those subclasses that keep the class's
``forward`` and what it calls (``_conv_forward``, say).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Rule = Callable[..., Any]
_RULES: dict[type[nn.Module], Rule] = {}
_NAMED: dict[str, Rule] = {}
_BESIDES = ("reset_parameters", "extra_repr")  #: methods of a layer that its forward does not call


def register(*kinds: type[nn.Module] | str) -> Callable[[Rule], Rule]:
    """Use the decorated rule for these classes; a string names a class ("package.module.Class") without importing
    it.
    """

    def keep(rule: Rule) -> Rule:
        for kind in kinds:
            if isinstance(kind, str):
                _NAMED[kind] = rule
            else:
                _RULES[kind] = rule
        return rule

    return keep


def rule_for(module: nn.Module) -> Rule | None:
    """The rule for a module, or None: then its parameters are followed one by one (`batchfree`)."""
    kind = type(module)
    if nn.utils.parametrize.is_parametrized(module) or any(
        name not in module._parameters and isinstance(getattr(module, name, None), Tensor)
        for name in ("weight", "bias")
    ):
        return None  # what is computed from parameters is no parameter
    for base in kind.__mro__:
        rule = _RULES.get(base) or _NAMED.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule if _computes_as(base, module) else None
    return None


def _computes_as(base: type[nn.Module], module: nn.Module) -> bool:
    """Whether no subclass, nor the module itself, has a ``forward`` of its own, or a method that ``forward`` calls."""
    line = type(module).__mro__
    changed = set(vars(module)).union(*(vars(c) for c in line[: line.index(base)]))
    family = set().union(*(vars(c) for c in base.__mro__ if c not in (nn.Module, object)))
    return not any(n for n in changed & family if not n.startswith("__") and n not in _BESIDES)


def finds_batch(rule: Rule) -> Rule:
    """Mark a rule that looks for the batch dimension itself (its first argument need not have it)."""
    rule.finds_batch = True  # type: ignore[attr-defined]
    return rule
