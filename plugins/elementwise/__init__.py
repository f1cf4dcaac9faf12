"""Arithmetic and activations on values of one shape."""

from llmc.plugins.op import Op

UNARY = (
    *("copy", "neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "erf"),
    *("sigmoid", "floor", "ceil", "round", "trunc", "sign", "softplus", "relu", "relu2", "silu", "gelu", "gelu_tanh"),
    *("quick_gelu", "not", "isnan"),
)
ARITHMETIC = ("add", "sub", "mul", "div", "pow", "max", "min", "mod", "fmod")
COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
LOGIC = ("and", "or", "xor")
TERNARY = ("where",)
FUNCTIONS = {
    **dict.fromkeys(UNARY, 1),
    **dict.fromkeys((*ARITHMETIC, *COMPARISONS, *LOGIC), 2),
    **dict.fromkeys(TERNARY, 3),
}
"""name: number of inputs."""

OP = Op("elementwise", inputs=("a", "b?", "c?"), attributes={"function": str}, rtol=2e-6, atol=2e-6)
"""y = function(a), function(a, b) or function(a, b, c); inputs broadcast, and in a plan they have y's shape already.

Dtypes: float32, int32, int64, bool. ``round`` goes to even, ``mod`` has the sign of b and ``fmod`` that of a, integer
``div`` truncates, comparisons give bool, ``where`` takes a bool a and picks b or c, ``copy`` converts to y's dtype.
``gelu`` is the erf form, ``gelu_tanh`` its tanh approximation, ``quick_gelu`` x * sigmoid(1.702 x), and ``relu2``
relu(x)^2.
"""
