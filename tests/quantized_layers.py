"""Layers for tests of methods: weights, and inputs whose columns are correlated and of different size."""

from dataclasses import dataclass

import numpy as np

from llmc.quantization.base import LayerInputs, Method, Statistics
from llmc.quantization.statistics import InputCollector


@dataclass(frozen=True)
class Layer:
    weight: np.ndarray
    rows: np.ndarray

    def inputs(self, needs: Statistics = Statistics.HESSIAN) -> LayerInputs:
        collector = InputCollector(self.rows.shape[1], needs)
        collector.add(self.rows)
        return collector.finish()

    def error(self, method: Method) -> float:
        """The relative squared error of the outputs, input scales included."""
        inputs = self.inputs()
        scale = method.input_scale(self.weight, inputs) if method.folds else None
        if scale is None:
            scale = np.ones(self.rows.shape[1], np.float32)
        quantized, _ = method.quantize(self.weight * scale, inputs.divided(scale))
        return self.error_of(quantized.dequantize() / scale)

    def error_of(self, weight: np.ndarray) -> float:
        """The same for a weight that stands for that of the layer."""
        difference = np.square(self.rows @ (weight - self.weight).T).sum()
        return float(difference / np.square(self.rows @ self.weight.T).sum())


def layer(rows: int = 48, columns: int = 192, tokens: int = 1024, spread: float = 1.0, seed: int = 0) -> Layer:
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(tokens, columns // 4)) @ rng.normal(size=(columns // 4, columns))
    inputs = (mixed + 0.5 * rng.normal(size=mixed.shape)) * np.exp(spread * rng.normal(size=columns))
    return Layer(rng.normal(size=(rows, columns)).astype(np.float32), inputs.astype(np.float32))
