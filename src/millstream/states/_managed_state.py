"""The state of a training run: parameters, optimizer, step and key, and how its steps run."""

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol, Self, TypedDict

import jax
import jax.numpy as jnp

from millstream.loops.learning_rates import used_rate
from millstream.reading.contracts import PyTree
from millstream.reading.memory import nbytes
from millstream.states._new_arrays import as_arrays, check_key, check_params, copied, split_fields, unshared, wide_copy
from millstream.states._precision import LossScale, Precision, as_loss_scale, as_precision, at_least_32_bits, cast
from millstream.states._strategy_names import get_strategy
from millstream.states.gradients import Accumulate
from millstream.states.strategies import Strategy
from millstream.text.errors import describe_value, require_bool, require_int, require_positive
from millstream.text.summaries import never_raising, value_text
from millstream.text.tables import count_text, size_text

_STATIC = {"static": True}


class Layout:
    """The fields of a state class, looked up when the first state is made: its decorator runs after its registration.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @functools.cached_property
    def dynamic(self) -> tuple[str, ...]:
        """The names of the fields that hold arrays."""
        return tuple(field.name for field in fields_of(self._kind) if not field.metadata.get("static", False))

    @functools.cached_property
    def static(self) -> tuple[str, ...]:
        """The names of the others."""
        return tuple(field.name for field in fields_of(self._kind) if field.metadata.get("static", False))

    @functools.cached_property
    def own(self) -> tuple[str, ...]:
        """The names of the fields that a subclass adds, dynamic ones first."""
        return (*self.dynamic[6:], *self.static[4:])

    @functools.cached_property
    def get_dynamic(self) -> Any:
        """Gives the values of the dynamic fields of a state."""
        return operator.attrgetter(*self.dynamic)

    @functools.cached_property
    def get_static(self) -> Any:
        """Gives the values of the static fields of a state."""
        return operator.attrgetter(*self.static)


def fields_of(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a state class; those it inherits come first."""
    annotations = inspect.get_annotations(kind)
    own = [name for name, annotation in annotations.items() if "ClassVar" not in str(annotation)]
    if own and "__dataclass_fields__" not in kind.__dict__:
        raise TypeError(
            f"{kind.__name__} has fields of its own ({', '.join(own)}), and so must be a dataclass. "
            "Write @dataclasses.dataclass(frozen=True, kw_only=True) above it."
        )
    return dataclasses.fields(kind)


def register_state(kind: type) -> None:
    """Make a state class a pytree."""
    layout = Layout(kind)

    def flatten(state: Any) -> tuple[Any, Any]:
        return layout.get_dynamic(state), layout.get_static(state)

    def flatten_with_keys(state: Any) -> tuple[Any, Any]:
        keys = map(jax.tree_util.GetAttrKey, layout.dynamic)
        return tuple(zip(keys, layout.get_dynamic(state), strict=True)), layout.get_static(state)

    def unflatten(static: Any, dynamic: Any) -> Any:
        # Every step does this. Names written out take a third of the time of a loop or of a dataclass's constructor.
        state = object.__new__(kind)
        to = state.__dict__
        to["params"], to["opt_state"], to["step"], to["key"], to["ema_params"], to["loss_scale"], *dynamic = dynamic
        to["tx"], to["apply_fn"], to["strategy"], to["options"], *static = static
        if layout.own:
            to.update(zip(layout.own, (*dynamic, *static), strict=True))
        return state

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)


class Optimizer(Protocol):
    """An optimizer, such as those of optax."""

    @property
    def init(self) -> Callable[..., PyTree]:
        """From parameters to the optimizer's state."""
        ...

    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """From gradients, the optimizer's state and parameters to updates and the next state."""
        ...


class ManagedOptions(TypedDict, total=False):
    """The options of `ManagedState.create` that the states of frameworks pass on."""

    precision: str | Precision | None
    loss_scale: LossScale | None
    accumulate: int | Accumulate
    clip_norm: float | None
    ema: float | None
    skip_nonfinite: bool
    log_norms: bool
    log_learning_rate: bool


