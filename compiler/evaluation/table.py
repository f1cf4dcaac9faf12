"""The figures as rows of text: name, engine, source, difference. For terminals and for report.html."""

from __future__ import annotations

from llmc.compiler.evaluation.figures import Figures, percent

Row = tuple[str, str, str, str]


def figure_rows(figures: Figures) -> list[Row]:
    """One row for each figure; without a source the last two are empty."""
    rows: list[Row] = []
    c, g = figures.comparison, figures.generation
    source = "" if c is None else f"{c.perplexity:.6g}"
    change = "" if c is None else f"{percent(c.ratio - 1)} ± {c.ratio_error * 100:.2f}"
    rows.append(("perplexity", f"{figures.perplexity:.6g}", source, change))
    if c is not None:
        rows += [
            ("same best token", "", "", f"{c.top1:.2%}"),
            ("KL, mean (nats)", "", "", f"{c.kl:.4g}"),
            ("KL, median", "", "", f"{c.kl_median:.4g}"),
            ("KL, 99th percentile", "", "", f"{c.kl_p99:.4g}"),
            ("KL, largest", "", "", f"{c.kl_max:.4g}"),
        ]
    if g is not None:
        held = g.reference_repetition
        rows.append(
            (
                "repeated in free texts, mean",
                f"{g.repetition:.1%}",
                "" if held is None else f"{held:.1%}",
                "" if held is None else f"{(g.repetition - held) * 100:+.1f} points",
            )
        )
        rows.append(("repeated in free texts, most", f"{g.repetition_max:.1%}", "", ""))
        lengths = [continuation.tokens for continuation in g.continuations]
        held_lengths = [continuation.reference_tokens or 0 for continuation in g.continuations]
        count = len(lengths)
        rows.append(
            (
                "tokens of free texts, mean",
                f"{sum(lengths) / count:.0f}",
                "" if held is None else f"{sum(held_lengths) / count:.0f}",
                "",
            )
        )
        if g.divergence is not None and g.prefix is not None:
            rows += [
                ("tokens until free texts part, mean", "", "", f"{g.divergence:.1f}"),
                ("equal from the start, mean", "", "", f"{g.prefix:.1%}"),
            ]
    return rows
