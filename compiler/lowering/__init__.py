"""How each op of the graph becomes steps: modules hold ``RULES``, which compiler/lower.py collects."""
