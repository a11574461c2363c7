"""Which private names of other packages some files use."""

import ast
from collections.abc import Iterable
from pathlib import Path


def private_names(files: Iterable[Path]) -> set[str]:
    """Names with one leading underscore that are used in the files, but not defined there.

    Methods that override a private one of another package are such names as well.
    """
    own: set[str] = set()
    used: set[str] = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            overrides = any(getattr(each, "id", "") == "override" for each in node.decorator_list)
            (used if overrides else own).add(node.name)
        elif isinstance(node, ast.Attribute):
            is_own = (
                isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            )
            (own if is_own else used).add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)  # a dataclass's field
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
            used |= set(str(node.module).split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used |= {node.value} if node.value.isidentifier() else set()
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")}
