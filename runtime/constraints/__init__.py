"""Output that keeps to a grammar: JSON, a JSON schema, a regular expression, a grammar or a list of choices."""

from llmc.runtime.constraints.base import ConstraintSpec, TokenConstraint, compile_constraint

__all__ = ["ConstraintSpec", "TokenConstraint", "compile_constraint"]
