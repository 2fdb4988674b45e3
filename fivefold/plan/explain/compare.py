"""Where the time of two strategies differs, piece by piece, and why."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.observe import format as as_text
from fivefold.plan.communication import Group, expert_groups, group
from fivefold.plan.search.found import Found, say
from fivefold.plan.search.valid import stages_of

SMALL = 0.005  # of the time: a difference that is not worth a line
AXES = {
    "tp exposed": ("tp",),
    "cp exposed": ("cp",),
    "pp exposed": ("pp",),
    "dp exposed": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass(frozen=True)
class Difference:
    """One piece of a step: seconds that the second strategy needs more (less if negative)."""

    piece: str
    seconds: float
    share: float  # of the first strategy's step
    why: str


def differences(first: Found, second: Found) -> list[Difference]:
    """The largest first; what is below `SMALL` of the first's step is left out."""
    ours, theirs = dict(first.time.pieces), dict(second.time.pieces)
    found = []
    for piece in dict.fromkeys((*ours, *theirs)):
        more = theirs.get(piece, 0.0) - ours.get(piece, 0.0)
        share = more / first.seconds
        if abs(share) >= SMALL:
            worse, better = (second, first) if more > 0 else (first, second)
            found.append(Difference(piece, more, share, reason(piece, worse, better)))
    return sorted(found, key=lambda each: -abs(each.seconds))


def verdict(first: Found, second: Found) -> str:
    """`second` against `first` in a line: how much slower, and by what above all."""
    slower = second.seconds / first.seconds - 1
    words = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    found = [each for each in differences(first, second) if (each.seconds > 0) == (slower >= 0)]
    if not found:
        return words
    main = found[0]
    return f"{words}; {main.why}: {main.share:+.0%} {in_words(main.piece)}"


def in_words(piece: str) -> str:
    """`tp exposed` as people say it."""
    axis, _, rest = piece.partition(" ")
    return f"exposed {axis} communication" if rest == "exposed" else piece


def reason(piece: str, worse: Found, better: Found) -> str:
    """Why `worse` spends more on `piece`."""
    said = {
        "products": _products,
        "attention": _attention,
        "elementwise": _elementwise,
        "host": _host,
        "recompute": _recompute,
        "bubble": _bubble,
        "ep exposed": _experts,
        "optimizer": _optimizer,
    }
    if piece in said:
        return said[piece](worse, better)
    if piece in AXES:
        return _axis(piece, worse, better)
    return f"{piece} takes longer"


def _products(worse: Found, better: Found) -> str:
    a, b = worse.strategy, better.strategy
    rows = {each: _rows(each) for each in (worse, better)}
    if _load(worse) > 1.01 * _load(better):
        layout = a.layout
        return (
            f"{worse.job.shape.config.num_layers} layers do not divide evenly over "
            f"{stages_of(layout)} stages"
        )
    if a.layout.pp > b.layout.pp:
        return f"the head makes one of {a.layout.pp} pipeline ranks slower than the others"
    if a.layout.tp > b.layout.tp or rows[worse] < rows[better]:
        return f"smaller matrix products (tp={a.layout.tp}, {rows[worse]:,} tokens a pass)"
    return "matrix products reach less of the device's rate"


def _rows(found: Found) -> int:
    """Tokens of a pass on one rank."""
    strategy = found.strategy
    return strategy.micro_batch * found.job.training.sequence // strategy.layout.cp


def _load(found: Found) -> float:
    """Layers of the fullest rank, over an even share."""
    stages = stages_of(found.strategy.layout)
    layers = found.job.shape.config.num_layers
    return -(-layers // stages) * stages / layers


def _attention(worse: Found, better: Found) -> str:
    return f"attention over smaller blocks (cp={worse.strategy.layout.cp})"


def _elementwise(worse: Found, better: Found) -> str:
    a, b = worse.strategy.layout, better.strategy.layout
    if a.tp < b.tp:
        return f"norms and activations are divided among tp={a.tp} ranks only"
    return "more passes over memory between products"


def _host(worse: Found, better: Found) -> str:
    return f"kernels so short that the host starts them late ({_rows(worse):,} tokens a pass)"


def _recompute(worse: Found, better: Found) -> str:
    return f"recompute={worse.strategy.recompute} runs blocks' forward again"


def _bubble(worse: Found, better: Found) -> str:
    layout, time = worse.strategy.layout, worse.time
    return (
        f"pipeline bubble of {time.bubble / time.total:.0%}: {time.microbatches} micro-batches on "
        f"{layout.pp} stages with {layout.schedule}"
    )


def _experts(worse: Found, better: Found) -> str:
    layout, job = worse.strategy.layout, worse.job
    there = expert_groups(job.cluster, layout)[0]
    if there.crosses:
        return _crossing(f"experts over {layout.ep} ranks", worse, there)
    return f"all-to-all of ep={layout.ep} ranks"


def _optimizer(worse: Found, better: Found) -> str:
    layout = worse.strategy.layout
    if layout.offload != "none":
        return "the optimizer's state goes over the host's link"
    return f"each rank updates a {layout.shards}th of its parameters"


def _axis(piece: str, worse: Found, better: Found) -> str:
    axes = AXES[piece]
    layout, job = worse.strategy.layout, worse.job
    there = group(job.cluster, layout, axes)
    ways = there.ranks
    name = piece.removesuffix(" exposed")
    if name == "dp":
        if layout.zero == 3 and layout.shards > 1:
            passes = worse.time.microbatches
            return f"zero=3 gathers parameters for each of {passes} micro-batches ({there.where})"
        return f"gradients of {ways} data ranks over {there.where}"
    if name == "pp":
        return f"messages between {layout.pp} stages over {there.where}"
    other = group(better.job.cluster, better.strategy.layout, axes)
    if there.crosses and not other.crosses:
        return _crossing(f"{name.upper()} {ways}", worse, there)
    if there.crosses:
        return f"{name.upper()} {ways} goes over {there.where}"
    return f"{name}={ways} talks inside every layer ({there.where})"


def _crossing(who: str, found: Found, there: Group) -> str:
    domain = found.job.cluster.domain
    return f"{who} crosses the {found.job.cluster.inside.name} domain of {domain}"


def pieces_in_words(found: Found) -> str:
    """What a step is spent on, in shares."""
    time = found.time
    return ", ".join(f"{what} {seconds / time.total:.1%}" for what, seconds in time.pieces)


def title(found: Found) -> str:
    """A strategy and its devices."""
    return f"{say(found.strategy)} on {found.job.devices} x {found.job.cluster.device.name}"


def memory_in_words(found: Found) -> str:
    """Of the fullest device."""
    memory = found.job.cluster.device.memory
    return f"{as_text.size(found.bytes)} of {as_text.size(memory)}"
