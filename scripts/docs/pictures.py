# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the documentation: ``make pictures``.

Each is an SVG file whose colors follow the reader's light or dark mode. Pipeline schedules are simulated: a stage
starts the next task of its order as soon as the task that it depends on has ended.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from xml.sax.saxutils import escape

from scripts.docs.generated import ROOT

FOLDER = ROOT / "docs" / "pictures"
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 } .small { font-size: 11px } .middle { text-anchor: middle }
rect { stroke: #fff; rx: 3px } .ground { fill: #fff; stroke: none }
line, path { stroke: #555; stroke-width: 1.5; fill: none } marker path { fill: #555 }
.plain { fill: #e8e8ee } .a { fill: #9ec5f4 } .b { fill: #f5c28b } .c { fill: #a8d8a5 } .d { fill: #e3a9d6 }
.e { fill: #5f97d8 } .f { fill: #d9953f } .frame { fill: none; stroke: #888; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #eee } rect { stroke: #1e2129 } .ground { fill: #1e2129 }
  line, path { stroke: #bbb } marker path { fill: #bbb }
  .plain { fill: #3a3d49 } .a { fill: #2f5d93 } .b { fill: #8a5a1f } .c { fill: #3d7a3a } .d { fill: #84447a }
  .e { fill: #1d3d66 } .f { fill: #5e3a0c } .frame { stroke: #999 }
}
"""
ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z"/></marker>'
)


def box(
    x: float, y: float, width: float, height: float, kind: str, label: str = "", small: bool = False
) -> str:
    """A rectangle with a text in its middle."""
    text = f"middle{' small' if small else ''}"
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'
    return shape + (words(x + width / 2, y + height / 2 + 4.5, label, text) if label else "")


def words(x: float, y: float, text: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a head."""
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" marker-end="url(#arrow)"/>'


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    body = "\n".join([f'<rect width="{width}" height="{height}" class="ground"/>', *parts])
    licence = "<!-- SPDX-License-Identifier: Apache-2.0 -->"
    return f"{licence}\n{head}\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{ARROW}\n{body}\n</svg>\n"


def tensor() -> str:
    """A feed-forward layer whose matrices are cut, with the regions of sequence parallelism."""
    parts = [words(20, 24, "without sequence parallelism"), words(20, 174, "with it")]
    for top, whole in ((40, True), (190, False)):
        for rank, kind in enumerate("ab"):
            y = top + rank * 56
            share = "all tokens" if whole else f"tokens {rank}/2"
            parts += [
                words(20, y + 26, f"rank {rank}"),
                box(80, y, 120, 44, "plain" if whole else kind, f"norm: {share}", small=True),
                box(290, y, 110, 44, kind, f"W1, columns {rank}", small=True),
                box(410, y, 110, 44, kind, f"W2, rows {rank}", small=True),
                box(610, y, 120, 44, "plain" if whole else kind, f"residual: {share}", small=True),
                arrow(205, y + 22, 285, y + 22),
                arrow(525, y + 22, 605, y + 22),
            ]
        first, second = ("copy", "all-reduce") if whole else ("all-gather", "reduce-scatter")
        parts += [
            words(245, top + 16, first, "middle small"),
            words(565, top + 16, second, "middle small"),
        ]
    return svg(750, 310, "A feed-forward layer over two tensor-parallel ranks", parts)


Task = tuple[str, int, int]  # forward or backward, microbatch, part of the model on this stage


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Task]:
    """The order of a stage: warm-up, then one forward and one backward in turn, then what is left."""
    warm_up = min(stages - stage - 1, microbatches)
    forward = [("F", number, 0) for number in range(microbatches)]
    backward = [("B", number, 0) for number in range(microbatches)]
    return _alternate(forward, backward, warm_up)


def interleaved(stage: int, stages: int, microbatches: int, parts: int) -> list[Task]:
    """The same where each stage has several parts of the model; microbatches go in groups of ``stages``."""
    groups = range(0, microbatches, stages)
    forward = [
        ("F", first + n, part) for first in groups for part in range(parts) for n in range(stages)
    ]
    backward = [("B", number, parts - 1 - part) for _, number, part in forward]
    warm_up = min(2 * (stages - stage - 1) + (parts - 1) * stages, len(forward))
    return _alternate(forward, backward, warm_up)


def _alternate(forward: list[Task], backward: list[Task], warm_up: int) -> list[Task]:
    steady = len(forward) - warm_up
    turns = [
        task for pair in zip(forward[warm_up:], backward[:steady], strict=True) for task in pair
    ]
    return forward[:warm_up] + turns + backward[steady:]


def times(
    orders: list[list[Task]], parts: int, cost: dict[str, float]
) -> dict[tuple[int, Task], float]:
    """When each stage begins each task, if sending takes no time."""
    begun: dict[tuple[int, Task], float] = {}
    ended: dict[tuple[int, Task], float] = {}
    free, at = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                task = order[at[stage]]
                needed = _before(stage, task, len(orders), parts)
                if needed is not None and needed not in ended:
                    break
                start = max(free[stage], ended[needed] if needed else 0.0)
                begun[stage, task] = start
                free[stage] = ended[stage, task] = start + cost[task[0]]
                at[stage] += 1
    return begun


def _before(stage: int, task: Task, stages: int, parts: int) -> tuple[int, Task] | None:
    """The task of another place that this one waits for."""
    kind, number, part = task
    place = part * stages + stage
    if kind == "F":
        return None if place == 0 else ((place - 1) % stages, ("F", number, (place - 1) // stages))
    if place == stages * parts - 1:
        return stage, ("F", number, part)
    return (place + 1) % stages, ("B", number, (place + 1) // stages)


def idle(orders: list[list[Task]], parts: int, cost: dict[str, float]) -> float:
    """The bubble: time that a stage waits, as a part of the time that it computes."""
    begun = times(orders, parts, cost)
    work = sum(cost[task[0]] for task in orders[0])
    return max(start + cost[task[0]] for (_, task), start in begun.items()) / work - 1


def schedule(stages: int = 4, microbatches: int = 8, unit: float = 20.0) -> str:
    """Both schedules of a pipeline, on one scale: a backward pass takes as long as two forward passes."""
    parts = [
        words(
            20,
            22,
            f"1F1B: {stages} stages, {microbatches} microbatches; forward blue, backward orange, gray waits",
        )
    ]
    plain = [one_forward_one_backward(stage, stages, microbatches) for stage in range(stages)]
    halves = [interleaved(stage, stages, microbatches, 2) for stage in range(stages)]
    parts += _chart(plain, 1, {"F": 1.0, "B": 2.0}, 34, unit)
    below = 34 + stages * 30 + 40
    parts.append(
        words(
            20,
            below - 12,
            "interleaved: each stage has two parts of the model, the second one dark",
        )
    )
    parts += _chart(halves, 2, {"F": 0.5, "B": 1.0}, below, unit)
    return svg(
        760,
        int(below + stages * 30 + 10),
        "1F1B and interleaved pipeline schedules with their bubbles",
        parts,
    )


def _chart(
    orders: list[list[Task]], parts: int, cost: dict[str, float], top: float, unit: float
) -> Iterator[str]:
    begun = times(orders, parts, cost)
    end = max(start + cost[task[0]] for (_, task), start in begun.items())
    for stage in range(len(orders)):
        yield words(20, top + stage * 30 + 19, f"stage {stage}")
        yield box(80, top + stage * 30, end * unit, 26, "plain")
    for (stage, (kind, number, part)), start in begun.items():
        color = ("ae", "bf")[kind == "B"][part]
        label = str(number) if cost[kind] * unit >= 10 else ""
        yield box(
            80 + start * unit, top + stage * 30, cost[kind] * unit, 26, color, label, small=True
        )


def context() -> str:
    """Which parts of a sequence each of four context-parallel ranks holds, and the causal work of each."""
    parts = [words(20, 24, "a sequence of 8 parts, over 4 ranks: rank r holds parts r and 7 - r")]
    owners = [min(part, 7 - part) for part in range(8)]
    for part, owner in enumerate(owners):
        parts.append(
            box(20 + part * 88, 40, 84, 36, "abcd"[owner], f"part {part}: rank {owner}", small=True)
        )
    parts.append(words(20, 112, "attention: a part (row) looks at the parts before it (columns)"))
    for row, column in product(range(8), range(8)):
        kind = "abcd"[owners[row]] if column <= row else "plain"
        parts.append(box(20 + column * 34, 124 + row * 20, 32, 18, kind))
    for rank in range(4):
        work = sum(row + 0.5 for row in range(8) if owners[row] == rank)
        parts.append(box(340, 134 + rank * 34, 24, 24, "abcd"[rank]))
        parts.append(words(374, 151 + rank * 34, f"rank {rank}: {work:g} of 32 units of work"))
    return svg(740, 296, "Zig-zag split of a sequence for context parallelism", parts)


def experts() -> str:
    """Tokens that travel to the ranks of their experts and back."""
    parts = [words(20, 18, "before"), words(300, 18, "at their experts"), words(600, 18, "after")]
    chosen = (0, 2, 1, 3, 1, 0, 3, 2)  # the expert of each token
    places = [0] * 4
    for token, expert in enumerate(chosen):
        y = 40 + token * 26 + (token // 4) * 16
        to_y = 40 + expert * 54 + places[expert] * 24 + (expert // 2) * 12
        places[expert] += 1
        label = f"token {token}"
        parts += [
            box(20, y, 90, 22, "ab"[token // 4], label, small=True),
            arrow(112, y + 11, 296, to_y + 11),
        ]
        parts += [
            box(300, to_y, 90, 22, "ab"[token // 4], label, small=True),
            arrow(474, to_y + 11, 596, y + 11),
        ]
        parts.append(box(600, y, 90, 22, "ab"[token // 4], label, small=True))
    for expert in range(4):
        parts.append(
            box(
                394,
                40 + expert * 54 + (expert // 2) * 12,
                78,
                46,
                "plain",
                f"expert {expert}",
                small=True,
            )
        )
    for rank in range(2):
        parts += [words(x, 36 + rank * 119, f"rank {rank}", "small") for x in (20, 300, 600)]
    return svg(720, 296, "All-to-all of expert parallelism over two ranks", parts)


def data() -> str:
    """What each of four data-parallel ranks keeps, with and without the distributed optimizer."""
    parts = []
    for column, (title, sharded) in enumerate(
        (("each has all", False), ("distributed optimizer", True))
    ):
        x = 20 + column * 370
        parts.append(words(x, 24, title))
        for rank in range(4):
            y = 40 + rank * 40
            parts += [
                words(x, y + 20, f"rank {rank}"),
                box(x + 56, y, 60, 32, "a", "weights", small=True),
            ]
            parts.append(box(x + 120, y, 60, 32, "b", "gradients", small=True))
            parts += [
                box(x + 184 + part * 36, y, 34, 32, "c" if part == rank or not sharded else "plain")
                for part in range(4)
            ]
        parts.append(words(x + 184, 218, "optimizer state", "small"))
    parts.append(
        words(20, 246, "all-reduce gradients, then every rank updates all weights", "small")
    )
    parts.append(
        words(390, 246, "reduce-scatter gradients, update a quarter, all-gather weights", "small")
    )
    return svg(750, 260, "Data parallelism with and without the distributed optimizer", parts)


def ranks(tensor_size: int = 2, context_size: int = 2, stages: int = 2, replicas: int = 2) -> str:
    """Sixteen GPUs in Megatron-Core's order: tensor, context, data, pipeline."""
    parts = []
    for stage, replica in product(range(stages), range(replicas)):
        x, y = 20 + replica * 366, 40 + stage * 180
        parts += [
            box(x, y, 352, 160, "frame"),
            words(x + 10, y + 20, f"stage {stage}, data replica {replica}"),
        ]
        for cp, tp in product(range(context_size), range(tensor_size)):
            rank = tp + tensor_size * (cp + context_size * (replica + replicas * stage))
            kind = "abcd"[2 * cp + tp]
            label = f"rank {rank}: tp {tp}, cp {cp}"
            parts.append(box(x + 12 + tp * 168, y + 34 + cp * 60, 160, 50, kind, label))
    parts.append(
        words(
            20,
            24,
            "16 GPUs = tensor 2 x context 2 x data 2 x pipeline 2; ranks 0 to 7 are one node, 8 to 15 the other",
        )
    )
    return svg(760, 400, "The order of ranks on 16 GPUs", parts)


def layers() -> str:
    """From a Hugging Face checkpoint to a run and back."""
    steps = [
        ("Hugging Face", "config, weights"),
        ("bridge", "names, shapes"),
        ("provider", "what to build"),
        ("model", "chunks of a rank"),
    ]
    parts = []
    for place, (name, what) in enumerate(steps):
        x = 20 + place * 184
        parts += [
            box(x, 40, 140, 52, "abcd"[place]),
            words(x + 70, 62, name, "middle"),
            words(x + 70, 80, what, "middle small"),
        ]
        if place:
            parts.append(arrow(x - 42, 58, x - 4, 58))
            parts.append(arrow(x - 4, 78, x - 42, 78))
    parts += [
        box(388, 130, 140, 44, "plain", "layout"),
        arrow(458, 128, 458, 96),
        box(572, 130, 140, 44, "plain", "recipe, data"),
        arrow(642, 128, 642, 96),
    ]
    return svg(740, 190, "From a Hugging Face checkpoint to a model on many ranks, and back", parts)


def overview() -> str:
    """The way of a model: Hugging Face files, plan, layout, training loop, checkpoint, Hugging Face files."""
    panels = [
        (
            "a",
            "Hugging Face files",
            ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"],
        ),
        (
            "d",
            "plan",
            [
                "q_proj, k_proj, v_proj → linear_qkv",
                "gate_proj, up_proj → linear_fc1",
                "every tensor once",
            ],
        ),
        ("b", "layout", ["layers 0-13", "", "layers 14-27"]),
        (
            "b",
            "training loop",
            ["forward, backward, optimizer step", "callbacks: log, evaluate, save"],
        ),
        (
            "c",
            "checkpoint",
            [
                "weights, optimizer, random states,",
                "position in the data; hashed",
                "loads under any layout",
            ],
        ),
        ("a", "Hugging Face files", ["the same names, new weights", "loads in transformers"]),
    ]
    parts: list[str] = []
    for place, (kind, title, lines) in enumerate(panels):
        x, y = (20 + place * 252, 20) if place < 3 else (524 - (place - 3) * 252, 160)
        parts += [box(x, y, 216, 100, "plain"), box(x, y, 216, 28, kind, title)]
        parts += [
            words(x + 10, y + 48 + line * 20, text, "small") for line, text in enumerate(lines)
        ]
    for stage, rank in product(range(2), range(2)):
        label = f"rank {2 * stage + rank}"
        parts.append(box(612 + rank * 62, 51 + stage * 33, 58, 30, "ef"[rank], label, small=True))
    parts += [arrow(x, 70, x + 30, 70) for x in (239, 491)] + [arrow(632, 122, 632, 157)]
    parts += [arrow(x, 210, x - 30, 210) for x in (521, 269)]
    return svg(
        760,
        280,
        "From Hugging Face files through plan, layout, loop and checkpoint back to them",
        parts,
    )


PICTURES = {
    "overview": overview,
    "concepts": layers,
    "tensor": tensor,
    "schedule": schedule,
    "context": context,
    "experts": experts,
    "data": data,
    "ranks": ranks,
}


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
