"""How each torch op becomes ONNX nodes: one function an op, in tables that compiler/graph.py collects."""
