"""The arrows of the design: who may import whom, read from the source, late imports included.

jobs ─► stages, backends ─► records, errors
backends.native ─► engine ─► models ─► torch
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, environment

Imports = dict[str, set[str]]
STAGES = (
    "pipeline.input",
    "pipeline.images",
    "pipeline.output",
    "pipeline.prompts",
    "pipeline.prefetch",
    "pipeline.remote",
    "pipeline.throughput",
)
TABLES = ("columns", "table", "values")
STORE = ("commit", "footer", "local", "merge", "open_shard", "resume", "retry", "schema")


def imports_of(source: str, package: str) -> set[str]:
    """Return the modules that a source imports, those for type checkers alone left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def modules() -> Imports:
    """Return what each module of the packages imports."""
    found: Imports = {}
    for path in [*REPOSITORY.glob("pipeline/**/*.py"), *REPOSITORY.glob("jobs/**/*.py")]:
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = name if is_package else name.rpartition(".")[0]
        found[name] = imports_of(path.read_text(encoding="utf-8"), package)
    return found


ALL = modules()


def offenders(importers: tuple[str, ...], imported: tuple[str, ...]) -> list[str]:
    """Return the arrows from modules under `importers` to modules under `imported`."""
    return [
        f"{name} imports {target}"
        for name, targets in ALL.items()
        if is_under(name, importers)
        for target in sorted(targets)
        if is_under(target, imported)
    ]


def is_under(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


@pytest.mark.parametrize(
    ("importers", "imported"),
    [
        (("pipeline",), ("jobs", "click", "tqdm")),
        (("pipeline.engine", "pipeline.models"), ("PIL", "pyarrow", "pipeline.backends")),
        (("pipeline.models",), ("pipeline.engine",)),
        (STAGES, ("torch", "pipeline.backends", "pipeline.engine", "pipeline.models")),
        (("pipeline.backends", "pipeline.engine", "pipeline.models"), ("pyarrow",)),
        (("pipeline.records", "pipeline.errors"), STAGES),
        (("pipeline.records", "pipeline.errors", "pipeline.captioner"), ("torch", "PIL")),
        (("pipeline.backends.scripted", "pipeline.backends.families"), ("torch",)),
        (("pipeline.backends.transformers",), ("pipeline.engine.engine", "pipeline.models")),
        (("jobs",), ("torch", "pipeline.engine", "pipeline.models")),
    ],
)
def test_no_arrow_points_the_wrong_way(
    importers: tuple[str, ...], imported: tuple[str, ...]
) -> None:
    assert not offenders(importers, imported)


def test_only_the_store_and_the_reader_of_tables_know_parquet() -> None:
    knowing = {arrow.split()[0] for arrow in offenders(("pipeline",), ("pyarrow",))}
    store = {f"pipeline.output.{name}" for name in STORE}
    assert knowing == store | {f"pipeline.input.{name}" for name in TABLES}


def test_the_reading_of_imports_sees_late_and_relative_ones() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def f():\n    import click\n    from . import errors\n"
    )
    assert imports_of(source, "pipeline") >= {"click", "pipeline.errors"}
    assert "torch" not in imports_of(source, "pipeline")


def test_no_module_is_called_after_nothing() -> None:
    names = {path.stem for path in REPOSITORY.glob("*/**/*.py") if ".venv" not in path.parts}
    assert not names & {"utils", "util", "helpers", "helper", "manager", "misc", "common"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("jobs.cli", ("torch", "pyarrow", "PIL", "numpy", "tqdm")),
        ("pipeline", ("torch", "pyarrow", "PIL")),
        ("pipeline.door", ("torch", "pyarrow")),
        ("jobs.run", ("torch",)),
        ("pipeline.backends.scripted", ("torch", "pyarrow")),
    ],
)
def test_what_is_imported_is_what_is_needed(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([one for one in {heavy} if one in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_modules_stay_readable() -> None:
    """A module of up to about 250 lines, a function of up to about 40 (STYLE)."""
    long = []
    for path in [*REPOSITORY.glob("pipeline/**/*.py"), *REPOSITORY.glob("jobs/**/*.py")]:
        long += long_parts(path)
    assert not long


def long_parts(path: Path, max_lines: int = 400, max_function_lines: int = 60) -> list[str]:
    source = path.read_text(encoding="utf-8")
    found = [f"{path}: {n} lines"] if (n := source.count("\n")) > max_lines else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            length = node.end_lineno - node.lineno
            if length > max_function_lines:
                found.append(f"{path}: {node.name} has {length} lines")
    return found