@dataclasses.dataclass(frozen=True)
class Options:
    """How the steps of a state compute and update; `ManagedState.create` says what each means."""

    precision: Precision | None = None
    accumulate: Accumulate | None = None
    clip_norm: float | None = None
    ema: float | None = None
    skip_nonfinite: bool = False
    log_norms: bool = False
    log_learning_rate: bool = False


def checked_options(caller: str, accumulate: int | Accumulate, **options: Any) -> Options:
    """The options, or an error that says which is wrong."""
    clip_norm, ema = options["clip_norm"], options["ema"]
    if clip_norm is not None:
        require_positive(caller, "clip_norm", clip_norm, "a finite number")
    if ema is not None and not (_is_number(ema) and 0 <= ema < 1):
        raise ValueError(
            f"{caller} needs ema, the share of the average that is kept at a step, to be from 0 to below 1, such as "
            f"0.999. Got {describe_value(ema)}."
        )
    for name in ("skip_nonfinite", "log_norms", "log_learning_rate"):
        require_bool(caller, name, options[name])
    if not isinstance(accumulate, Accumulate):
        require_int(caller, "accumulate", accumulate, least=1)
        accumulate = Accumulate(accumulate)
    return Options(accumulate=None if accumulate.microbatches == 1 else accumulate, **options)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def updated(state: Any, grads: PyTree, otherwise: Any, **extra: Any) -> tuple[Any, dict[str, jax.Array]]:
    """The state after one update, and what there is to log about it.

    Args:
        state: The state.
        grads: Gradients, shaped like its parameters.
        otherwise: The state to stay at, but for its step and its loss scale, if the gradients are not finite and the
            options say that such an update is left out.
        **extra: For the optimizer.
    """
    options, facts = state.options, {}
    clipped = grads if options.clip_norm is None else _clipped(grads, options.clip_norm)
    updates, opt_state = state.tx.update(clipped, state.opt_state, state.params, **extra)
    params = jax.tree.map(_sum, state.params, updates)
    if options.log_norms:
        norms = {"grad_norm": grads, "param_norm": params, "update_norm": updates}
        facts |= {name: global_norm(tree) for name, tree in norms.items()}
    if options.log_learning_rate:
        facts["learning_rate"] = used_rate("log_learning_rate", state.tx, opt_state).of_update(
            state.opt_state, opt_state
        )
    new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
    if options.ema is not None:
        new = new.replace(ema_params=_average(state.ema_params, params, options.ema))
    if options.skip_nonfinite or state.loss_scale is not None:
        finite = _all_finite(grads)
        new = jax.tree.map(lambda ours, theirs: _chosen(finite, ours, theirs), new, otherwise.replace(step=new.step))
        facts["skipped_updates"] = 1.0 - finite.astype(jnp.float32)
        if state.loss_scale is not None:
            new = new.replace(loss_scale=state.loss_scale.adjusted(finite))
    return new, facts


def global_norm(tree: PyTree) -> jax.Array:
    """The Euclidean norm of all leaves together, at least in 32 bits."""
    squares = [jnp.sum(jnp.square(jnp.abs(at_least_32_bits(leaf)))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares[1:], start=squares[0]))


def _clipped(grads: PyTree, limit: float) -> PyTree:
    norm = global_norm(grads)
    share = jnp.where(norm > limit, limit / norm, 1.0)
    return jax.tree.map(lambda grad: grad * share.astype(grad.dtype), grads)


def _sum(param: jax.Array, update: jax.Array) -> jax.Array:
    dtype = max(param.dtype, update.dtype, key=lambda dtype: dtype.itemsize)
    return (param.astype(dtype) + update.astype(dtype)).astype(param.dtype)


def _average(ema_params: PyTree, params: PyTree, share: float) -> PyTree:
    return jax.tree.map(lambda ema, param: share * ema + (1 - share) * param.astype(ema.dtype), ema_params, params)


