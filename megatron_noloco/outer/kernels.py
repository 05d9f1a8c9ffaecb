"""The functions of a round in numba, for vectors in host memory: `host_kernels` puts them in the place of torch's.

Each has the name, the arguments and the results of a function of `payload`, `finite_mean` or `vectors`, bit for
bit: products and sums round apart, as the format says (docs/method.md). Only the sums for reports are added up in
another order. A NaN is a NaN of any payload. Blocks are worked on one after the other, so that what is between two
loops stays in the nearest cache.

Importing this file compiles the kernels, or reads them from numba's cache. Kernels take the range of blocks or
elements that they work on, so that threads share a vector. Vectors of several members are addresses: numba
would compile a list of arrays anew for each number of members.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from megatron_noloco.outer import payload
from megatron_noloco.outer.host_kernels import in_parts, stop_if_leaving, without_cache
from megatron_noloco.outer.payload import BLOCK, CELLS, Codec, Coded, Found, Received
from megatron_noloco.plans.payloads import CODES, keeps_rounding

_F, _I = np.float32, np.int32
_ZERO, _ONE = _F(0), _F(1)
_BIG = _F(payload.LARGEST)
_INT_MIN = _I(-(2**31))
_FINEST, _SMALLEST, _UNLUCKY = _F(payload.FINEST), _F(payload.SMALLEST), _F(payload.UNLUCKY)
_NEAR, _SMOOTHED = payload.NEAR, payload.SMOOTHED
_WIDER, _IN_BLOCK, _NEIGHBOURS = _F(1 + 2**-8), _F(BLOCK), _F(2 * _NEAR + 1)
_LARGEST_FINITE = _F(np.finfo(_F).max)
_THREAD_BLOCKS = 128  # for which a thread pays
_ROW = 1024  # elements of vectors without blocks that are worked on together
_HOW = {"nogil": True, "error_model": "numpy"}

Kernel = Callable[..., Any]


def _kernel(signature: str | list[str] = "", **how: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function: now for these types, or for those that a kernel calls it with."""

    def compiled(function: Kernel) -> Kernel:
        stop_if_leaving()
        for_types = (signature,) if signature else ()
        try:
            return njit(*for_types, cache=True, **_HOW, **how)(function)
        except RuntimeError as error:  # numba's, where it finds no folder to write to
            if "cannot cache" not in str(error):
                raise
            without_cache()
            return njit(*for_types, **_HOW, **how)(function)

    return compiled


# Operations that numba has no name for


def _bitcast(llvm: ir.Type, to: types.Type, source: types.Type) -> Any:
    def typed(typing: Any, x: Any) -> Any:
        return to(source), lambda _, builder, __, arguments: builder.bitcast(arguments[0], llvm)

    return intrinsic(typed)


_as_float = _bitcast(ir.FloatType(), types.float32, types.uint32)
_as_word = _bitcast(ir.IntType(32), types.uint32, types.float32)


def _pointer(element: types.Type) -> Any:
    def typed(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(types.CPointer(element)))

        return types.CPointer(element)(types.int64), codegen

    return intrinsic(typed)


_floats_at, _bytes_at, _integers_at = (
    _pointer(element) for element in (types.float32, types.uint8, types.int32)
)


