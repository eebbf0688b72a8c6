"""Hooks on one model for one forward: what to record, what to replace, and where to stop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from silverspoon_kd.capture.names import base_of, find_module, named_modules
from silverspoon_kd.capture.selectors import Selector, select
from silverspoon_kd.errors import AlignmentError, TrainingError
from silverspoon_kd.tree import map_tensors


@dataclass(frozen=True)
class Tap:
    """One activation: what a module (by clean name; "" is the whole model) takes in or gives out."""

    module: str
    side: Literal["input", "output"] = "output"
    selector: Selector = None


@dataclass
class Trace:
    """What is known of a model's forward.

    Attributes:
        calls: how often each tapped module runs.
        stop_before: which module runs once all are done.
        changed: what is recorded and then changed in place by a later module, so that a copy has to be taken.
        learned: a first forward has shown these.
        skipped: layers whose hidden states nobody uses, with what they give out after them (None: nothing else).
    """

    calls: dict[str, int] = field(default_factory=dict)
    stop_before: str | None = None
    changed: set[Tap] = field(default_factory=set)
    learned: bool = False
    skipped: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)


class _StopForwardError(Exception):
    """Ends a forward whose remaining modules nobody needs."""


class Capture:
    """Record the taps of one forward.

    Hooks are registered here, at the forward and not at set-up, so that they run after those of any wrapper: FSDP and
    ZeRO-3 replace a module's output to hang their own step on it. A module that runs several times in one forward
    (ALBERT's shared layer) is recorded at its last run.

    Args:
        model: the model, wrapped inside or not.
        taps: what to record.
        trace: filled in by the first run and used by the later ones of the same model.
        substitute: for module names, a function of the module's incoming hidden states that gives what it shall
            compute on instead; no gradient leaves such a module through anything else that it takes in.
        on_value: told of each recorded activation as soon as it is final (from the second forward on, when it is known
            how often its module runs).
        stand_in: makes what a skipped layer gives out, of the hidden states it takes in.
    """

    def __init__(
        self,
        model: nn.Module,
        taps: Sequence[Tap],
        trace: Trace,
        substitute: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        on_value: Callable[[Tap, Tensor], None] | None = None,
        stand_in: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self._on_value, self._stand_in = on_value, stand_in
        self.values: dict[Tap, Tensor] = {}
        self._model, self._taps, self._trace = model, [tap for tap in taps if tap.module], trace
        self._root_taps = [tap for tap in taps if not tap.module]
        self._substitute = substitute or {}
        self._counts: dict[str, int] = {}
        self._versions: dict[Tap, int] = {}
        self._recording = False

    def run(self, call: Callable[[], Any], *, may_stop: bool) -> tuple[Any, list[RemovableHandle]]:
        """Run ``call`` (a forward of the model) and record.

        Returns:
            What ``call`` returned (None if the rest of the forward was not needed and ``may_stop``), and the handles of
            the substitutions. The caller removes these after the backward: recomputation under activation
            checkpointing must see the same inputs.

        Raises:
            TrainingError: a tapped module did not run.
        """
        kept: list[RemovableHandle] = []
        with ExitStack() as on_error:
            on_error.callback(_remove, kept)
            output, order = self._forward(call, kept, may_stop)
            for tap in self._root_taps:
                self.values[tap] = select(output, tap.selector, "the model")
            self._check_complete()
            self._learn(order)
            on_error.pop_all()
        return output, kept

    def _forward(
        self, call: Callable[[], Any], kept: list[RemovableHandle], may_stop: bool
    ) -> tuple[Any, list[tuple[str, int]]]:
        with ExitStack() as stack:
            for name, replace in self._substitute.items():
                hook = _substitution(replace, name)
                kept.append(find_module(self._model, name).register_forward_pre_hook(hook, with_kwargs=True))
            stack.callback(self._end)
            self._hook_taps(stack, may_stop)
            order = self._watch(stack) if not self._trace.learned else []
            if may_stop:
                self._skip(stack)
            if may_stop and self._trace.stop_before is not None and not self._root_taps:
                self._hook_stop(stack, self._trace.stop_before)
            self._recording = True
            try:
                return call(), order
            except _StopForwardError:
                return None, order

    def _end(self) -> None:
        self._recording = False

    def _skip(self, stack: ExitStack) -> None:
        for name, others in self._trace.skipped.items():
            forward = partial(self._pass_on, name, others)
            stack.enter_context(forward_replaced(find_module(self._model, name), forward))

    def _pass_on(self, name: str, others: tuple[Any, ...] | None, *args: Any, **kwargs: Any) -> Any:
        _, _, hidden = hidden_argument(args, kwargs, name)
        passed = self._stand_in(hidden)
        return passed if others is None else (passed, *others)

    def _hook_taps(self, stack: ExitStack, may_stop: bool) -> None:
        by_module: dict[str, list[Tap]] = {}
        for tap in self._taps:
            by_module.setdefault(tap.module, []).append(tap)
        for name, taps in by_module.items():
            module = find_module(self._model, name)
            inputs = [tap for tap in taps if tap.side == "input"]
            # Of a module that need not run at all: before its wrapper gathers its weights.
            only_input = may_stop and self._may_end_at(name, taps)
            if inputs:
                hook = self._record_input(inputs, ends=only_input)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=only_input).remove)
            stack.callback(module.register_forward_hook(self._record_output(name, taps)).remove)

    def _may_end_at(self, name: str, taps: Sequence[Tap]) -> bool:
        """Tell whether the forward may end where this module begins, its output being of no use."""
        known = self._trace.learned and not self._root_taps and self._trace.calls.get(name) == 1
        return known and all(tap.side == "input" for tap in taps) and not self._is_recomputed(name)

    def _record_input(self, taps: Sequence[Tap], *, ends: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if not self._recording:
                return
            for tap in taps:
                _, _, hidden = hidden_argument(args, kwargs, tap.module)
                self._keep(tap, hidden)
            self._tell(taps, self._counts.get(taps[0].module, 0) + 1)
            if ends and self._complete(but=taps[0].module):
                raise _StopForwardError

        return hook

    def _record_output(self, name: str, taps: Sequence[Tap]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            if not self._recording:
                return
            self._counts[name] = self._counts.get(name, 0) + 1
            for tap in taps:
                if tap.side == "output":
                    self._keep(tap, select(output, tap.selector, f"module {name!r}"))
            self._tell([tap for tap in taps if tap.side == "output"], self._counts[name])

        return hook

    def _keep(self, tap: Tap, value: Tensor) -> None:
        self.values[tap] = value.clone() if tap in self._trace.changed else value
        if not self._trace.learned:
            self._versions[tap] = _version(value)

    def _tell(self, taps: Sequence[Tap], call: int) -> None:
        if self._on_value is None or not self._trace.learned:
            return
        for tap in taps:
            if call == self._trace.calls.get(tap.module):
                self._on_value(tap, self.values[tap])

    def _complete(self, but: str | None = None) -> bool:
        names = {tap.module for tap in self._taps} - {but}
        return all(self._counts.get(name, 0) >= self._trace.calls.get(name, 1) for name in names)

    def _is_recomputed(self, name: str) -> bool:
        """Tell whether a module is in a checkpointed one: an exception must not fly through its forward."""
        parts = name.split(".")
        parents = (find_module(self._model, ".".join(parts[:depth])) for depth in range(1, len(parts)))
        return any(_is_checkpointed_layer(parent) for parent in parents)

    def _hook_stop(self, stack: ExitStack, name: str) -> None:
        if self._is_recomputed(name):
            return

        def stop(module: nn.Module, args: tuple) -> None:
            if self._recording and self._complete():
                raise _StopForwardError

        stack.callback(find_module(self._model, name).register_forward_pre_hook(stop, prepend=True).remove)

    def _watch(self, stack: ExitStack) -> list[tuple[str, int]]:
        """Note the order in which the model's modules start, with the number of tapped runs finished by then."""
        names = {id(module): name for name, module in reversed(list(named_modules(self._model)))}
        order: list[tuple[str, int]] = []

        def note(module: nn.Module, args: tuple) -> None:
            if id(module) in names:
                order.append((names[id(module)], sum(self._counts.values())))

        stack.callback(register_module_forward_pre_hook(note).remove)
        return order

    def _learn(self, order: list[tuple[str, int]]) -> None:
        if self._trace.learned:
            return
        total = sum(self._counts.values())
        after = [name for name, done in order if done == total]
        self._trace.calls = dict(self._counts)
        # A module that started before the last tapped one ended is its parent: only those after it can be left out.
        self._trace.stop_before = after[0] if after and total else None
        self._trace.changed = {tap for tap, version in self._versions.items() if _version(self.values[tap]) != version}
        self._trace.learned = True

    def _check_complete(self) -> None:
        missing = [tap.module for tap in self._taps if tap not in self.values]
        if missing:
            raise TrainingError(
                f"The aligned module {missing[0]!r} of {type(base_of(self._model)).__name__} did not run in this "
                "forward, so it can get no loss. Align a module that every batch goes through."
            )


@contextmanager
def forward_replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``forward`` be the module's while the block runs; hooks of wrappers still run around it."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _version(tensor: Tensor) -> int:
    """Return a number that changes when the tensor is changed in place; those of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


def _is_checkpointed_layer(module: nn.Module) -> bool:
    """Tell whether this module's own forward is recomputed; a container carries the same flag for its layers."""
    flagged = module.training and getattr(module, "gradient_checkpointing", False) is True
    return flagged and not any(isinstance(child, nn.ModuleList) for child in module.children())


def hidden_argument(args: tuple, kwargs: dict, name: str) -> tuple[tuple, dict, Tensor]:
    """Return the arguments with the hidden states taken out, and the hidden states: the first tensor a block gets."""
    if args and isinstance(args[0], Tensor):
        return args[1:], kwargs, args[0]
    key = "hidden_states" if isinstance(kwargs.get("hidden_states"), Tensor) else None
    key = key or next((word for word, value in kwargs.items() if isinstance(value, Tensor)), None)
    if key is None:
        raise AlignmentError(f"Module {name!r} is called without a tensor, so its input cannot be the teacher's.")
    return args, {word: value for word, value in kwargs.items() if word != key}, kwargs[key]


def _substitution(replace: Callable[[Tensor], Tensor], name: str) -> Callable[..., tuple[tuple, dict]]:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        _, _, hidden = hidden_argument(args, kwargs, name)
        new = replace(hidden)

        def given(value: Any) -> Any:
            # All that comes in is cut off: T5's blocks also get the encoder's states and block 0's position bias.
            return new if value is hidden else map_tensors(Tensor.detach, value)

        return tuple(map(given, args)), {word: given(value) for word, value in kwargs.items()}

    return hook
