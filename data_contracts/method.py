"""Methods: a frozen model is one method is one file.

A family is a base class (`Scorer`, `Selector`, `Gate`, …) that names its folder and its entry-point group. A method of
ours is the class of that family in `<home>/<name>.py`; a method of others is an entry point in the group
`lazytrain.<family>`. Only the method asked for is imported; listing names and suggesting the nearest
one import nothing.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from data_contracts.cost import Frozen
from data_contracts.errors import ConfigError, MethodError
from data_contracts.uri import SECRET

M = TypeVar("M", bound="Method")


class Method(Frozen):
    """A member of a family; its fields are its hyper-parameters, each typed, bounded and described."""

    family: ClassVar[str]
    """Plural name: the entry-point group is `lazytrain.<family>`."""
    home: ClassVar[str]
    """The package that holds our own methods of the family, one module each."""
    supported: ClassVar[bool] = False
    """Whether it may be chosen without being asked for and is tested on every path; else it is experimental."""

    @classmethod
    def standing(cls) -> str:
        """Return "supported" or "experimental"."""
        return "supported" if cls.supported else "experimental"

    @classmethod
    def name(cls) -> str:
        """Return the method's name: its module's last part."""
        return cls.__module__.rpartition(".")[2]


def _foreign(family: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"lazytrain.{family}")}


def _own(home: str) -> list[str]:
    spec = find_spec(home)
    places = list(spec.submodule_search_locations or []) if spec else []
    return sorted(path.stem for place in places for path in Path(place).glob("[a-z]*.py"))


def names(family: type[Method]) -> list[str]:
    """Return the sorted names of a family's methods, ours and installed ones, importing none of them."""
    return sorted({*_own(family.home), *_foreign(family.family)})


def nearest(name: str, known: list[str]) -> str:
    """Return a hint such as "did you mean 'top_k'?" or the list of known names."""
    if not known:
        return "there is nothing to set"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def find(family: type[M], name: str) -> type[M]:
    """Import and return the class of method `name`; ours wins over an installed one of the same name.

    Raises `MethodError` with the nearest name for an unknown one, and for a module without exactly one such class.
    """
    if name in _own(family.home):
        module = importlib.import_module(f"{family.home}.{name}")
        found = [
            item
            for item in vars(module).values()
            if inspect.isclass(item) and issubclass(item, family) and item.__module__ == module.__name__
        ]
        if len(found) != 1:
            raise MethodError(
                f"{module.__name__} defines one {family.__name__}",
                f"{module.__name__} defines {len(found)}",
                "keep one method a file",
            )
        return found[0]
    point = _foreign(family.family).get(name)
    if point is None:
        known = names(family)
        raise MethodError(
            f"a method of the family {family.family}",
            f"no {family.__name__.lower()} is called {name!r}",
            f"{nearest(name, known)} (one of: {', '.join(known)})",
        )
    loaded = point.load()
    if not (inspect.isclass(loaded) and issubclass(loaded, family)):
        raise MethodError(
            f"the entry point lazytrain.{family.family}:{name} names a subclass of {family.__name__}",
            f"{point.value} is {loaded!r}",
            f"subclass {family.__module__}.{family.__name__} in that package",
        )
    return loaded


def module_of(family: type[Method], name: str) -> str:
    """Return the dotted module that defines method `name`, importing nothing (for a stage's version)."""
    if name in _own(family.home):
        return f"{family.home}.{name}"
    point = _foreign(family.family).get(name)
    if point is None:
        find(family, name)
        raise AssertionError("find() raises for an unknown name")
    return point.module


def name_in(settings: Mapping[str, Any], where: str) -> str:
    """Return the method's name in an opaque config mapping. Raises `ConfigError` where there is none."""
    name = settings.get("method")
    if not isinstance(name, str):
        raise ConfigError(f"`{where}.method` is the name of a method", f"it is {name!r}", "set it; docs/ lists them")
    return name


def resolve(family: type[M], settings: Mapping[str, Any], where: str) -> M:
    """Build the method that an opaque config mapping `{method: name, …}` asks for.

    Args:
        family: the base class.
        settings: the mapping; `method` is required, the rest are the method's own fields.
        where: the config path for error messages ("score").

    Raises `ConfigError` with the nearest field name for an unknown setting or a value out of range.
    """
    name = name_in(settings, where)
    cls = find(family, name)
    try:
        return cls(**{field: value for field, value in settings.items() if field != "method"})
    except ValidationError as error:
        raise ConfigError(
            f"`{where}` holds settings of {name}",
            describe(error, cls, where),
            f"fields: {', '.join(cls.model_fields) or 'none'}",
        ) from error


def describe(error: ValidationError, cls: type[Frozen], where: str) -> str:
    """Turn pydantic's findings into one line each, with the nearest valid name for an unknown one."""
    lines = []
    for item in error.errors():
        path = ".".join([where, *(str(part) for part in item["loc"])]) if where else ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            owner = _owner(cls, [str(part) for part in item["loc"][:-1]])
            known = sorted(owner.model_fields) if owner else []
            lines.append(f"`{path}` is unknown: {nearest(str(item['loc'][-1]), known)}")
        elif item["type"] == "missing":
            lines.append(f"`{path}` is missing")
        elif item["type"] == SECRET:
            lines.append(f"`{path}`: {item['msg']}")
        else:
            lines.append(f"`{path}`: {item['msg']} (found {shortened(repr(item.get('input')))})")
    return "; ".join(lines)


def shortened(text: str, most: int = 200) -> str:
    """Return `text` cut to what an error can show."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _owner(cls: type[Frozen], path: list[str]) -> type[Frozen] | None:
    owner: Any = cls
    for part in path:
        field = owner.model_fields.get(part)
        if field is None:
            continue  # an index or a union member's tag
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next((item for item in options if inspect.isclass(item) and issubclass(item, Frozen)), None)
        if inner is None:
            return None
        owner = inner
    return owner