@intrinsic
def _nearest(typing: Any, x: Any) -> Any:
    """Round half to even, to int32."""

    def codegen(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        number, real = ir.IntType(32), ir.FloatType()
        called = builder.module.declare_intrinsic(
            "llvm.lrint", (number, real), ir.FunctionType(number, [real])
        )
        return builder.call(called, arguments)

    return types.int32(types.float32), codegen


# Integers of a block


@_kernel()
def _whole(x, inverse):
    y = x * inverse
    y = _BIG if y > _BIG else y
    y = -_BIG if y < -_BIG else y
    n = _nearest(y)
    return n if y == y else _INT_MIN


@_kernel()
def _inverse(step):
    return _ONE / step if step > 0 and _ONE / step <= _LARGEST_FINITE else _ZERO


@_kernel()
def _row_of(vector, block, padded):
    """Return a block, with zeros after the end of the vector, and how many elements of it the last block has."""
    start = block * BLOCK
    row = vector[start : min(start + BLOCK, len(vector))]
    if len(row) == BLOCK:
        return row, _I(0)
    padded[: len(row)] = row
    padded[len(row) :] = 0
    return padded, _I(len(row))


@_kernel()
def _pack(bits, d, out):
    if bits == 8:
        for i in range(BLOCK):
            out[i] = d[i]
    elif bits == 4:
        for j in range(256):
            out[j] = np.uint8((d[j] & 15) | (d[j + 256] << 4))
    else:
        for j in range(128):
            low = (d[j] & 3) | ((d[j + 128] & 3) << 2)
            out[j] = np.uint8(low | ((d[j + 256] & 3) << 4) | ((d[j + 384] & 3) << 6))
        for j in range(64):
            low = ((d[j] >> 2) & 1) | ((d[j + 64] >> 1) & 2) | (d[j + 128] & 4) | ((d[j + 192] & 4) << 1)
            high = ((d[j + 256] & 4) << 2) | ((d[j + 320] & 4) << 3)
            out[128 + j] = np.uint8(low | high | ((d[j + 384] & 4) << 4) | ((d[j + 448] & 4) << 5))


@_kernel()
def _unpack(bits, code, d):
    if bits == 8:
        for i in range(BLOCK):
            d[i] = code[i]
    elif bits == 4:
        for j in range(256):
            d[j] = code[j] & 15
            d[j + 256] = code[j] >> 4
    else:
        for j in range(64):
            one, two, high = code[j], code[j + 64], code[j + 128]
            d[j] = (one & 3) | ((high & 1) << 2)
            d[j + 64] = (two & 3) | ((high & 2) << 1)
            d[j + 128] = ((one >> 2) & 3) | (high & 4)
            d[j + 192] = ((two >> 2) & 3) | ((high & 8) >> 1)
            d[j + 256] = ((one >> 4) & 3) | ((high & 16) >> 2)
            d[j + 320] = ((two >> 4) & 3) | ((high & 32) >> 3)
            d[j + 384] = (one >> 6) | ((high & 64) >> 4)
            d[j + 448] = (two >> 6) | ((high & 128) >> 5)


@_kernel()
def _numbers(row, inverse, n):
    """Fill n; return the least and the largest."""
    least, most = _I(0), _I(0)
    for i in range(BLOCK):
        one = _whole(row[i], inverse)
        n[i] = one
        least = one if one < least else least
        most = one if one > most else most
    return least, most


@_kernel()
def _digits(row, inverse, weights, shift, d):
    """Fill the digits that begin at a bit of n; return the checksum."""
    total = _I(0)
    if shift == 0:
        for i in range(BLOCK):
            n = _whole(row[i], inverse)
            total = _I(total + weights[i] * n)
            d[i] = np.uint8(n)
    else:
        for i in range(BLOCK):
            n = _whole(row[i], inverse)
            total = _I(total + weights[i] * n)
            d[i] = np.uint8(n >> shift)
    return total


@_kernel()
def _differences(n, digits, bits, weights, m):
    """Fill m; return the checksum of their n, and the least m."""
    half, mask = _I(1 << (bits - 1)), _I((1 << bits) - 1)
    total, least = _I(0), _I(0)
    for i in range(BLOCK):
        one = _I(((digits[i] - n[i] + half) & mask) - half)
        total = _I(total + weights[i] * _I(n[i] + one))
        least = one if one < least else least
        m[i] = one
    return total, least


@_kernel()
def _moves(row, inverse, digits, half, mask, weights, m):
    """Do `_differences` for a pair, with the sum of squares, which holds for a single digit."""
    total, least, squares = _I(0), _I(0), _I(0)
    for i in range(BLOCK):
        n = _whole(row[i], inverse)
        one = _I(((digits[i] - n + half) & mask) - half)
        total = _I(total + weights[i] * _I(n + one))
        least = one if one < least else least
        squares = _I(squares + one * one)
        m[i] = _F(one)
    return total, least, squares


@_kernel()
def _join(bits, first, upper, both):
    for i in range(BLOCK):
        both[i] = (_I(upper[i]) << bits) | first[i]


@_kernel()
def _received(bits, codes, lower, block, n, weights, digits, m):
    """Fill m from what a member has sent, addresses of one digit or two; return as `_differences`."""
    size = 64 * bits
    first, both, upper = digits
    code = carray(_bytes_at(codes + block * size), size)
    if lower == 0:
        _unpack(bits, code, first)
        return _differences(n, first, bits, weights, m)
    _unpack(bits, carray(_bytes_at(lower + block * size), size), first)
    _unpack(bits, code, upper)
    _join(bits, first, upper, both)
    return _differences(n, both, 2 * bits, weights, m)


@_kernel()
def _squares(m):
    total = np.int64(0)
    for i in range(BLOCK):
        total += np.int64(m[i]) * np.int64(m[i])
    return total


@_kernel()
def _move(own, m, scale, out):
    for i in range(len(own)):
        out[i] = _F(m[i]) * scale + own[i]


# Codes


@_kernel("void(int64, int64, f4[::1], f4[::1], f4[:, ::1])")
def _sketch(begin, end, vector, signs, sketches):
    sums, padded = np.empty(32, _F), np.empty(BLOCK, _F)
    s = signs
    for block in range(begin, end):
        x, _ = _row_of(vector, block, padded)
        for i in range(32):
            a0 = x[i] * s[i] + x[i + 256] * s[i + 256]
            a1 = x[i + 32] * s[i + 32] + x[i + 288] * s[i + 288]
            a2 = x[i + 64] * s[i + 64] + x[i + 320] * s[i + 320]
            a3 = x[i + 96] * s[i + 96] + x[i + 352] * s[i + 352]
            a4 = x[i + 128] * s[i + 128] + x[i + 384] * s[i + 384]
            a5 = x[i + 160] * s[i + 160] + x[i + 416] * s[i + 416]
            a6 = x[i + 192] * s[i + 192] + x[i + 448] * s[i + 448]
            a7 = x[i + 224] * s[i + 224] + x[i + 480] * s[i + 480]
            sums[i] = ((a0 + a4) + (a2 + a6)) + ((a1 + a5) + (a3 + a7))
        for i in range(CELLS):
            even = (sums[i] + sums[i + 16]) + (sums[i + 8] + sums[i + 24])
            sketches[block, i] = even + ((sums[i + 4] + sums[i + 20]) + (sums[i + 12] + sums[i + 28]))


@_kernel("void(int64, int64, int64, int64, f4[::1], f4[::1], i4[::1], u1[:, ::1], i4[::1])")
def _encode(begin, end, bits, digit, vector, steps, weights, codes, checksums):
    d, padded = np.empty(BLOCK, np.uint8), np.empty(BLOCK, _F)
    for block in range(begin, end):
        row, rest = _row_of(vector, block, padded)
        total = _digits(row, _inverse(steps[block]), weights, bits * digit, d)
        checksums[block] = _I(total + rest)
        _pack(bits, d, codes[block])


@_kernel(
    "Tuple((b1, f8))(int64, int64, int64, int64, int64, i4[::1], f4[::1], f4[::1], i4[::1], f4[::1], b1[::1])"
)
def _average(begin, end, bits, codes, lower, checksums, vector, steps, weights, out, right):
    first, both, upper = np.empty(BLOCK, np.uint8), np.empty(BLOCK, _I), np.empty(BLOCK, np.uint8)
    m, padded, size = np.empty(BLOCK, _F), np.empty(BLOCK, _F), 64 * bits
    wide = bits if lower == 0 else 2 * bits
    half, mask = _I(1 << (wide - 1)), _I((1 << wide) - 1)
    unequal, moved = False, 0.0
    for block in range(begin, end):
        row, rest = _row_of(vector, block, padded)
        start, step = block * BLOCK, steps[block]
        code = carray(_bytes_at(codes + block * size), size)
        if lower == 0:
            _unpack(bits, code, first)
            total, least, small = _moves(row, _inverse(step), first, half, mask, weights, m)
            squares = np.int64(small)
        else:
            _unpack(bits, carray(_bytes_at(lower + block * size), size), first)
            _unpack(bits, code, upper)
            _join(bits, first, upper, both)
            total, least, _ = _moves(row, _inverse(step), both, half, mask, weights, m)
            squares = _squares(m)
        off = _I(checksums[block] - _I(total + rest))
        unequal |= (off & mask) != 0
        fits = off == 0 and least > -half
        right[block] = fits and step > 0
        elements = min(BLOCK, len(vector) - start)
        scale = step * (_ONE if fits else _ZERO) / _F(2)
        _move(row[:elements], m, scale, out[start : start + elements])
        if right[block]:
            moved += np.float64(step) * np.float64(step) * squares
    return unequal, moved / 2


@_kernel()
def _group_differences(m, total, lows, highs):
    for i in range(BLOCK):
        one = m[i]
        total[i] = _I(total[i] + one)
        lows[i] = one if one < lows[i] else lows[i]
        highs[i] = one if one > highs[i] else highs[i]


@_kernel()
def _extremes(total, lows, highs, members):
    most, least = _INT_MIN, _I(2**31 - 1)
    for i in range(BLOCK):
        up, down = _I(total[i] - members * lows[i]), _I(total[i] - members * highs[i])
        most = up if up > most else most
        least = down if down < least else least
    return most, least


def _types_of_sums(signature: str) -> list[str]:
    return [signature.replace("SUM", kind) for kind in ("i1", "i2", "i4")]


_SUM_OF = (
    "Tuple((b1, f8))(int64, int64, int64, i8[::1], i8[::1], i8[::1], i8, b1, f4[::1], f4[::1], i4[::1], "
    "SUM[:, ::1], b1[::1])"
)


@_kernel(_types_of_sums(_SUM_OF))
def _sum_of(begin, end, bits, codes, lower, checksums, largest, limited, vector, steps, weights, sums, right):
    digits = np.empty(BLOCK, np.uint8), np.empty(BLOCK, _I), np.empty(BLOCK, np.uint8)
    n, m, padded = np.empty(BLOCK, _I), np.empty(BLOCK, _I), np.empty(BLOCK, _F)
    total, lows, highs = np.empty(BLOCK, _I), np.empty(BLOCK, _I), np.empty(BLOCK, _I)
    members = _I(len(codes) + 1)
    wide = bits if lower[0] == 0 else 2 * bits
    half, mask = _I(1 << (wide - 1)), _I((1 << wide) - 1)
    unequal, variance = False, 0.0
    for block in range(begin, end):
        row, rest = _row_of(vector, block, padded)
        step = steps[block]
        smallest, greatest = _numbers(row, _inverse(step), n)
        held, squares = step > 0, np.int64(0)
        total[:] = 0
        lows[:] = 0
        highs[:] = 0
        for other in range(len(codes)):
            check, least = _received(bits, codes[other], lower[other], block, n, weights, digits, m)
            theirs = carray(_integers_at(checksums[other] + 4 * block), 1)[0]
            off = _I(theirs - _I(check + rest))
            unequal |= (off & mask) != 0
            held &= off == 0 and least > -half
            _group_differences(m, total, lows, highs)
            squares += _squares(m)
        most, least = _extremes(total, lows, highs, members)
        held &= most <= largest and least >= -largest
        if limited:
            held &= greatest < _BIG and smallest > -_BIG
        right[block] = held
        if held:
            variance += np.float64(step) * np.float64(step) * (squares - _squares(total) / members)
        out = sums[block]
        for i in range(BLOCK):
            out[i] = total[i] + members * n[i]
    return unequal, variance / (members - 1)


@_kernel()
def _wrapped(x, bits):
    """Return x modulo 2^bits, with a sign."""
    return _I(_I(x << (32 - bits)) >> (32 - bits))


_AVERAGE_SUMS = "void(int64, int64, int64, int64, f4[::1], f4[::1], SUM[:, ::1], f4[::1], f4[::1])"


@_kernel(_types_of_sums(_AVERAGE_SUMS))
def _average_sums(begin, end, width, count, vector, steps, sums, out, rounding):
    n, m, padded = np.empty(BLOCK, _I), np.empty(BLOCK, _I), np.empty(BLOCK, _F)
    members = _I(count)
    for block in range(begin, end):
        row, _ = _row_of(vector, block, padded)
        start, step = block * BLOCK, steps[block]
        elements = min(BLOCK, len(vector) - start)
        _numbers(row, _inverse(step), n)
        total = sums[block]
        for i in range(BLOCK):
            m[i] = _wrapped(_I(_I(total[i]) - members * n[i]), width)
        mean = out[start : start + elements]
        if len(rounding) == 0:
            _move(row[:elements], m, step / _F(count), mean)
        else:
            left, scale = rounding[start : start + elements], np.float64(step) / np.float64(count)
            for i in range(elements):
                left[i] = row[i] - _F(n[i]) * step
            for i in range(elements):
                mean[i] = _F((np.float64(n[i]) * members + np.float64(m[i])) * scale)


@_kernel()
def _energy(x):
    return (x[0] * x[0] + x[2] * x[2]) + (x[1] * x[1] + x[3] * x[3])


@_kernel()
def _smooth(padded, block):
    total = _ZERO
    for shift in range(2 * _NEAR + 1):
        total += padded[block + shift]
    own = padded[block + _NEAR]
    return max(own, min(total / _NEIGHBOURS, _UNLUCKY * own))


@_kernel("void(i8[::1], f4, f4[::1])")
def _find_steps(sketches, holds, steps):
    others, members = _F(len(sketches) - 1), _F(len(sketches))
    difference, size = np.empty(_SMOOTHED + 2 * _NEAR, _F), np.empty(_SMOOTHED + 2 * _NEAR, _F)
    finite, apart = np.empty(_SMOOTHED, _F), np.empty(CELLS, _F)
    for first in range(0, len(steps), _SMOOTHED):
        count = min(_SMOOTHED, len(steps) - first)
        difference[:] = 0
        size[:] = 0
        for block in range(count):
            mine = carray(_floats_at(sketches[0] + 4 * CELLS * (first + block)), CELLS)
            all_of, of_differences = _energy(mine), _ZERO
            for other in range(1, len(sketches)):
                theirs = carray(_floats_at(sketches[other] + 4 * CELLS * (first + block)), CELLS)
                for cell in range(CELLS):
                    apart[cell] = mine[cell] - theirs[cell]
                of_differences += _energy(apart) / others
                all_of += _energy(theirs)
            sound = np.isfinite(all_of) and np.isfinite(of_differences)
            finite[block] = _ONE if sound else _ZERO
            difference[block + _NEAR] = of_differences if sound else _ZERO
            size[block + _NEAR] = all_of if sound else _ZERO
        for block in range(count):
            step = np.sqrt(_smooth(difference, block) / _IN_BLOCK) * holds
            least = np.sqrt(_smooth(size, block) / _IN_BLOCK / members) * _FINEST
            word = _as_word(max(max(step, least), _SMALLEST) * _WIDER)
            even = np.uint32((word >> np.uint32(16)) & np.uint32(1))
            word = np.uint32(np.uint32(word + even + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000))  # bf16
            steps[first + block] = _as_float(word) * finite[block]


# Means and steps of vectors


@_kernel(fastmath={"reassoc"})  # so that LLVM adds in lanes
def _squares_apart(a, b):
    total = _ZERO
    for i in range(len(a)):
        apart = a[i] - b[i]
        total += apart * apart
    return total


@_kernel("f8(int64, int64, f4[::1], f4[::1])")
def _deviation(begin, end, first, second):
    total = 0.0
    for start in range(begin, end, _ROW):
        at = slice(start, min(start + _ROW, end))
        total += _squares_apart(first[at], second[at])
    return total


@_kernel("void(int64, int64, f4[::1], f4[::1], f4[::1])")
def _halve(begin, end, first, second, out):
    mean = np.empty(_ROW, _F)  # a loop that writes what it reads would have no lanes
    for start in range(begin, end, _ROW):
        at = slice(start, min(start + _ROW, end))
        x, y, z = first[at], second[at], out[at]
        for i in range(len(x)):
            mean[i] = (x[i] + y[i]) * _F(0.5)
        for i in range(len(x)):
            z[i] = mean[i]


@_kernel("f8(int64, int64, i8[::1], f4[::1])")
def _mean_of_many(begin, end, members, out):
    total, count = 0.0, _F(len(members))
    for start in range(begin, end, _ROW):
        size = min(_ROW, end - start)
        mean = out[start : start + size]
        for member in range(len(members)):
            row = carray(_floats_at(members[member] + 4 * start), size)
            if member == 0:
                for i in range(size):
                    mean[i] = row[i]
            else:
                for i in range(size):
                    mean[i] += row[i]
        for i in range(size):
            mean[i] /= count
        for member in range(len(members)):
            total += _squares_apart(carray(_floats_at(members[member] + 4 * start), size), mean)
    return total


@_kernel("void(int64, int64, f4[::1], f4[::1], f4[::1], f4, f4, f4[::1])")
def _combine(begin, end, theta, phi, kept, beta, pull, out):
    c = np.empty(_ROW, _F)
    for start in range(begin, end, _ROW):
        at = slice(start, min(start + _ROW, end))
        x, z = theta[at], out[at]
        for i in range(len(x)):
            c[i] = x[i] * beta
        if pull != 0:
            y = phi[at]
            for i in range(len(x)):
                c[i] += y[i] * pull
        if len(kept):
            y = kept[at]
            for i in range(len(x)):
                c[i] += y[i]
        for i in range(len(x)):
            z[i] = c[i]


@_kernel()
def _step_row(mean, phi, delta, alpha, minus_gamma, nesterov):
    if len(delta) == 0:
        for i in range(len(phi)):
            u = phi[i] * minus_gamma + mean[i]
            new = _ZERO * alpha + u
            phi[i] += new * alpha + u if nesterov else new
    elif nesterov:
        for i in range(len(phi)):
            u = phi[i] * minus_gamma + mean[i]
            new = delta[i] * alpha + u
            delta[i] = new
            phi[i] += new * alpha + u
    else:
        for i in range(len(phi)):
            u = phi[i] * minus_gamma + mean[i]
            new = delta[i] * alpha + u
            delta[i] = new
            phi[i] += new


@_kernel("void(int64, int64, f4[::1], f4[::1], f4[::1], f4, f4, b1)")
def _step(begin, end, mean, phi, delta, alpha, gamma, nesterov):
    for start in range(begin, end, _ROW):
        at = slice(start, min(start + _ROW, end))
        _step_row(mean[at], phi[at], delta[at], alpha, -gamma, nesterov)


# The functions that they take the place of

_NONE = np.empty(0, _F)


def _array(tensor: Tensor | None) -> NDArray[Any]:
    return _NONE if tensor is None else tensor.numpy()


def _addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


def sketch(codec: Codec, vector: Tensor, signs: Tensor, out: Tensor) -> None:
    in_parts(_sketch, len(out), _THREAD_BLOCKS, vector.numpy(), signs.numpy(), out.numpy())


def encode(codec: Codec, vector: Tensor, steps: Tensor, digit: int, out: Coded) -> None:
    codes, checksums = out
    arrays = vector.numpy(), steps.numpy(), codec.weights.numpy(), codes.numpy(), checksums.numpy()
    in_parts(_encode, len(steps), _THREAD_BLOCKS, codec.bits, digit, *arrays)


def _codes_of(theirs: Received) -> tuple[int, int, Tensor]:
    """Return the addresses of the last digit and, 0 if there is none, of the digit below; and the checksums."""
    digits, checksums = theirs
    first, *more = _addresses(digits)
    return (int(more[0]), int(first), checksums) if more else (int(first), 0, checksums)


def _found(right: Tensor, parts: list[tuple[bool, float]]) -> Found:
    unequal = torch.tensor(any(unequal for unequal, _ in parts), dtype=torch.bool, device=right.device)
    variance = torch.tensor(sum(part for _, part in parts), dtype=torch.float64, device=right.device)
    return Found(right, unequal, variance)


def average(codec: Codec, vector: Tensor, steps: Tensor, theirs: Received, out: Tensor) -> Found:
    right = torch.empty(len(steps), dtype=torch.bool, device=steps.device)
    upper, lower, checksums = _codes_of(theirs)
    arrays = checksums, vector, steps, codec.weights, out, right
    codes = codec.bits, upper, lower
    return _found(
        right, in_parts(_average, len(steps), _THREAD_BLOCKS, *codes, *(one.numpy() for one in arrays))
    )


def sum_of(codec: Codec, vector: Tensor, steps: Tensor, others: Sequence[Received], out: Tensor) -> Found:
    members, right = 1 + len(others), torch.empty(len(steps), dtype=torch.bool, device=steps.device)
    upper, lower, checksums = zip(*map(_codes_of, others), strict=True)
    numbers = torch.iinfo(out.dtype).max, keeps_rounding(codec.bits, members)
    codes = np.array(upper, np.int64), np.array(lower, np.int64), _addresses(checksums)
    arrays = [one.numpy() for one in (vector, steps, codec.weights, out, right)]
    return _found(right, in_parts(_sum_of, len(steps), _THREAD_BLOCKS, codec.bits, *codes, *numbers, *arrays))


def average_sums(
    codec: Codec, vector: Tensor, steps: Tensor, sums: Tensor, members: int, out: tuple[Tensor, Tensor | None]
) -> None:
    arrays = vector.numpy(), steps.numpy(), sums.numpy(), *map(_array, out)
    in_parts(_average_sums, len(steps), _THREAD_BLOCKS, 8 * sums.itemsize, members, *arrays)


def find_steps(sketches: Sequence[Tensor], bits: int, out: Tensor) -> None:
    holds = CODES[bits].ranges[keeps_rounding(bits, len(sketches))]
    _find_steps(_addresses(sketches), _F(holds / (2 ** (bits - 1) - 1)), out.numpy())


def mean_of_pair(members: Sequence[Tensor], out: Tensor) -> float:
    arrays = [member.numpy() for member in members]
    unit = _THREAD_BLOCKS * BLOCK
    deviation = (
        float(_F(sum(in_parts(_deviation, len(out), unit, *arrays)))) / 2
    )  # overflows where torch.dot does
    if np.isfinite(deviation):
        in_parts(_halve, len(out), unit, *arrays, out.numpy())
    return deviation


def mean_of_group(members: Sequence[Tensor], out: Tensor) -> float:
    parts = in_parts(_mean_of_many, len(out), _THREAD_BLOCKS * BLOCK, _addresses(members), out.numpy())
    return float(_F(sum(parts))) / (len(members) - 1)


def combine(theta: Tensor, phi: Tensor, kept: Tensor | None, beta: float, gamma: float, out: Tensor) -> None:
    arrays = theta.numpy(), phi.numpy(), _array(kept)
    in_parts(_combine, len(out), _THREAD_BLOCKS * BLOCK, *arrays, _F(beta), _F(gamma - beta), out.numpy())


def outer_step(
    phi: Tensor, delta: Tensor | None, mean: Tensor, alpha: float, gamma: float, nesterov: bool
) -> None:
    arrays = mean.numpy(), phi.numpy(), _array(delta)
    in_parts(_step, len(phi), _THREAD_BLOCKS * BLOCK, *arrays, _F(alpha), _F(gamma), nesterov)
