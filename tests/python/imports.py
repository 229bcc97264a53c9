"""Prints what scripts import beside the standard library and each other.

    python imports.py SCRIPT ...

One line `SCRIPT MODULE` for each top-level module, in the order of the arguments. Modules that lie beside a script are its own.
Imports inside functions count too: they are needed just as much, only later.
"""

import ast
import sys
from pathlib import Path


def modules(script: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"), str(script))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    own = {path.stem for path in script.parent.glob("*.py")}
    return {name.partition(".")[0] for name in names} - own - sys.stdlib_module_names


for argument in sys.argv[1:]:
    for module in sorted(modules(Path(argument))):
        print(argument, module)
