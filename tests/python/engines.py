"""Stand-ins for vLLM and SGLang, made from their recorded interfaces: enough to import a plugin and to call it as the engine would.

A recorded class has its recorded methods, which fail when called, and whatever a test gives it in `behaviour`.
"""

import importlib
import importlib.util
import json
import sys
import types

import package


def _class(name, recorded, known, behaviour):
    bases = tuple(known[base] for base in (b.partition("[")[0].rpartition(".")[2] for b in recorded["bases"]) if base in known) or (object,)

    def missing(method):
        def call(self, *args, **kwargs):
            raise AssertionError(f"{name}.{method} of a stand-in was called")
        return call

    body = {method: missing(method) for method in recorded["methods"] if method != "__init__"}
    body["__class_getitem__"] = classmethod(lambda cls, item: cls)
    return type(name, bases, {**body, **behaviour})


def installed(engine):
    """Whether the engine itself is there."""
    return engine not in _STANDING_IN and importlib.util.find_spec(engine) is not None


_STANDING_IN = set()


def stand_in(engine, behaviour):
    """Puts the engine's recorded modules into sys.modules, unless the engine is installed. behaviour: {name: dict of attributes of
    a class or module, or the thing itself}."""
    if installed(engine):
        return {}
    _STANDING_IN.add(engine)
    recording = json.loads((package.ROOT / "tests" / "python" / "interfaces" / f"{engine}.json").read_text())["interfaces"]
    made = {}
    pending = dict(recording)
    while pending:  # classes after their recorded bases
        for full, what in list(pending.items()):
            name = full.partition(":")[2]
            bases = [b.partition("[")[0].rpartition(".")[2] for b in what["class"]["bases"]] if "class" in what else []
            if any(other.partition(":")[2] in bases and other != full for other in pending):
                continue
            given = behaviour.get(name, {})
            made[name] = _class(name, what["class"], made, given) if "class" in what and isinstance(given, dict) else given
            del pending[full]
    for full, what in recording.items():
        module, _, name = full.partition(":")
        parts = module.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                sys.modules[path] = types.ModuleType(path)
                sys.modules[path].__path__ = []
                if i > 1:
                    setattr(sys.modules[".".join(parts[:i - 1])], parts[i - 1], sys.modules[path])
        if "module" in what:
            submodule = sys.modules.setdefault(f"{module}.{name}", types.ModuleType(f"{module}.{name}"))
            vars(submodule).update(behaviour.get(name, {}))
            setattr(sys.modules[module], name, submodule)
        else:
            setattr(sys.modules[module], name, made[name])
    importlib.invalidate_caches()
    return made
