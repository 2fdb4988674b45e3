"""Recording which experts were chosen, and choosing the same again.

What an answer's tokens were sampled with can so be what they are trained with (Zheng et al. 2025).
"""

from __future__ import annotations

# N tokens, K chosen experts
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fivefold.core.errors import TrainingError
from fivefold.model.load import in_backward
from fivefold.model.router import Router

Choices = dict[str, list[Tensor]]  # by the router's name: one [N,K] for each forward pass


@contextmanager
def recorded(routers: dict[str, Router]) -> Iterator[Choices]:
    """Collect the choices of every forward pass inside the `with`."""
    choices: Choices = {name: [] for name in routers}
    with _hooks({r: _recorder(choices[name]) for name, r in routers.items()}):
        yield choices


@contextmanager
def replayed(routers: dict[str, Router], choices: Choices) -> Iterator[None]:
    """Force recorded choices, one after the other, inside the `with`.

    Weights are still computed from the scores, and have gradients. Recomputation in backward goes
    through the choices once more, in the same order. Raises TrainingError when a pass has other
    tokens than the recorded one, or there is none left for it.
    """
    with _hooks({r: _Player(name, choices.get(name, [])) for name, r in routers.items()}):
        yield


def _recorder(into: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def record(choice: Tensor) -> Tensor:
        if not in_backward():
            into.append(choice)
        return choice

    return record


class _Player:
    def __init__(self, name: str, choices: list[Tensor]) -> None:
        self._name = name
        self._choices = choices
        self._next = {False: 0, True: 0}  # in forward, and in its recomputation

    def __call__(self, choice: Tensor) -> Tensor:
        again = in_backward()
        index = self._next[again]
        self._next[again] += 1
        if index >= len(self._choices):
            raise TrainingError(
                f"{self._name} has {len(self._choices)} recorded passes, and runs another",
                "record as many passes as are replayed",
            )
        forced = self._choices[index].to(choice.device)
        if forced.shape != choice.shape:
            raise TrainingError(
                f"{self._name} recorded choices {list(forced.shape)} in pass {index}, "
                f"which now has {list(choice.shape)}",
                "replay the batches that were recorded, in their order",
            )
        return forced


@contextmanager
def _hooks(hooks: dict[Router, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    before = {router: router.replay for router in hooks}
    try:
        for router, hook in hooks.items():
            router.replay = hook
        yield
    finally:
        for router, earlier in before.items():
            router.replay = earlier
