"""Why a call failed, in the words of who made it: the names of the Python functions, and the arguments as they were given. Nothing here
runs where nothing fails.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from typing import Any, Callable, Mapping

from . import _arrays
from ._arrays import AN_ARRAY, DLPACK, FRAMEWORKS, MADE_DTYPES, NOTHING_BESIDE, Shape, framework_of, shape_of, shown

REFUSALS = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)

_MADE = ("out", "outs", "q", "expert_ids", "expert_weights", "zero_weight", "ids", "valid", "scale", "workspace")  # where not given
_TUPLES = {"RouterWeight": "what vivace.prepare_router_weight returns", "ExpertWeights": "vivace.ExpertWeights(gate, up, down)",
           "DecodeScheduleParams": "what vivace.attention_decode_schedule_params returns"}
_NUMBERS = {"RouterWeight": {"version": "int", "scaled": "bool"}}  # fields that Python reads itself
_EXPERT_PARTS = ("gate", "up", "down", "gate_scale", "up_scale", "down_scale", "act_scale")
_PLAIN: dict[str, tuple[Callable[[Any], Any], str]] = {"bool": (int, "True or False"), "int": (operator.index, "a whole number"),
                                                       "float": (float, "a number"), "str": (str.__len__, "text")}


def refusal(error: Exception, place: str, function: Callable, args: tuple, kwargs: Mapping[str, Any], dims: Mapping[str, int],
            names: Mapping[str, str], running: bool) -> Exception:
    """What to raise for `error`, which `function(*args, **kwargs)` ended in, or what was done with what it returned.

    dims     how many dimensions those arrays have that the function takes apart itself
    names    what the library calls an argument, as a pattern, and what the function does
    running  the call was not a mere question
    """
    if _arrays.traced():
        return error  # torch traces this too, and cannot trace what follows
    signature = inspect.signature(function)
    parameters = signature.parameters
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return error  # arguments too few or too many, which Python says itself
    text = str(error)
    seen = text.startswith(f"{place}: ")  # by the library, which got what containers hold
    for name, value in given.items():
        annotation = str(parameters[name].annotation)
        fits = (value is None and annotation.endswith("| None")) or (seen and _is_container(annotation))
        wrong = None if fits else _wrong(f"{place}: {name}", annotation, value, running, error)
        if wrong is None and name.endswith("dtype") and value is not None and value not in MADE_DTYPES:
            wrong = ValueError(f"{place}: {name} is {shown(value)}, needs one of {', '.join(MADE_DTYPES)}")
        if wrong is not None:
            return wrong
    if text.startswith(NOTHING_BESIDE):
        missing = [f"{name} is not given, and " for name in _MADE if name in parameters and given.get(name) is None]
        beside = [f"{name} is of another library: " for name, value in given.items() if FRAMEWORKS.get(type(value)) is DLPACK]
        return TypeError(f"{place}: {(missing + beside + [''])[0]}{text.removeprefix('vivace: ')}")
    if not seen:
        for name, count in dims.items():
            shape = tuple(shape_of(given[name]))
            if len(shape) != count:
                return ValueError(f"{place}: {name} has the shape {shape}, needs {count} dimension{'s' if count > 1 else ''}")
        return error
    for theirs, ours in names.items():
        text = re.sub(rf"(?<![\w.]){theirs}\b", ours, text)
    if re.search(r"\.stride\[\d\] is ", text):
        text += "; numpy.ascontiguousarray and torch's contiguous() make a copy that fits"
    text += _no_scaling(text, place, parameters, given)
    text = _unsigned(text, given)
    return error if text == str(error) else type(error)(text)


def _no_scaling(text: str, place: str, parameters: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What to add to a refusal of scales, where nothing says what they are for."""
    name = "out_scale" if "out_scale" in parameters else "x_scale"
    if "scaling" not in parameters or given.get("scaling", "tensor") != "tensor" or not text.startswith(f"{place}: {name}"):
        return ""
    if (scale := given.get(name)) is None:
        return ""
    shape = tuple(shape_of(scale))
    fits = "'token'" if len(shape) == 1 and shape != (1,) else "'block'" if len(shape) == 2 else ""
    return f"; scaling is 'tensor', {fits} has scales of that shape" if fits else ""


