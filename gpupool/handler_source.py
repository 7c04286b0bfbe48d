"""Find a handler class without importing it, so that a misspelt name is refused before a worker is started for it.

Importing would run the model's code, and mostly torch, in the supervisor. So this reads: the module is searched for as the import
system would search, its file is parsed, and a class that its text never names is missing. Whatever is unusual is given the benefit of the doubt.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
import tokenize
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

#: A handler is a few hundred lines; what is larger is generated and not worth the time.
_MAX_SOURCE_BYTES: Final = 4 << 20


def handler_problem(handler: str, search_path: Sequence[str]) -> tuple[str, str] | None:
    """Return what was expected and found of a "pkg.module:Class" if a worker could not import it.

    `search_path` stands before sys.path.
    """
    module, _, name = handler.partition(":")
    spec = _find(module, search_path)
    if spec is None:
        return f'a module "{module}" in {", ".join(search_path) or "PYTHONPATH"} or on PYTHONPATH', "no such module"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        names = _names(Path(spec.origin))
    except (SyntaxError, ValueError) as e:
        line = getattr(e, "lineno", None)
        return "a module that parses", f"{spec.origin}, line {line or '?'}: {getattr(e, 'msg', None) or e}"
    except OSError as e:
        return "a module that can be read", f"{spec.origin}: {e.strerror}"
    if names is None or name in names:
        return None
    close = difflib.get_close_matches(name, names, n=1)
    found = f'{spec.origin}, which has no "{name}"' + (f', but a "{close[0]}"' if close else "")
    return f'a class "{name}" in module "{module}"', found


def _find(module: str, search_path: Sequence[str]) -> ModuleSpec | None:
    importlib.invalidate_caches()  # a reload may follow right after the file was written
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top, [*search_path, *sys.path])
    if spec is None:
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # a module without a spec, such as __main__: it is there
            return ModuleSpec(top, None)
    for part in rest:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return None
        # By its last name: with the full one, a package without __init__ would look for its parent among the imported modules.
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        if inner is None and _makes_its_own_path(spec):
            return ModuleSpec(part, None)
        spec = inner
    return spec


def _makes_its_own_path(package: ModuleSpec) -> bool:
    """Whether a package may find its modules in ways that only running it tells."""
    if package.origin is None:
        return False
    try:
        source = Path(package.origin).read_text("utf-8", "replace")
    except OSError:
        return True
    return "__path__" in source or "sys.modules" in source


def _names(file: Path) -> set[str] | None:
    """Every name that a module's text could bind, None when reading cannot tell."""
    if file.stat().st_size > _MAX_SOURCE_BYTES:
        return None
    with tokenize.open(file) as source, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source.read(), str(file))
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name="*") | ast.Call(func=ast.Name(id="globals" | "exec" | "vars")):
                return None
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    return None if "__getattr__" in names else names
