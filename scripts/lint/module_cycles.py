# SPDX-License-Identifier: Apache-2.0
"""A contract of import-linter: no module imports itself through others, at whatever level the imports stand."""

import grimp
from importlinter import Contract, ContractCheck, fields, output


class NoModuleCycles(Contract):
    """No cycles among the modules of a package; ``acyclic_siblings`` would compare whole folders."""

    package = fields.StringField()

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Find the cycles."""
        del verbose
        inside = {name for name in graph.modules if name.startswith(str(self.package))}
        imports = {name: graph.find_modules_directly_imported_by(name) & inside for name in inside}
        cycles = [sorted(group) for group in components(imports) if len(group) > 1]
        return ContractCheck(kept=not cycles, metadata={"cycles": cycles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the modules of each cycle."""
        for cycle in check.metadata["cycles"]:
            output.print_error(f"These {len(cycle)} modules import each other: {', '.join(cycle)}")


def components(imports: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of a graph, by Kosaraju's algorithm.

    Example:
        >>> components({"a": {"b"}, "b": {"a", "c"}, "c": set()})
        [{'c'}, {'a', 'b'}]
    """
    reverse: dict[str, set[str]] = {name: set() for name in imports}
    for name, targets in imports.items():
        for target in targets:
            reverse[target].add(name)
    order = _finished(sorted(imports), reverse)
    found: list[set[str]] = []
    seen: set[str] = set()
    for name in reversed(order):
        if name not in seen:
            group = set(_finished([name], imports, seen))
            found.append(group)
    return found


def _finished(
    starts: list[str], edges: dict[str, set[str]], seen: set[str] | None = None
) -> list[str]:
    """Nodes in the order in which a depth-first search leaves them; ``seen`` are not entered again."""
    seen = set() if seen is None else seen
    order: list[str] = []
    for start in starts:
        stack = [(start, False)]
        while stack:
            node, left = stack.pop()
            if left:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack += [(node, True), *((target, False) for target in sorted(edges[node]))]
    return order
