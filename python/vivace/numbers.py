"""bf16 and fp8 for NumPy, which has neither: arrays of their bits, as vivace.Typed."""

from __future__ import annotations

from typing import Any

from ._arrays import Typed, shown


def _floats(place: str, values: Any) -> Any:
    """The values as a float32 array of its own memory; what is beyond becomes infinite."""
    import numpy
    try:
        array = numpy.asarray(values)
        if array.dtype.kind not in "fiub" and array.dtype.name not in ("bfloat16", "float8_e4m3fn"):
            raise TypeError
        with numpy.errstate(over="ignore"):
            return array.astype("float32", order="C")
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{place}: values is {shown(values)}, needs an array of real numbers") from None


def bf16(values: Any) -> Typed:
    """A float32 array rounded to nearest even."""
    import numpy
    values = _floats("vivace.numbers.bf16", values)
    bits = values.view("uint32")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return Typed(numpy.where(numpy.isnan(values), 0x7FC0, rounded).astype("uint16"), "bf16")


def fp8(values: Any, scale: float = 1.0) -> Typed:
    """A float32 array divided by `scale` and rounded to e4m3: nearest even, saturating."""
    import numpy

    from .ops import quantize_fp8
    values = _floats("vivace.numbers.fp8", values)
    if not isinstance(scale, (int, float, numpy.integer, numpy.floating)) or not 0 < scale < numpy.inf:
        raise ValueError(f"vivace.numbers.fp8: scale is {shown(scale)}, needs a finite number above 0")
    flat = numpy.empty((1, values.size), "uint8")
    quantize_fp8(values.reshape(1, -1), scaling="tensor", scale=numpy.array([scale], "float32"), out=Typed(flat, "fp8_e4m3"))
    return Typed(flat.reshape(values.shape), "fp8_e4m3")


def f32(values: Any) -> Any:
    """The float32 array that bits of bf16, f16 or fp8 stand for; float arrays of NumPy's pass."""
    import numpy
    if not isinstance(values, Typed):
        return _floats("vivace.numbers.f32", values)
    if values.dtype == "bf16":
        return (values.array.astype("uint32") << 16).view("float32")
    if values.dtype in ("f16", "f32"):
        return values.array.view({"f16": "float16", "f32": "float32"}[values.dtype]).astype("float32")
    if values.dtype != "fp8_e4m3":
        raise ValueError(f"vivace.numbers.f32: the type is {values.dtype}, needs f32, bf16, f16, fp8_e4m3 or a type of NumPy's")
    bits = values.array.astype("int32")
    exponent, fraction = (bits >> 3) & 15, bits & 7
    magnitude = numpy.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0**(exponent - 7.0))
    magnitude = numpy.where((bits & 127) == 127, numpy.nan, magnitude)
    return numpy.where(bits & 128, -magnitude, magnitude).astype("float32")
