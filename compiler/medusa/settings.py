"""What the training of heads is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmc.compiler.medusa.heads import MOST_HEADS, MOST_LAYERS
from llmc.errors import UsageError

STATE = "state.npz"
"""What the work folder calls the state of the training."""


@dataclass(frozen=True)
class HeadTraining:
    """Options of `llmc medusa train`.

    Attributes:
        heads: how many; head i predicts the token i + 1 places after the model's own prediction.
        layers: residual blocks of a head.
        token: heads see the model's own token too, of which what follows depends; other tools don't read such heads.
        prompts: a file, as of `llmc eval --prompts`; None: ours, and with a chat template
            as many that the model writes itself.
        texts: how many the model writes.
        length: tokens of a text, with its prompt, at most.
        temperature: that the texts are drawn with; 0: greedy.
        quantization: of the model that writes, such as ``int8``; the heads fit what that model really computes.
        epochs: how often each row is looked at, unless ``minutes`` end it before.
        batch: rows of a step.
        learning_rate: at its highest, after the warm-up; it falls as a cosine.
        decay: the loss of head i counts ``decay`` to the power of i (section 2.3.1 of the paper).
        candidates: tokens that the loss looks at: those of the texts, and others up to this number; 0: all.
        held_out: the share of texts that accuracy is measured on, and nothing is learnt from.
        seed: of everything that is drawn.
        minutes: in all; at most 60 % of them for the texts. None: no limit. What comes out then depends on the speed
            of the machine; otherwise it is the same again on the same machine.
    """

    heads: int = 3
    layers: int = 1
    token: bool = True
    prompts: Path | None = None
    texts: int = 512
    length: int = 384
    temperature: float = 0.3
    quantization: str = "none"
    epochs: int = 6
    batch: int = 512
    learning_rate: float = 2e-3
    decay: float = 0.8
    candidates: int = 8192
    held_out: float = 0.05
    seed: int = 0
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("heads", self.heads, 1, MOST_HEADS),
            ("layers", self.layers, 1, MOST_LAYERS),
            ("texts", self.texts, 2, 1 << 24),
            ("length", self.length, 8, 1 << 20),
            ("temperature", self.temperature, 0, 10),
            ("epochs", self.epochs, 1, 10_000),
            ("batch", self.batch, 1, 1 << 20),
            ("learning_rate", self.learning_rate, 1e-9, 10),
            ("decay", self.decay, 1e-3, 1),
            ("candidates", self.candidates, 0, 1 << 24),
            ("held_out", self.held_out, 1e-3, 0.5),
            ("seed", self.seed, 0, (1 << 40) - 1),
            ("minutes", 1 if self.minutes is None else self.minutes, 1e-3, 1e6),
        ):
            if not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected a number from {low} to {high}")

    @property
    def of_texts(self) -> dict[str, Any]:
        """What the texts depend on, besides the model and the content of the prompts; time may make them fewer."""
        names = ("texts", "length", "temperature", "quantization", "seed")
        return {name: value for name, value in asdict(self).items() if name in names}

    @property
    def of_training(self) -> dict[str, Any]:
        """All that the heads depend on, with the same exceptions."""
        return {name: value for name, value in asdict(self).items() if name != "prompts"}
