# SPDX-License-Identifier: Apache-2.0
"""Adding one `from MODULE import NAME` to a Python file, and nothing else.

The import goes where isort's order (as ruff applies it) puts it; every other byte
of the file stays. isort and ruff themselves would rewrite all imports of the file.
"""

import ast

# Longest line that a single-line import may grow to (ruff's default, and vLLM's).
LINE_LENGTH = 88


def parse(line: str) -> tuple[str, str]:
    """Module and name of «from MODULE import NAME»."""
    _, module, _, name = line.split()
    return module, name


def module_file(line: str) -> tuple[str, str]:
    """The two files, one of which holds the module of «from MODULE import NAME»."""
    base = parse(line)[0].replace(".", "/")
    return f"{base}.py", f"{base}/__init__.py"


def binds(tree: ast.Module, line: str, path: str) -> bool:
    """Whether the file at `path` has the import `line` at its top level.

    Args:
        tree: The file's syntax tree.
        line: «from MODULE import NAME»; a relative import of the same counts.
        path: Relative to the root of a vLLM tree, with `/`.

    """
    module, name = parse(line)
    return any(
        alias.name == name and alias.asname in (None, name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and _absolute(node, path) == module
        for alias in node.names
    )


def _absolute(node: ast.ImportFrom, path: str) -> str:
    """The module that `node`, in the file at `path`, imports from."""
    above = path.split("/")[: -node.level] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def add_import(source: bytes, line: str, path: str) -> bytes:
    """`source` with the import `line`, once; arguments as for `binds`."""
    tree = ast.parse(source)
    if binds(tree, line, path):
        return source
    module, name = parse(line)
    imports = _leading_imports(tree)
    for node in imports:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == module
            and not node.level
        ):
            return _extend(source, node, name)
    return _insert(source, tree, imports, line)


def _leading_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Top-level imports before the first function or class, in order."""
    result: list[ast.Import | ast.ImportFrom] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        if isinstance(node, ast.Import | ast.ImportFrom):
            result.append(node)
    return result


def _name_key(name: str) -> tuple[int, str, str]:
    """The order within one statement: constants, classes, the rest."""
    constant = name.isupper() and len(name) > 1
    return 0 if constant else 1 if name[:1].isupper() else 2, name.lower(), name


def line_end(source: bytes) -> bytes:
    """What ends the lines of `source`."""
    return b"\r\n" if b"\r\n" in source else b"\n"


def _offset(source: bytes, line: int, column: int) -> int:
    """Byte offset of `line` (1-based) and `column` (0-based, bytes), as in ast."""
    lines = source.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + column


def _extend(source: bytes, node: ast.ImportFrom, name: str) -> bytes:
    """Add `name` to the statement `node`, in its own layout."""
    new = name.encode()
    after = next((a for a in node.names if _name_key(a.name) > _name_key(name)), None)
    anchor = after or node.names[-1]
    start = _offset(source, anchor.lineno, anchor.col_offset)
    line_start = source.rfind(b"\n", 0, start) + 1
    before = source[line_start:start]
    # One name a line: the new name gets a line too.
    gap = line_end(source) + before if not before.strip() else b" "
    if after:
        text, at = new + b"," + gap, start
    else:
        text = b"," + gap + new
        at = _offset(source, anchor.end_lineno or 0, anchor.end_col_offset or 0)
    result = source[:at] + text + source[at:]
    if node.lineno == node.end_lineno:
        return _wrap(source, result, node, name)
    return result


def _wrap(source: bytes, result: bytes, node: ast.ImportFrom, name: str) -> bytes:
    """`result`, or with one name a line if the statement became too long."""
    line = result.splitlines()[node.lineno - 1]
    if len(line.decode()) <= LINE_LENGTH:
        return result
    newline = line_end(source)
    names = [(a.name, f" as {a.asname}" if a.asname else "") for a in node.names]
    names.append((name, ""))
    names.sort(key=lambda pair: _name_key(pair[0]))
    body = b"".join(f"    {n}{alias},".encode() + newline for n, alias in names)
    head = f"from {node.module} import (".encode() + newline
    start = _offset(source, node.lineno, node.col_offset)
    end = _offset(source, node.end_lineno or 0, node.end_col_offset or 0)
    return source[:start] + head + body + b")" + source[end:]


def _insert(
    source: bytes,
    tree: ast.Module,
    imports: list[ast.Import | ast.ImportFrom],
    line: str,
) -> bytes:
    """Add the statement `line` in the section of its top-level package."""
    module = parse(line)[0]
    package = module.split(".")[0]
    newline = line_end(source)
    section = [
        node
        for node in imports
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").split(".")[0] == package
    ]
    smaller = [n for n in section if (n.module or "").lower() < module.lower()]
    text = line.encode() + newline
    if smaller:
        at = _after(source, smaller[-1])
    elif section:
        at = _offset(source, section[0].lineno, 0)
    elif imports:
        at, text = _after(source, imports[-1]), newline + text
    else:
        docstring = ast.get_docstring(tree) is not None
        at = _after(source, tree.body[0]) if docstring else 0
        text = newline + text if docstring else text
    return source[:at] + text + source[at:]


def _after(source: bytes, node: ast.stmt) -> int:
    """Offset just after the last line of `node`."""
    return _offset(source, (node.end_lineno or 0) + 1, 0)
