#!/usr/bin/env python3
"""Records the parts of an engine that a plugin touches: every name that python/vivace/plugins/ENGINE imports or hooks, with its
parameters, read from the engine's sources without importing them.

    tools/record_interfaces.py vllm|sglang [WHEEL]     writes tests/python/interfaces/ENGINE.json; without a wheel from the
                                                       engine that is installed

tests/python/interfaces_test.py holds the plugins against these files, and the files against an engine that is installed.
"""

import ast
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "python" / "vivace" / "plugins"

# What the plugins reach through objects, and so do not import.
REACHED = {
    "vllm": ["vllm.model_executor.layers.fused_moe.oracle.fp8:backend_to_kernel_cls",
             "vllm.model_executor.layers.fused_moe.oracle.fp8:Fp8MoeBackend",
             "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts",
             "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExpertsModular",
             "vllm.v1.attention.backend:AttentionImplBase"],
    "sglang": ["sglang.srt.layers.moe.moe_runner.base:MoeRunnerConfig", "sglang.srt.layers.moe.moe_runner.triton:TritonMoeQuantInfo",
               "sglang.srt.layers.moe.token_dispatcher.standard:StandardDispatchOutput", "sglang.srt.layers.moe.topk:TopKConfig",
               "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool", "sglang.srt.layers.radix_attention:RadixAttention",
               "sglang.srt.model_executor.forward_batch_info:ForwardBatch", "sglang.srt.model_executor.forward_batch_info:ForwardMode"],
}


class Sources:
    """Module sources of a wheel or of an installed package."""

    def __init__(self, engine, wheel=None):
        self.engine, self.archive = engine, zipfile.ZipFile(wheel) if wheel else None
        if self.archive:
            self.version = re.match(rf"{engine}-([^-]+)-", pathlib.Path(wheel).name)[1]
            self.names = set(self.archive.namelist())
        else:
            self.version = importlib.metadata.version(engine)
            self.root = pathlib.Path(importlib.util.find_spec(engine).origin).parents[1]
        self.trees = {}

    def tree(self, module):
        """The module's syntax tree, or None."""
        if module not in self.trees:
            self.trees[module] = None
            for path in (module.replace(".", "/") + ".py", module.replace(".", "/") + "/__init__.py"):
                if (path in self.names) if self.archive else (self.root / path).is_file():
                    text = self.archive.read(path).decode() if self.archive else (self.root / path).read_text()
                    self.trees[module] = ast.parse(text)
                    break
        return self.trees[module]


def parameters(function):
    """Names in order; "*" before those that are keywords only, "=" after those with a default."""
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    names = [arg.arg + ("=" if i >= len(plain) - len(a.defaults) else "") for i, arg in enumerate(plain)]
    if a.vararg:
        names.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        names.append("*")
    names += [arg.arg + ("=" if default is not None else "") for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    return names + (["**" + a.kwarg.arg] if a.kwarg else [])


def flat(statements):
    """Statements of a module, those under if and try included."""
    for node in statements:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from flat(getattr(node, part, []))


def recorded(sources, module, name, seen=()):
    """What `module` calls `name`; followed to where it is defined. None: there is no such thing."""
    tree = sources.tree(module)
    if tree is None or (module, name) in seen:
        return None
    for node in flat(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {"function": parameters(node)}
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = {item.name: parameters(item) for item in node.body if isinstance(item, ast.FunctionDef)
                       and (not item.name.startswith("__") or item.name == "__init__")}
            fields = [target.id for item in node.body if isinstance(item, (ast.Assign, ast.AnnAssign))
                      for target in (item.targets if isinstance(item, ast.Assign) else [item.target]) if isinstance(target, ast.Name)]
            fields += [target.attr for item in ast.walk(node) if isinstance(item, (ast.Assign, ast.AnnAssign))
                       for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
                       if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"]
            return {"class": {"bases": [ast.unparse(base) for base in node.bases], "fields": sorted(set(fields)), "methods": methods}}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return {"value": True}
    for node in flat(tree.body):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            parts = module.split(".")
            source = ".".join([*parts[:len(parts) - node.level], node.module]) if node.level else node.module
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            return recorded(sources, source, original, (*seen, (module, name)))
    if sources.tree(f"{module}.{name}") is not None:
        return {"module": True}
    return {"value": True} if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body) else None


def touched(engine):
    """module:name of everything that the plugin imports or hooks."""
    found = set(REACHED[engine])
    for path in sorted((PLUGINS / engine).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == engine:
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {f"{alias.name.rpartition('.')[0]}:{alias.name.rpartition('.')[2]}" for alias in node.names
                          if alias.name.split(".")[0] == engine}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(rf"{engine}(\.\w+){{3,}}", node.value):
                parts = node.value.split(".")
                place = next((i for i, part in enumerate(parts) if part[0].isupper()), len(parts) - 1)
                found.add(f"{'.'.join(parts[:place])}:{parts[place]}")
    return sorted(found)


def record(engine, wheel=None):
    sources = Sources(engine, wheel)
    interfaces = {}
    for name in touched(engine):
        interfaces[name] = recorded(sources, *name.split(":"))
        if interfaces[name] is None:
            raise SystemExit(f"{engine} {sources.version} has no {name}")
    return {"engine": engine, "version": sources.version, "interfaces": interfaces}


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in REACHED:
        sys.exit(__doc__)
    made = record(*sys.argv[1:])
    path = ROOT / "tests" / "python" / "interfaces" / f"{sys.argv[1]}.json"
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(what)}" for name, what in made["interfaces"].items())  # a line each, for diffs
    path.write_text(f'{{"engine": "{made["engine"]}", "version": "{made["version"]}", "interfaces": {{\n{lines}\n}}}}\n')
    print(f"{path}: {len(made['interfaces'])} names of {made['engine']} {made['version']}")


if __name__ == "__main__":
    main()
