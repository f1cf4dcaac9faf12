"""Arithmetic of PTX on arrays, one element a thread. Registers are unsigned words or predicates."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

Array = np.ndarray
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TYPES = {
    f"{kind}{bits}": np.dtype(f"{letter}{bits // 8}")
    for kind, letter in (("b", "u"), ("u", "u"), ("s", "i"), ("f", "f"))
    for bits in (8, 16, 32, 64)
    if (kind, bits) != ("f", 8)
}


def _divide(x: Array, y: Array) -> Array:
    quotient = np.abs(x.astype(object)) // np.abs(y.astype(object))
    return np.where((x < 0) == (y < 0), quotient, -quotient).astype(x.dtype)


def high_product(x: Array, y: Array) -> Array:
    """The upper half of the product."""
    bits = x.dtype.itemsize * 8
    if bits <= 32:
        wide = np.int64 if x.dtype.kind == "i" else np.uint64
        return (x.astype(wide) * y.astype(wide) >> wide(bits)).astype(x.dtype)
    return np.array([(int(a) * int(b)) >> 64 for a, b in zip(x, y, strict=True)], x.dtype)


def shift(op: str, x: Array, count: Array) -> Array:
    """shl and shr, where counts may exceed the width."""
    bits = x.dtype.itemsize * 8
    big, few = count >= bits, np.where(count >= bits, 0, count).astype(x.dtype)
    if op == "shl":
        return np.where(big, x.dtype.type(0), x << few)
    return np.where(big, x >> x.dtype.type(bits - 1) if x.dtype.kind == "i" else x.dtype.type(0), x >> few)


INTEGERS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "div": _divide,
    "rem": lambda x, y: (x - _divide(x, y) * y).astype(x.dtype),
}
FLOATS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,
    "max": np.fmax,
    "copysign": lambda sign, x: np.copysign(x, sign),
}
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(x.dtype),
    "rcp": lambda x: (1 / x).astype(x.dtype),
    "ex2": np.exp2,
    "lg2": np.log2,
    "abs": np.abs,
    "neg": np.negative,
}
COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def compare(relation: str, x: Array, y: Array) -> Array:
    """setp: of floats, relations that end in u hold where one is no number, others do not."""
    if x.dtype.kind != "f":
        return COMPARISONS[relation](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if relation in ("num", "nan"):
        return unordered == (relation == "nan")
    result = COMPARISONS[relation[:2]](x, y)
    return result | unordered if relation.endswith("u") and len(relation) == 3 else result & ~unordered


def bf16_bits(x: Array) -> Array:
    """float32 rounded to bf16, as words."""
    bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits).astype(np.uint32)


def f16_bits(x: Array) -> Array:
    """float32 rounded to f16, as words."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16)).astype(np.uint32)


def halves(kind: str, words: Array) -> tuple[Array, Array]:
    """The two numbers in each word, as float32."""
    both = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2)
    dtype = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    low, high = (np.ascontiguousarray(both[:, i]).view(dtype).astype(np.float32) for i in (0, 1))
    return low, high


def pack(kind: str, low: Array, high: Array) -> Array:
    """Two numbers in a word."""
    bits = bf16_bits if kind.startswith("bf16") else f16_bits
    return bits(low) | bits(high) << np.uint32(16)


def convert(fields: list[str], x: Array, target: str, source: str) -> Array:
    """cvt with one source."""
    mode = fields[1]
    if source == "f16" or source == "bf16":
        dtype = np.float16 if source == "f16" else ml_dtypes.bfloat16
        return x.view(dtype).astype(np.float32)
    if target in ("bf16", "f16"):
        return (bf16_bits if target == "bf16" else f16_bits)(x).astype(np.uint16)
    if mode == "sat":
        return np.clip(np.where(np.isnan(x), 0, x), 0, 1).astype(np.float32)
    if source == "f32":
        rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)
        if target == "f32":
            return rounded
        limits = np.iinfo(TYPES[target])
        whole = np.where(np.isnan(x), 0, rounded).astype(np.float64)
        low, high = whole <= float(limits.min), whole >= float(limits.max)
        result = np.where(low | high, 0, whole).astype(TYPES[target])
        return np.where(high, limits.max, np.where(low, limits.min, result)).astype(TYPES[target])
    return x.astype(TYPES[target])


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any function of three bits."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Bytes of two words, chosen by nibbles."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        which = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (which & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= np.where(which & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


def field(x: Array, position: Array, length: Array) -> Array:
    """bfe: some bits of a word, sign-extended where it is signed."""
    position, length = position & np.uint32(0xFF), length & np.uint32(0xFF)
    result = np.zeros(x.shape, np.int64)
    for i, (value, at, size) in enumerate(zip(x.tolist(), position.tolist(), length.tolist(), strict=True)):
        bits = (value >> at) & ((1 << size) - 1)
        negative = x.dtype.kind == "i" and size and (value >> min(at + size - 1, 31)) & 1
        result[i] = bits - (1 << size) if negative else bits
    return result.astype(x.dtype)


def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: bits of a into b, for positions and lengths within the word."""
    word = a.dtype.type
    position, bits = position.astype(word), a.dtype.itemsize * 8
    ones = np.where(length >= bits, ~word(0), (word(1) << np.minimum(length, bits - 1).astype(word)) - word(1))
    mask = ones.astype(word) << position
    return (b & ~mask) | (a << position & mask)


def rounded(x: Array, mode: str) -> Array:
    """float64 as float32: to the nearest (rn), or down (rm)."""
    y = x.astype(np.float32)
    return y if mode == "rn" else np.where(y > x, np.nextafter(y, np.float32(-np.inf)), y)


def funnel(direction: str, mode: str, low: Array, high: Array, count: Array) -> Array:
    """shf: two words as one, shifted."""
    count = count & np.uint32(31) if mode == "wrap" else np.minimum(count, np.uint32(32))
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    wide = count.astype(np.uint64)
    shifted = both << wide >> np.uint64(32) if direction == "l" else both >> wide
    if direction == "l":  # the upper word; a shift by 32 leaves the lower one
        shifted = np.where(wide == 32, low.astype(np.uint64), shifted)
    return (shifted & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def count_bits(op: str, x: Array) -> Array:
    """popc, clz and brev."""
    bits = x.dtype.itemsize * 8
    texts = [f"{value:0{bits}b}" for value in x.tolist()]
    results = {"popc": lambda t: t.count("1"), "clz": lambda t: len(t.split("1")[0]), "brev": lambda t: int(t[::-1], 2)}
    return np.array([results[op](text) for text in texts], np.uint32)


def atomic(op: str, old: int, values: list[int]) -> int:
    """What an atomic writes; integers of the instruction's type."""
    if op == "cas":
        return values[1] if old == values[0] else old
    return {
        "add": old + values[0],
        "min": min(old, values[0]),
        "max": max(old, values[0]),
        "or": old | values[0],
        "and": old & values[0],
        "exch": values[0],
    }[op]
