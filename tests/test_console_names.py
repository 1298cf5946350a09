"""No class of the console keeps something under a name that Textual uses for itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator

import pytest
from textual.message_pump import MessagePump

import console


def private_names(kind: type) -> set[str]:
    """Private attributes that the methods of `kind` set on themselves, without those of its bases."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr.startswith("_")
    }


def own_classes() -> Iterator[type]:
    for module in pkgutil.iter_modules(console.__path__):
        if module.name == "__main__":
            continue
        loaded = importlib.import_module(f"console.{module.name}")
        for _, kind in inspect.getmembers(loaded, inspect.isclass):
            if kind.__module__ == loaded.__name__ and issubclass(kind, MessagePump):
                yield kind


@pytest.mark.parametrize("kind", list(own_classes()), ids=lambda kind: kind.__name__)
def test_no_private_name_of_textual_is_taken(kind: type) -> None:
    """A dialog that kept its text as `_running` counted as started, and was never drawn."""
    foreign = [base for base in kind.__mro__ if base.__module__.startswith("textual.")]
    taken = set().union(*(private_names(base) | set(vars(base)) for base in foreign))
    assert not private_names(kind) & taken