def _unsigned(text: str, given: Mapping[str, Any]) -> str:
    """The text, with the number that an array of uint32 has where the library, which takes its bits as int32, says a negative one."""
    found = re.match(r"\w+: (\w+)\[[\d, ]+\] is (-\d+)", text)
    if found is None or getattr(getattr(given.get(found[1]), "dtype", None), "name", "") != "uint32":
        return text
    return text[:found.start(2)] + str(int(found[2]) + 2**32) + text[found.end(2):]


def _is_container(annotation: str) -> bool:
    kind = annotation.removesuffix(" | None")
    return kind.startswith("Sequence[Array") or kind in _TUPLES


def _wrong(what: str, annotation: str, value: Any, running: bool, error: Exception) -> Exception | None:
    """What is wrong with one argument of a call that ended in `error`, as far as its annotation says."""
    kind = annotation.removesuffix(" | None")
    if kind == "Array":
        return _no_array(what, value, running, error)
    if kind.startswith("Sequence[Array"):
        if not isinstance(value, (list, tuple)):
            return TypeError(f"{what} is {shown(value)}, needs a list of arrays")
        items = [(f"{what}[{i}]", item) for i, item in enumerate(value) if item is not None or "None" not in kind]
    elif kind in _TUPLES:
        plain = kind == "ExpertWeights" and type(value) in (list, tuple) and len(value) in (3, 7)
        if not plain and (not isinstance(value, tuple) or type(value).__name__ != kind):
            return no_tuple(what, kind, value)
        names = _EXPERT_PARTS if plain else type(value)._fields
        fields = {} if kind == "DecodeScheduleParams" else dict(zip(names, value))
        terms = fields.get("terms", ())
        if not isinstance(terms, (list, tuple)):
            return TypeError(f"{what}.terms is {shown(terms)}, needs a tuple of arrays")
        items = [(f"{what}.terms[{i}]", term) for i, term in enumerate(terms)]
        items += [(f"{what}.{name}", item) for name, item in fields.items() if kind == "ExpertWeights" and item is not None]
        for name, said in _NUMBERS.get(kind, {}).items():
            if (wrong := _wrong(f"{what}.{name}", said, getattr(value, name), running, error)) is not None:
                return wrong
    elif kind in _PLAIN:
        convert, needs = _PLAIN[kind]
        try:
            convert(value)
        except (OverflowError, RuntimeError, TypeError, ValueError) as unfit:
            return (ValueError if isinstance(unfit, OverflowError) else TypeError)(f"{what} is {shown(value)}, needs {needs}")
        return None
    else:
        return None
    return next((wrong for wrong in (_no_array(*item, running, error) for item in items) if wrong is not None), None)


def no_tuple(what: str, kind: str, value: Any) -> TypeError:
    """Of a value that is no named tuple of this kind, nor a plain one that may stand for it."""
    name = type(value).__name__
    found = "None" if value is None else f"a {name} of {len(value)}" if type(value) in (list, tuple) else f"of type {name}"
    return TypeError(f"{what} is {found}, needs {_TUPLES[kind]}")


def _no_array(what: str, value: Any, running: bool, error: Exception) -> Exception | None:
    try:
        framework = framework_of(value)
        if framework is not DLPACK:
            framework.describe(value)
    except (TypeError, ValueError) as found:
        return type(found)(str(found).replace(AN_ARRAY, what, 1))
    if getattr(error, "array", None) is value:
        return type(error)(str(error).replace(AN_ARRAY, what, 1))
    if running and isinstance(value, Shape):
        return ValueError(f"{what} is a vivace.Shape, which has no memory, needs an array: only explain, cost and workspace_bytes take shapes")
    return None


def worded(place: str, running: bool = False, **dims: int) -> Callable[[Callable], Any]:
    """For a function whose failures are to be put into its caller's words."""
    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except REFUSALS as error:
                raise refusal(error, place, function, args, kwargs, dims, {}, running) from None
        return call
    return wrap
