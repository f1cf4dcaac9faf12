"""y = base + x @ a[i].T @ b[i], with the adapter i of each row; rows without one are those of the base.

x [M, K], base [M, N] and y [M, N] float32 (y may be the base itself); a [adapters, rank, K] and b [adapters, rank, N]
float32, the scale in b; ranks [adapters] int32, how many of them an adapter has; adapters [M] int32, -1 is none.
Sums over K in one order for every row, then over the rank in ascending order. See runtime/lora.py.
"""

from llmc.plugins.op import Op

OP = Op("lora", inputs=("x", "base", "a", "b", "ranks", "adapters"), rtol=2e-5, atol=2e-5, plan_only=True)
