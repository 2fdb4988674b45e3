"""Storages that come and go while a block runs forward and backward, without any tensors.

A tape is what autograd does to memory: an operator's result lives while something holds it, what it
keeps for backward lives until its node has run, gradients that meet at one place are added into a new
storage. Blocks are written on it as they are written in the model, operator by operator.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

# accumulate: added to what is kept of gradients, at once. hold: until the unit's backward is over.
# aside: not computed; the operands are put aside (a backward in two, Qi et al. 2023).
Weights = Literal["accumulate", "hold", "aside"]

# Components that come up wherever something runs.
GATHERED, LEAVING = "gathered parameters", "gradients on their way"
GRADIENTS, WEIGHTS = "gradients of activations", "gradients of weights"


class Storage:
    """Some bytes under a name, held by `holders`."""

    __slots__ = ("bytes", "holders", "name")

    def __init__(self, name: str, size: int) -> None:
        self.name, self.bytes, self.holders = name, size, 1


@dataclass(eq=False)
class Value:
    """A result: where it lies, and the gradient that has reached it so far.

    made_from: what a product of it keeps instead, where backward makes it again.
    """

    storage: Storage
    grad: Storage | None = None
    made_from: Storage | None = None


@dataclass
class Node:
    """One operator to be differentiated.

    inputs: (value, bytes of its gradient; None: the incoming one, or a view of it). `weights`: bytes
    of the gradients of parameters; `temporary`: bytes that backward needs while it runs; `remade`:
    the same, for the gradients of parameters, which come first; `between`: for the others.
    prepared: forward has made the gradients; they are what it saved, the input's first, or lie
    in a larger storage, which they are taken out of.
    """

    output: Value
    inputs: list[tuple[Value, int | None]]
    saved: list[Storage] = field(default_factory=list)
    weights: tuple[int, ...] = ()
    temporary: tuple[int, ...] = ()
    remade: int = 0
    between: int = 0
    prepared: bool = False
    operand: Storage | None = None  # of a product whose weight's gradient may be put aside
    act: Callable[[], None] | None = None  # what hooks do before it


class Tape:
    """Counts what lives. `grad`: whether operators keep what backward needs."""

    def __init__(self, weights: Weights = "accumulate") -> None:
        self.weights: Weights = weights
        self.grad = True
        self.live: Counter[str] = Counter()
        self.now = 0
        self.most = 0
        self.at_most: Counter[str] = Counter()
        self.nodes: list[Node] = []
        self.products: deque[Storage] | None = None  # kept by a selective checkpoint
        self.replaying = False  # a recomputation
        self.stopped = False  # it ends with the last operator that keeps something
        self.aside: list[Storage] = []
        self.held: list[Storage] = []
        self.largest_weight = 0
        self.gathering: Storage | None = None  # what the last gathering arrived in
        self.scattering: Storage | None = None  # what the last reduce-scatter was sent from
        self.wire = 1.0  # bytes of a gradient that travels over those of a parameter
        self.alone = False  # experts that no other rank holds: nothing travels
        self.before = 0  # bytes of the unit whose gathering starts when backward comes here

    # Storages
    def new(self, name: str, size: int) -> Storage:
        """A storage with one holder."""
        self._change(name, size)
        return Storage(name, size)

    def hold(self, storage: Storage) -> Storage:
        """One holder more."""
        storage.holders += 1
        return storage

    def drop(self, *storages: Storage) -> None:
        """One holder less of each; the last one frees it."""
        for storage in storages:
            storage.holders -= 1
            assert storage.holders >= 0, storage.name
            if not storage.holders:
                self._change(storage.name, -storage.bytes)

    def passing(self, name: str, *sizes: int) -> None:
        """Storages that live at one time, and are gone."""
        for size in sizes:
            self._change(name, size)
        for size in sizes:
            self._change(name, -size)

    def last(self) -> None:
        """Nothing from here on is computed again: no later operator keeps a result."""
        self.stopped = self.replaying

    def mark(self) -> None:
        """Forget the most so far."""
        self.most, self.at_most = self.now, Counter(self.live)

    def _change(self, name: str, size: int) -> None:
        self.live[name] += size
        self.now += size
        if self.now > self.most:
            self.most = self.now
            self.at_most = self.live.copy()

    # Forward
    def op(
        self,
        name: str,
        size: int,
        inputs: Iterable[tuple[Value, int | None]],
        *,
        saves: Iterable[Storage] = (),
        saves_output: bool = False,
        extra: int = 0,
        extra_name: str = "statistics",
        weights: tuple[int, ...] = (),
        temporary: tuple[int, ...] = (),
        remade: int = 0,
        between: int = 0,
        prepared: bool = False,
        product: bool = False,
        operand: Storage | None = None,
    ) -> Value:
        """An operator with a result of `size` (and a second one of `extra` bytes, which it saves).

        The caller holds the result and lets go of it by `drop(value.storage)`.
        """
        size, extra = (0, 0) if self.stopped else (size, extra)
        again = product and self.replaying and self.products is not None and not self.stopped
        if again:
            assert self.products, "as many products as the first time"
            storage = self.products.popleft()
            more = self.products.popleft() if extra else None
        else:
            storage = self.new(name, size)
            more = self.new(extra_name, extra) if extra else None
            if product and self.products is not None and not self.replaying:
                self.products += [self.hold(s) for s in (storage, more) if s is not None]
        value = Value(storage)
        if self.grad:
            saved = [self.hold(s) for s in saves]
            if saves_output:
                saved.append(self.hold(storage))
            if more is not None:
                saved.append(self.hold(more))
            self.nodes.append(
                Node(
                    value,
                    list(inputs),
                    saved,
                    weights,
                    temporary,
                    remade,
                    between,
                    prepared,
                    operand,
                )
            )
        if more is not None:
            self.drop(more)
        return value

    def view(self, value: Value, then: Callable[[], None] | None = None) -> Value:
        """The same storage once more; `then` is done when its gradient comes."""
        result = Value(self.hold(value.storage), made_from=value.made_from)
        if self.grad:
            self.nodes.append(Node(result, [(value, None)], act=then))
        return result

    def op_view(self, value: Value, gradient: int) -> Value:
        """The same storage once more, whose gradient is a new one."""
        result = Value(self.hold(value.storage))
        if self.grad:
            self.nodes.append(Node(result, [(value, gradient)]))
        return result

    def hold_now(self, name: str, size: int) -> None:
        """Some bytes more, until `let_go`."""
        self._change(name, 0 if self.stopped else size)

    def let_go(self, name: str, size: int) -> None:
        """They are gone."""
        self._change(name, 0 if self.stopped else -size)

    def free(self, *values: Value) -> None:
        """Let go of results."""
        self.drop(*(value.storage for value in values))

    # Units that are gathered when they are used (ZeRO-3)
    def gather(self, x: Value, unit: int) -> Value:
        """Before a unit of `unit` bytes runs; behind it in backward, its gradients are sent."""
        if not unit:
            return self.view(x)
        self.arrive(unit)
        return self.view(x, lambda: self.scatter(unit))

    def release(self, x: Value, unit: int) -> Value:
        """After it has run; takes over `x`. In backward it is gathered again, if it was not
        computed again, and then the next unit is gathered early."""
        if not unit:
            return x
        if self.replaying:
            self._arrived()
            found = self.view(x, lambda: self._change(GATHERED, self.before))
        else:
            self._change(GATHERED, -unit)
            found = self.view(x, lambda: self._again(unit))
        self.free(x)
        return found

    def _again(self, unit: int) -> None:
        self._change(GATHERED, unit)
        self._arrived()
        self._change(GATHERED, self.before)

    def _arrived(self) -> None:
        if self.gathering is not None:
            self.drop(self.gathering)
            self.gathering = None

    def arrive(self, unit: int) -> None:
        """A unit's parameters come: once as they travel, which stays until the next come, and once
        as they are used."""
        if not self.replaying:  # else they came early
            arrived = self.new(GATHERED, 0 if self.alone else unit)
            self._arrived()
            self.gathering = arrived
        self._change(GATHERED, unit)

    def depart(self, unit: int) -> None:
        """The forward of a unit is over; what it arrived in is not counted with what is kept."""
        self._change(GATHERED, -unit)
        self._arrived()

    def scatter(self, unit: int) -> None:
        """A unit's backward is over: its gradients leave in the wire's format."""
        self._change(GATHERED, -unit)
        if self.scattering is not None:
            self.drop(self.scattering)
        self.scattering = self.new(LEAVING, int(unit * self.wire))
        self.drop(*self.held)
        self.held.clear()

    # Backward
    def backward(self, start: Value, gradient: Storage) -> None:
        """Run all nodes, last first, from a gradient, which this takes over."""
        start.grad = gradient
        while self.nodes:
            self._run(self.nodes.pop())

    def _run(self, node: Node) -> None:
        incoming = node.output.grad
        node.output.grad = None
        if node.act is not None:
            node.act()
        if incoming is None:
            self.drop(*node.saved)
            return
        for size in node.temporary:
            self._change(GRADIENTS, size)
        self._change(GRADIENTS, node.remade)
        weights = self._weights(node, incoming)
        self._change(GRADIENTS, node.between - node.remade)
        found = [(value, self._gradient(node, incoming, size)) for value, size in node.inputs]
        for size in (*node.temporary, node.between):
            self._change(GRADIENTS, -size)
        self.drop(incoming, *node.saved)
        for value, gradient in found:
            self._add(value, gradient)
        if self.weights == "hold":
            self.held += weights
        else:
            self.drop(*weights)

    def _gradient(self, node: Node, incoming: Storage, size: int | None) -> Storage:
        if node.prepared:
            return self.hold(node.saved[0])
        return self.hold(incoming) if size is None else self.new(GRADIENTS, size)

    def _weights(self, node: Node, incoming: Storage) -> list[Storage]:
        if node.prepared:
            made = zip(node.saved[1:], node.weights, strict=True)
            return [
                self.hold(s) if s.bytes == size else self.new(WEIGHTS, size) for s, size in made
            ]
        if self.weights == "aside" and node.operand is not None:
            self.aside += [self.hold(node.operand), self.hold(incoming)]
            self.largest_weight = max(self.largest_weight, *node.weights, 0)
            return []
        return [self.new(WEIGHTS, size) for size in node.weights]

    def _add(self, value: Value, gradient: Storage) -> None:
        if value.grad is None:
            value.grad = gradient
            return
        total = self.new(GRADIENTS, gradient.bytes)
        self.drop(value.grad, gradient)
        value.grad = total
