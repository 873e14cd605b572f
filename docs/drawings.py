"""Draw the pictures of the documentation: `python docs/drawings.py` writes docs/images/*.svg.

They are SVG with two sets of colours, of which a viewer takes one by its light or dark mode.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "images"
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
  .small { font-size: 12px; fill: #57606a; }
  .code { font: 12px ui-monospace, monospace; fill: #57606a; }
  .left { text-anchor: start; }
  .title { font-weight: 600; }
  .box { fill: #f6f8fa; stroke: #8c959f; }
  .own { fill: #ddf4ff; stroke: #0969da; }
  .cell { fill: #54aeff; stroke: #ffffff; }
  .line { stroke: #57606a; stroke-width: 1.5; fill: none; }
  .head { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small, .code { fill: #9198a1; }
    .box { fill: #212830; stroke: #656c76; }
    .own { fill: #0c2d6b; stroke: #4493f8; }
    .cell { fill: #1f6feb; stroke: #0d1117; }
    .line { stroke: #9198a1; }
    .head { fill: #9198a1; }
  }
"""


class Drawing:
    """Shapes of one picture, in pixels from its upper left corner."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.size, self.description, self.shapes = (width, height), description, []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "box"
    ) -> None:
        """Draw a box with lines of text in its middle, the first of them larger."""
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.shapes.append(f'<rect {where} rx="6" class="{kind}"/>')
        top = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * number, line, "small" if number else "")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points, with an arrowhead at the last one."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self.shapes.append(f'<path d="M {path}" class="line" marker-end="url(#arrow)"/>')

    def grid(self, x: float, y: float, rows: int, columns: int, side: float = 14) -> None:
        for row in range(rows):
            for column in range(columns):
                place = f'x="{x + column * side:g}" y="{y + row * side:g}"'
                size = f'width="{side:g}" height="{side:g}"'
                self.shapes.append(f'<rect {place} {size} class="cell"/>')

    def write(self, name: str) -> None:
        width, height = self.size
        head = '<path d="M 0 0 L 8 4 L 0 8 z" class="head"/>'
        marker = 'id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"'
        shapes = "\n  ".join(self.shapes)
        text = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" width="{width}">
  <title>{escape(self.description)}</title>
  <style>{STYLE}  </style>
  <defs><marker {marker}>{head}</marker></defs>
  {shapes}
</svg>
"""
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")


def cat_block() -> None:
    """Draw one attention layer of a CAT model, and the three shapes of its filters."""
    drawing = Drawing(
        1000,
        430,
        "Attention in a CAT block: projections, causal convolutions along time, rotary positions, "
        "attention. Filters have one of three shapes.",
    )
    drawing.box(165, 380, 200, 36, "hidden states x")
    for column, stream in enumerate("qkv"):
        x = 40 + column * 160
        drawing.arrow((265, 380), (265, 362), (x + 65, 362), (x + 65, 344))
        drawing.box(x, 300, 130, 42, f"projection W_{stream}")
        drawing.arrow((x + 65, 300), (x + 65, 274))
        drawing.box(x, 214, 130, 58, "convolution", f"filter F_{stream}, W taps", kind="own")
        if stream == "v":
            drawing.arrow((x + 65, 214), (x + 65, 100), (335, 100))
        else:
            drawing.arrow((x + 65, 214), (x + 65, 188))
            drawing.box(x, 146, 130, 40, "RoPE")
            drawing.arrow((x + 65, 146), (x + 65, 122))
    drawing.box(105, 80, 228, 40, "softmax attention")
    drawing.arrow((219, 80), (219, 54))
    drawing.box(139, 14, 160, 38, "output projection")
    drawing.text(560, 34, "Filters of 5 taps, 3 heads of 4 channels", "title left")
    rows = (
        ("head", "[H, W]: one filter for each head"),
        ("multihead", "[W, H, H]: one for each pair of heads"),
        ("depthwise", "[H, D, W]: one for each channel"),
    )
    for number, (name, shape) in enumerate(rows):
        y = 66 + number * 116
        drawing.text(560, y, name, "left title")
        drawing.text(560, y + 18, shape, "left small")
        if name == "head":
            drawing.grid(560, y + 28, 3, 5)
        elif name == "multihead":
            for tap in range(5):
                drawing.grid(560 + tap * 52, y + 28, 3, 3)
        else:
            for head in range(3):
                drawing.grid(560 + head * 82, y + 28, 4, 5)
    drawing.text(560, 410, "Zeros are read before the start of a text.", "left small")
    drawing.write("cat_block.svg")


def pipeline() -> None:
    """Draw what the programs read and write, with the command on every arrow."""
    drawing = Drawing(
        984, 210, "From raw text to results: the commands, and what each reads and writes."
    )
    boxes = (
        ("raw text", "files, SlimPajama, Hub"),
        ("token shards", "and a manifest"),
        ("checkpoints", "of a run"),
        ("transformers folder", "weights, tokenizer, card"),
        ("results", "JSON, CSV, figures"),
    )
    commands = (
        ("data_prep.prepare",),
        ("train.py", "under DeepSpeed"),
        ("cat_lm.export",),
        ("eval.zero_shot", "eval.length_sweep", "eval.report"),
    )
    width, gap = 152, 55
    for number, lines in enumerate(boxes):
        x = 1 + number * (width + gap)
        drawing.box(x, 40, width, 58, *lines)
        if number < len(commands):
            drawing.arrow((x + width, 69), (x + width + gap - 1, 69))
            middle = x + width + gap / 2
            for row, words in enumerate(commands[number]):
                drawing.text(middle, 126 + 18 * row, words, "code")
    drawing.text(492, 196, "python -m NAME, and python train.py", "small")
    drawing.write("pipeline.svg")


if __name__ == "__main__":
    cat_block()
    pipeline()
