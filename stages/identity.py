"""What a stage's work is: one digest for all that decides what comes out, and nothing else.

A stage's version is made of the sources it reaches by static imports (docstrings, comments and layout left out), those
of its configured methods, and the versions of the libraries among them that affect results. Nothing is imported to find
this out beyond the stage's own light module, so a cache hit needs no torch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_contracts.canonical import digest_of
from data_contracts.cost import Frozen
from data_contracts.method import module_of
from data_contracts.records import Ref
from stages.meter.machine import device_kind
from stages.stage import Stage

ROOT = Path(__file__).resolve().parent.parent
FIRST_PARTY = ("stages", "data_contracts")
LIBRARIES = {"torch", "torchao", "bitsandbytes", "transformers", "tokenizers", "peft", "safetensors", "gguf"} | {
    "numpy",
    "scipy",
    "pyarrow",
    "datasets",
    "rensa",
    "faiss",
}
"""Libraries whose version can change a result."""


class Version(Frozen):
    """A stage's version: its digest, and the library versions that went into it."""

    digest: str
    libraries: dict[str, str]


def stage_version(stage: Stage[Any], config: Any) -> Version:
    """Return the version of `stage` with the methods that `config` names. Raises `MethodError` for an unknown one."""
    modules = {type(stage).__module__}
    foreign: dict[str, str] = {}
    for family, name in stage.methods(config):
        modules |= {family.__module__}
        module = module_of(family, name)
        if module.partition(".")[0] in FIRST_PARTY:
            modules.add(module)
        else:
            foreign[module] = _foreign(module)
    sources, imported = closure(modules)
    libraries = {name: _library(name) for name in sorted(imported & LIBRARIES)}
    return Version(
        digest=digest_of({"sources": sources, "foreign": foreign, "libraries": libraries}), libraries=libraries
    )


def closure(modules: Iterable[str]) -> tuple[dict[str, str], frozenset[str]]:
    """Return (module → hash of its source) of all first-party modules reached, and the top-level names of the rest."""
    waiting, sources, imported = list(modules), dict[str, str](), set[str]()
    while waiting:
        module = waiting.pop()
        if module in sources:
            continue
        file = _file(module)
        if file is None:
            imported.add(module.partition(".")[0])
            continue
        stat = file.stat()
        sources[module], names = _read(file, module, stat.st_mtime_ns, stat.st_size)
        waiting.extend(name for name in names if name.partition(".")[0] in FIRST_PARTY)
        imported.update(name.partition(".")[0] for name in names if name.partition(".")[0] not in FIRST_PARTY)
    return sources, frozenset(imported)


def _file(module: str) -> Path | None:
    """Return the source file of a module of ours, or of one already imported (a stage's own); imports nothing."""
    base = ROOT.joinpath(*module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if module.partition(".")[0] in FIRST_PARTY and file.is_file():
            return file
    loaded = getattr(sys.modules.get(module), "__file__", None)
    return Path(loaded) if loaded is not None and module.partition(".")[0] not in FIRST_PARTY else None


@functools.lru_cache(maxsize=4096)
def _read(file: Path, module: str, mtime_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """Return the hash of a file's meaning and the modules it imports; remembered while the file is unchanged."""
    tree = ast.parse(file.read_bytes(), filename=str(file))
    names = tuple(dict.fromkeys(_imports(tree, module, file.name == "__init__.py")))
    meaning = ast.dump(_Meaning().visit(tree), include_attributes=False)
    return hashlib.sha256(meaning.encode("utf-8", "surrogatepass")).hexdigest(), names


class _Meaning(ast.NodeTransformer):
    """Drops what cannot change a result: docstrings and other bare texts."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def _imports(tree: ast.Module, module: str, package: bool) -> Iterator[str]:
    """Yield every module that is imported anywhere in the file, in functions too, for types only left out."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            for item in node.names:
                yield from _with_parents(item.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, package)
            yield from _with_parents(base)
            yield from (f"{base}.{item.name}" for item in node.names if _file(f"{base}.{item.name}") is not None)
        waiting.extend(ast.iter_child_nodes(node))


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + (1 if package else 0)]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _with_parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if count == len(parts) or _file(name) is not None:
            yield name


@functools.cache
def _distributions() -> Mapping[str, Sequence[str]]:
    return packages_distributions()


def _library(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _foreign(module: str) -> str:
    """Return distribution, version and source hash of a method that another package brings."""
    top = module.partition(".")[0]
    owners = sorted(set(_distributions().get(top, ())))
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return f"{owners}"
    stat = Path(spec.origin).stat()
    source, _ = _read(Path(spec.origin), module, stat.st_mtime_ns, stat.st_size)
    return f"{[f'{name}=={_library(name)}' for name in owners]} {source}"


def device() -> str:
    """Return "cuda" where a device is present and torch was built for it, else "cpu"; imports no torch."""
    return "cuda" if device_kind() == "cuda" and not _library("torch").endswith("+cpu") else "cpu"


def identity_of(
    verb: str,
    version: str,
    external: Mapping[str, Any],
    inputs: Mapping[str, Sequence[Ref]],
    descent: Sequence[str] = (),
) -> str:
    """Return the identity (64 hex digits) of a stage's work.

    Args:
        verb: the stage.
        version: digest of its `Version`.
        external: the config slice with content digests in place of paths.
        inputs: references by name; their digests count, in the order given, not the runs that made them.
        descent: of a stage that reads the ledger, what was made by all that the inputs descend from: the same bytes
            can have cost more or less.

    Raises `CanonicalError` where `external` holds a value without a canonical form.
    """
    given = {name: [ref.digest for ref in refs] for name, refs in inputs.items() if refs}
    return digest_of(
        {
            "stage": verb,
            "version": version,
            "config": external,
            "inputs": given,
            "device": device(),
            "descent": list(descent),
        }
    )


def kin_of(verb: str, version: str, value: Any) -> str:
    """Return what commits share whose rows came about the same way; "" where `value` (`Stage.kin`) is None."""
    if value is None:
        return ""
    return digest_of({"stage": verb, "version": version, "kin": value, "device": device()})