def _all_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _chosen(finite: jax.Array, ours: Any, theirs: Any) -> Any:
    return ours if ours is theirs else jnp.where(finite, ours, theirs)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ManagedState:
    """What a training run carries from step to step, and how its steps run. Make one with `create`.

    A frozen dataclass and a pytree. A subclass that is a frozen dataclass too may have fields of its own, which
    `create` takes by name; those with `metadata={"static": True}` are not arrays and become part of the compiled step.

    Example:
        >>> import optax
        >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(3)}, optax.sgd(0.1), key=jax.random.key(0))
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class WithStatistics(ms.managed.ManagedState):
        ...     batch_stats: dict
        ...     training: bool = dataclasses.field(default=True, metadata={"static": True})
        >>> other = WithStatistics.create({"w": jnp.zeros(3)}, optax.sgd(0.1), batch_stats={"mean": jnp.zeros(3)})

    Attributes:
        params: Parameters, any pytree of floats.
        opt_state: The optimizer's state.
        step: Completed train steps.
        key: The run's key; None if it has none.
        ema_params: The exponential moving average of the parameters; None if it is not asked for.
        loss_scale: What losses are multiplied with; None if they are not.
        tx: The optimizer.
        apply_fn: Whatever the model is applied with.
        strategy: How steps run.
        options: What else was asked for.
    """

    params: PyTree
    opt_state: PyTree
    step: jax.Array
    key: jax.Array | None = None
    ema_params: PyTree = None
    loss_scale: LossScale | None = None
    tx: Optimizer = dataclasses.field(metadata=_STATIC)
    apply_fn: Callable[..., PyTree] | None = dataclasses.field(default=None, metadata=_STATIC)
    strategy: Strategy = dataclasses.field(metadata=_STATIC)
    options: Options = dataclasses.field(default=Options(), metadata=_STATIC)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):  # or @dataclass would make one that shows all arrays
            cls.__repr__ = ManagedState.__repr__
        register_state(cls)

    @never_raising
    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        count, arrays = sum(leaf.size for leaf in leaves), f"{len(leaves):,} array{'' if len(leaves) == 1 else 's'}"
        known = f"step {value_text(self.step)}, {count_text(count)} parameters in {arrays}, {size_text(nbytes(leaves))}"
        return f"{type(self).__name__}({known}, {value_text(self.strategy)})"

    @classmethod
    def create(
        cls,
        params: PyTree,
        tx: Optimizer,
        *,
        strategy: str | Strategy = "jit",
        key: jax.Array | None = None,
        apply_fn: Callable[..., PyTree] | None = None,
        precision: str | Precision | None = None,
        loss_scale: LossScale | None = None,
        accumulate: int | Accumulate = 1,
        clip_norm: float | None = None,
        ema: float | None = None,
        skip_nonfinite: bool = False,
        log_norms: bool = False,
        log_learning_rate: bool = False,
        **fields: PyTree,
    ) -> Self:
        """A new state, at step 0.

        Example:
            >>> import optax
            >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(3)}, optax.adam(1e-3), strategy="data-parallel")

        Args:
            params: Parameters, any pytree of floats.
            tx: An optimizer with optax's `init` and `update`.
            strategy: "eager", "jit", "jit_donate", "data_parallel", "data_parallel_donate", "fsdp", "fsdp_donate", a
                registered name, or a `Strategy`.
            key: What `step_key` is made from.
            apply_fn: Whatever the model is applied with; steps find it in `state.apply_fn`.
            precision: "fp32", "bf16", "fp16" or a `Precision`: the dtypes that steps compute in. By default nothing is
                changed.
            loss_scale: A `LossScale`; by default there is one if steps compute in float16.
            accumulate: Into how many parts a train step divides its batch, or an `Accumulate`, which says how.
            clip_norm: Gradients are made smaller if their norm, all together, is larger than this.
            ema: Keep an average of the parameters, `ema_params`: this share of it stays at each step, such as 0.999.
            skip_nonfinite: Leave out updates whose gradients are not finite: nothing but the step changes. Their share
                is logged as the metric `skipped_updates`. Always so with a loss scale.
            log_norms: Log the metrics `grad_norm` (before clipping), `param_norm` and `update_norm`.
            log_learning_rate: Log the rate that the optimizer uses at each train step, as the stateful metric
                `learning_rate`: a number or schedule that was given to an optimizer of optax as `learning_rate`, or
                what `optax.inject_hyperparams` keeps. It is a part of the compiled step, so fused loops log it, too.
            **fields: The fields of a subclass.
        """
        caller = f"{cls.__name__}.create"
        if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
            raise TypeError(
                f"{caller} needs tx to be an optimizer with init and update, such as optax.adam(1e-3). "
                f"Got {describe_value(tx)}."
            )
        if key is not None:
            check_key(caller, key)
        mixed = as_precision(caller, precision)
        asked = dict(clip_norm=clip_norm, ema=ema, skip_nonfinite=skip_nonfinite, log_norms=log_norms)
        options = checked_options(caller, accumulate, precision=mixed, log_learning_rate=log_learning_rate, **asked)
        run = get_strategy(strategy, caller)
        own, static = split_fields(caller, fields_of(cls)[len(fields_of(ManagedState)) :], fields)

        def placed(name: str, tree: PyTree) -> PyTree:
            return run.place(as_arrays(caller, name, tree, copy=run.donate))

        params = as_arrays(caller, "params", params, copy=run.donate)
        check_params(caller, params)
        params = run.place(params if mixed is None else cast(params, mixed.param))
        opt_state = run.place(as_arrays(caller, "opt_state", unshared(tx.init(params), params), copy=False))
        if log_learning_rate:
            used_rate(f"{caller} with log_learning_rate=True", tx, opt_state)
        return cls(
            params=params,
            opt_state=opt_state,
            step=placed("step", 0),
            key=placed("key", key),
            ema_params=None if ema is None else jax.tree.map(wide_copy, params),
            loss_scale=placed("loss_scale", as_loss_scale(caller, loss_scale, mixed)),
            tx=tx,
            apply_fn=apply_fn,
            strategy=run,
            options=options,
            **{name: placed(name, tree) for name, tree in own.items()},
            **static,
        )

    def replace(self, **changes: PyTree) -> Self:
        """The same with other fields. If its strategy donates, arrays that come in are copied: it owns its own.

        Example:
            >>> import optax
            >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
            >>> state = state.replace(params={"w": jnp.ones(3)})
        """
        unknown = changes.keys() - self.__dict__.keys()
        if unknown:
            raise TypeError(
                f"{type(self).__name__}.replace knows no field {', '.join(map(repr, sorted(unknown)))}. "
                f"There are: {', '.join(self.__dict__)}."
            )
        if "strategy" in changes:
            changes["strategy"] = get_strategy(changes["strategy"], f"{type(self).__name__}.replace")
        if self.strategy.donate:
            changes = jax.tree.map(copied, changes)
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.__dict__.update(changes)
        # A state that begins to donate must own its arrays: others may hold those it has now.
        return jax.tree.map(copied, new) if new.strategy.donate and not self.strategy.donate else new

    def apply_gradients(self, grads: PyTree, **extra: PyTree) -> Self:
        """The state after one update by the optimizer, as its options say. A `train_step` does this by itself.

        Example:
            >>> import optax
            >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(2)}, optax.sgd(0.5))
            >>> state.apply_gradients({"w": jnp.ones(2)}).params["w"]
            Array([-0.5, -0.5], dtype=float32)

        Args:
            grads: Gradients, shaped like `params`, and not scaled.
            **extra: Given to the optimizer's `update`, such as `value=loss`.
        """
        expected, found = jax.tree.structure(self.params), jax.tree.structure(grads)
        if found != expected or not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(grads)):
            raise ValueError(
                f"apply_gradients needs grads to be arrays in a tree like params. Got {describe_value(grads)}, and "
                f"params are {expected}."
            )
        return updated(self, grads, self, **extra)[0]

    def step_key(self) -> jax.Array:
        """A key for this step alone: a function of the run's key and the step, whoever asks and however often.

        Example:
            >>> import optax
            >>> state = ms.managed.ManagedState.create({"w": jnp.zeros(2)}, optax.sgd(0.5), key=jax.random.key(0))
            >>> noise = jax.random.normal(state.step_key(), (2,))
        """
        if self.key is None:
            raise ValueError(
                f"{type(self).__name__}.step_key needs a key to begin with: create(..., key=jax.random.key(0))."
            )
        return jax.random.fold_in(self.key, self.step)


register_state(ManagedState)
