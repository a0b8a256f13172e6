"""The steps of random programs: each a line of Python, drawn to fit the values there are. See `programs.py`.

A step is a function of a `Draw`, which knows the values so far, computed in one process; it returns the line's expression, and raises
`NoFit` when no value suits it. Values that a step would make ambiguous (equal elements to sort, a kink near zero) do not suit it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

APART = 1e-6  # between elements that are compared, and from a kink
LARGEST = 600  # elements of a value


class NoFit(Exception):
    """No value so far suits the step."""


class Draw:
    """Choices for one step. values: by name, in one process; `split` names those that come from a `ShardTensor`."""

    def __init__(self, rng: random.Random, values: dict[str, torch.Tensor], split: set[str], axes: int) -> None:
        self.rng, self.values, self.split, self.axes = rng, values, split, axes
        self.now = torch.empty(())

    def find(self, suits: Callable[[torch.Tensor], bool], *, split: bool = False) -> str:
        """The name of a value, more likely a late one, for which `suits` holds."""
        names = [name for name, value in self.values.items() if (not split or name in self.split) and suits(value)]
        if not names:
            raise NoFit
        return self.rng.choices(names, weights=range(1, len(names) + 1))[0]

    def x(self, ndim: int = 0, most: int = 9, *, apart: bool = False, positive: bool = False, split: bool = False, ok: Any = None) -> str:
        """A real tensor of `ndim` to `most` dims. apart: no two elements are equal, none is 0. It becomes `now`."""

        def suits(value: torch.Tensor) -> bool:
            if not value.is_floating_point() or not ndim <= value.ndim <= most or (ok and not ok(value)):
                return False
            return not (apart and not is_apart(value)) and not (positive and not bool((value.detach() > 0.05).all()))

        name = self.find(suits, split=split)
        self.now = self.values[name]
        return name

    def name(self) -> str:
        """The value that was drawn last, again."""
        return next(name for name, value in self.values.items() if value is self.now)

    def like(self) -> str:
        """A real tensor that broadcasts with `now`."""
        return self.find(lambda value: value.is_floating_point() and broadcasts(value.shape, self.now.shape))

    def into(self) -> str:
        """A real tensor that expands to the shape of `now`."""
        shape = self.now.shape
        return self.find(lambda v: v.is_floating_point() and broadcasts(v.shape, shape) and torch.broadcast_shapes(v.shape, shape) == shape)

    def same(self) -> str:
        return self.find(lambda value: value.is_floating_point() and value.shape == self.now.shape)

    def mask(self, dims: int | None = None) -> str:
        """A mask of the shape of `now`, or of its first `dims` dims."""
        shape = self.now.shape[:dims]
        if not shape:
            raise NoFit
        if self.yes():
            return self.find(lambda value: value.dtype is torch.bool and value.shape == shape)
        return f"({self.find(lambda value: value.shape == shape and value.is_floating_point() and is_apart(value))} > 0.1)"

    def integers(self, ndim: int = 1, most: int = 1) -> str:
        """Numbers from 0, such as a value of integers, places of a value's elements, or a plain tensor."""
        kind = self.rng.random()
        if kind < 0.3:
            numbers = [self.upto(8) for _ in range(self.upto(6, 1))]
            return f"torch.tensor({numbers if ndim == 1 else [numbers]})"
        if kind < 0.6 and ndim == 1:
            value = self.find(lambda value: value.is_floating_point() and value.numel() > 0 and is_apart(value))
            return f"{value}.{self.one_of('flatten().argsort()', 'gt(-1).nonzero()[:, 0]')}"
        return self.find(lambda value: value.dtype is torch.int64 and ndim <= value.ndim <= most and value.numel() > 0)

    def counts(self) -> str:
        """Integers, one for each row of `now`."""
        rows = self.now.shape[:1]
        if self.yes():
            return f"{self.find(lambda value: value.is_floating_point() and value.shape == rows and is_apart(value))}.argsort()"
        return self.find(lambda value: value.dtype is torch.int64 and value.shape == rows)

    def dim(self, ok: Callable[[int], bool] = lambda size: True) -> int:
        """A dim of `now`, from either end, whose size is `ok`."""
        dims = [dim for dim in range(-self.now.ndim, self.now.ndim) if ok(self.now.shape[dim])]
        if not dims:
            raise NoFit
        return self.rng.choice(dims)

    def dims(self) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(self.now.ndim), self.rng.randint(1, self.now.ndim)))

    def size(self, dim: int) -> int:
        return self.now.shape[dim]

    def one_of(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def yes(self) -> bool:
        return self.rng.random() < 0.5

    def upto(self, high: int, low: int = 0) -> int:
        """A number from `low` to `high`, both included."""
        if high < low:
            raise NoFit
        return self.rng.randint(low, high)

    def order(self) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(self.now.ndim), self.now.ndim))

    def shape(self) -> tuple[int, ...]:
        """Another shape of as many elements as `now`: two neighbouring dims joined, or one dim cut in two, once or twice."""
        shape = list(self.now.shape)
        for _ in range(self.rng.choice((1, 1, 2))):
            at = self.upto(len(shape) - 1)
            if len(shape) > 1 and self.rng.random() < 0.5:
                at = self.upto(len(shape) - 2)
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
            elif shape[at] and len(shape) < 5:
                inner = self.rng.choice([n for n in range(1, shape[at] + 1) if shape[at] % n == 0])
                shape[at : at + 1] = [shape[at] // inner, inner]
        if shape and self.rng.random() < 0.2 and self.now.numel():
            shape[self.upto(len(shape) - 1)] = -1
        return tuple(shape)

    def rows(self, size: int) -> str:
        """A slice of a dim."""
        start, stop = sorted((self.upto(size), self.upto(size)))
        return self.one_of(f"{start}:{stop}", f"{start}:", f":{stop}", f"{start - size if start < size else size}:", "::2", "1::3", ":")

    def key(self, *, ints: bool = True) -> str:
        """A basic index of `now`."""
        parts = []
        for size in self.now.shape[: self.upto(self.now.ndim, 1)]:
            kind = self.rng.random()
            parts.append(str(self.upto(size - 1) - self.one_of(0, size)) if ints and size and kind < 0.25 else self.rows(size))
            if kind > 0.93:
                parts.append("None")
        return ", ".join(parts if self.rng.random() < 0.8 or len(parts) == self.now.ndim else ["...", *self._last(parts)])

    def _last(self, parts: list[str]) -> list[str]:
        return [self.rows(self.now.shape[-1])]

    def placements(self) -> str:
        return " ".join(self.one_of("R", *(f"S{dim}" for dim in range(self.now.ndim))) for _ in range(self.axes))

    def constant(self) -> float:
        return self.one_of(0.5, -0.7, 1.25, 0.3)


def is_apart(value: torch.Tensor) -> bool:
    """No two elements are equal, none is 0."""
    flat = torch.cat([value.detach().double().flatten(), torch.zeros(1, dtype=torch.float64)]).sort().values
    return bool((flat.diff() > APART).all())


def broadcasts(a: torch.Size, b: torch.Size) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b)))


def nonempty(value: torch.Tensor) -> bool:
    return value.numel() > 0


def _reduction(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    dim = d.one_of(d.dim(), d.dims(), None)
    return f"{x}.{d.one_of('sum', 'mean', 'sum')}({dim}, keepdim={d.yes()})" if dim is not None else f"{x}.mean()"


def _matmul(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    inner = d.now.shape[-1]
    fits = d.find(lambda v: v.is_floating_point() and v.ndim >= 1 and v.shape[-2 if v.ndim > 1 else 0] == inner and _batches(d.now, v))
    return f"({x} @ {fits}) * 0.3"


def _batches(a: torch.Tensor, b: torch.Tensor) -> bool:
    return broadcasts(a.shape[:-2], b.shape[:-2])


def _linear(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    inner = d.now.shape[-1]
    return f"F.linear({x}, {d.find(lambda v: v.is_floating_point() and v.ndim == 2 and v.shape[1] == inner and v.numel() > 0)}) * 0.3"


def _cat(d: Draw) -> str:
    x = d.x(1)
    dim = d.upto(d.now.ndim - 1)
    shape = list(d.now.shape)
    fits = d.find(
        lambda v: (
            v.is_floating_point() and v.ndim == len(shape) and [*v.shape[:dim], *v.shape[dim + 1 :]] == [*shape[:dim], *shape[dim + 1 :]]
        )
    )
    parts = [x, fits, x] if d.one_of(0, 0, 1) else [x, fits]
    return f"torch.cat([{', '.join(parts)}], {dim})"


def _gather(d: Draw) -> str:
    x = d.x(1, apart=True)
    dim = d.dim()
    return f"torch.take_along_dim({d.same()}, {x}.argsort({dim}), {dim})"


def _rows_by_index(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    dim = d.dim(lambda size: size > 0)
    index = d.integers()
    return f"{x}.index_select({dim}, {index} % {d.size(dim)})" if d.one_of(0, 1) else f"{x}.transpose(0, {dim})[{index} % {d.size(dim)}]"


def _two_indices(d: Draw) -> str:
    x = d.x(2, ok=nonempty)
    index = d.integers(1, 2)
    return f"{x}[{index} % {d.size(0)}, {index} % {d.size(1)}]"


def _summed_rows(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    dim = d.dim(lambda size: size > 0)
    index = d.integers()
    base = d.same()
    return f"{base}.index_add({dim}, {index} % {d.size(dim)}, {x}.index_select({dim}, {index} % {d.size(dim)}) * 0.5)"


def _scattered(d: Draw) -> str:
    x = d.x(1, apart=True, ok=nonempty)
    dim = d.dim()
    return f"torch.zeros_like({x}).{d.one_of('scatter_add', 'scatter')}({dim}, {x}.argsort({dim}), {d.same()})"


def _write_rows(d: Draw) -> str:
    x = d.x(1)
    key = d.key()
    part = eval(f"value[{key}]", {"value": d.now.data})
    if not part.numel() or any(n > 1 and not step for n, step in zip(part.shape, part.stride())):
        raise NoFit
    fits = d.find(
        lambda v: v.is_floating_point() and broadcasts(v.shape, part.shape) and torch.broadcast_shapes(v.shape, part.shape) == part.shape
    )
    return f"{x}[{key}] = {d.one_of(fits, fits, d.constant())}"


def _write_view(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    dim = d.dim(lambda size: size > 0)
    view = d.one_of(
        f"select({dim}, {d.upto(d.size(dim) - 1)})", f"narrow({dim}, {d.upto(d.size(dim) - 1)}, 1)", f"view({d.shape()})",
        f"transpose(0, {dim})", f"unfold({dim}, {(n := d.upto(d.size(dim), 1))}, {n})[0]",
        "unsqueeze(0)", "flatten()", f"unbind({dim})[0]", f"chunk(2, {dim})[0]", f"diagonal(0, {dim}, {d.dim()})", "view(-1)[1:]", "mT[0]",
    )  # fmt: skip
    return f"{x}.{view}.{d.one_of('mul_(0.5)', 'add_(0.25)', 'zero_()', 'tanh_()')}"


def _write_index(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    dim = d.dim(lambda size: size > 0)
    index = f"{d.integers()} % {d.size(dim)}"
    return f"{x}.index_add_({dim}, {index}, {d.same()}.index_select({dim}, {index}))"


def _convolution(d: Draw) -> str:
    x = d.x(3, 3, ok=nonempty)
    channels = d.size(1)
    weight = d.find(lambda v: v.is_floating_point() and v.ndim == 3 and v.shape[1] == channels and v.numel() > 0)
    width = d.values[weight].shape[2]
    return f"F.conv1d({x}, {weight}, stride={d.upto(2, 1)}, padding={d.upto(width + 1, (width + 1) // 2)}) * 0.2"


def _attention(d: Draw) -> str:
    x = d.x(3, 4, ok=nonempty)
    return f"F.scaled_dot_product_attention({x}, {d.same()}, {d.same()}, is_causal={d.yes()})"


def _embedding(d: Draw) -> str:
    x = d.x(2, 2, ok=nonempty)
    return f"F.embedding({d.integers(1, 2)} % {d.size(0)}, {x})"


def _cross_entropy(d: Draw) -> str:
    x = d.x(2, 2, ok=nonempty)
    return f"F.cross_entropy({x}, {d.counts()} % {d.size(1)}, reduction='{d.one_of('mean', 'sum', 'none')}')"


def _fourier(d: Draw) -> str:
    x = d.x(1, ok=nonempty)
    return f"torch.fft.{d.one_of('rfft', 'fft')}({x}, dim={d.dim()}).{d.one_of('real', 'imag', 'abs()')} * 0.2"


def _pad(d: Draw) -> str:
    x = d.x(1)
    return f"F.pad({x}, {tuple(d.upto(2) for _ in range(2 * d.upto(min(2, d.now.ndim), 1)))})"


def _transform(d: Draw) -> str:
    body = d.one_of("(a.sin() * a).sum()", "(a * a).mean()", "(a - a.mean()).square().sum() * 0.3", "a.softmax(-1).square().sum()")
    x = d.x(1, ok=nonempty)
    return d.one_of(
        f"torch.autograd.grad(({body.replace('a', x)}), {x}, create_graph=True)[0]" if "softmax" not in body and "mean" not in body
        else f"torch.autograd.grad((lambda a: {body})({x}), {x}, create_graph=True)[0]",
        f"torch.func.grad(lambda a: {body})({x})",
        f"torch.func.vjp(lambda a: a.sin(), {x})[1]({d.same()})[0]",
        f"torch.vmap(lambda a: a - a.mean())({x})",
        f"checkpoint(lambda a: {body} * a, {x}, use_reentrant=False)",
        f"checkpoint(lambda a: {body} * a, {x}, use_reentrant=True)",
    )  # fmt: skip


# Expressions with one result.
ONE: dict[str, Callable[[Draw], str]] = {
    "unary": lambda d: f"{d.x()}.{d.one_of('sin', 'tanh', 'sigmoid', 'cos', 'neg', 'square', 'erf', 'atan', 'exp')}()",
    "copy": lambda d: f"{d.x()}.{d.one_of('clone', 'contiguous')}()",
    "scalar": lambda d: f"{d.x()} {d.one_of('*', '/', '+', '-')} {d.constant()}",
    "scalar first": lambda d: f"{d.constant()} {d.one_of('*', '+', '-')} {d.x()}",
    "activation": lambda d: f"F.{d.one_of('gelu', 'silu', 'softplus', 'mish')}({d.x()})",
    "kink": lambda d: f"{d.x(apart=True)}.{d.one_of('abs()', 'relu()', 'clamp(-0.4, 0.6)', 'clamp_min(0.1)', 'sign()')}",
    "positive": lambda d: f"{d.x(positive=True)}.{d.one_of('sqrt()', 'log()', 'reciprocal()', 'rsqrt()', 'pow(1.5)')}",
    "add": lambda d: f"{d.x()} {d.one_of('+', '-', '*', '*')} {d.like()}",
    "add again": lambda d: f"{d.x()} {d.one_of('+', '-', '*')} {d.like()}",
    "ternary": lambda d: f"torch.{d.one_of('addcmul', 'lerp')}({d.x()}, {d.same()}, {d.same()})",
    "where": lambda d: f"torch.where({d.x(apart=True)} > 0, {d.like()}, {d.constant()})",
    "maximum": lambda d: f"torch.{d.one_of('maximum', 'minimum')}({d.x(apart=True)}, {d.constant()} * {d.same()})",
    "sum": _reduction,
    "mean": _reduction,
    "variance": lambda d: f"{d.x(1, ok=nonempty)}.var({d.dim()}, unbiased=False, keepdim={d.yes()})",
    "reduction": lambda d: f"{d.x(1, ok=nonempty)}.{d.one_of('logsumexp', 'norm', 'prod', 'nanmean')}(dim={d.dim()}, keepdim={d.yes()})",
    "extreme": lambda d: f"{d.x(1, ok=nonempty, apart=True)}.{d.one_of('amax', 'amin')}({d.one_of(d.dim(), d.dims())}, keepdim={d.yes()})",
    "whole": lambda d: f"{d.x(1, ok=nonempty, apart=True)}.{d.one_of('max', 'min', 'mean', 'sum', 'median', 'var', 'norm')}()",
    "centred": lambda d: f"{d.x(1, ok=nonempty)} - {d.same()}.mean({d.one_of(d.dim(), d.dims())}, keepdim=True)",
    "softmax": lambda d: f"{d.x(1)}.{d.one_of('softmax', 'log_softmax', 'cumsum', 'logcumsumexp')}({d.dim()})",
    "norm": lambda d: f"F.layer_norm({d.x(1, ok=lambda v: v.numel() and v.shape[-1] > 1)}, ({d.size(-1)},), eps=0.1)",
    "normalize": lambda d: f"F.normalize({d.x(1)}, dim={d.dim()}, eps=0.1)",
    "matmul": _matmul,
    "linear": _linear,
    "gram": lambda d: f"({d.x(2)} @ {d.same()}.mT) * 0.2",
    "outer": lambda d: f"torch.einsum('...i,...j->...ij', {d.x(1, 2)}, {d.same()})",
    "inner": lambda d: f"torch.einsum('{d.one_of('ij,ik->jk', 'ij,kj->ki', 'ij,ij->i', 'ij,ij->')}', {d.x(2, 2)}, {d.same()}) * 0.2",
    "convolution": _convolution,
    "attention": _attention,
    "embedding": _embedding,
    "cross entropy": _cross_entropy,
    "Fourier": _fourier,
    "pooled": lambda d: f"F.{d.one_of('max', 'avg')}_pool1d({d.x(2, 3, ok=nonempty, apart=True)}, {d.upto(min(3, d.size(-1)), 1)})",
    "resized": lambda d: f"F.interpolate({d.x(3, 3, ok=nonempty)}, scale_factor={d.one_of(2, 3)}, mode='{d.one_of('linear', 'nearest')}')",
    "group norm": lambda d: f"F.group_norm({d.x(2, 4, ok=lambda v: v.numel() and v[0, 0].numel() > 1)}, {d.size(1)}, eps=0.1)",
    "distances": lambda d: f"torch.cdist({d.x(2, 3, ok=nonempty)}, {d.same()} + 7.5) * 0.1",
    "loss": lambda d: f"F.{d.one_of('mse_loss', 'smooth_l1_loss')}({d.x(1, ok=nonempty)}, {d.same()} + 0.37)",
    "difference": lambda d: f"{d.x(1)}.diff(dim={d.dim()})",
    "running": lambda d: f"{d.x(1, apart=True, ok=nonempty)}.{d.one_of('cummax', 'cummin')}({d.dim()}).values",
    "found": lambda d: f"torch.searchsorted({d.x(1, 1, apart=True)}.sort().values, {d.x(1, 2, apart=True)} * 0.9).double() * 0.1",
    "masked scatter": lambda d: f"{d.x(1)}.masked_scatter({d.mask()}, {d.same()} * 1.5)",
    "reduced rows": lambda d: f"torch.zeros(5, *{d.x(1, ok=nonempty)}.shape[1:]).double().index_add(0, {d.counts()} % 5, {d.name()})",
    "one argument": lambda d: f"{d.x(1)}[torch.where({d.mask()})]",
    "reshape": lambda d: f"{d.x(1)}.reshape({d.shape()})",
    "view": lambda d: f"{d.x(1)}.view({d.shape()})",
    "flatten": lambda d: f"{d.x(2)}.flatten({d.one_of('', '0, 1', '1', '-2', '0, -2')})",
    "permute": lambda d: f"{d.x(2)}.permute({d.order()})",
    "transpose": lambda d: f"{d.x(2)}.{d.one_of('mT', f'transpose({d.dim()}, {d.dim()})', f'movedim({d.dim()}, {d.dim()})')}",
    "unsqueeze": lambda d: f"{d.x()}.unsqueeze({d.upto(d.now.ndim)})",
    "squeeze": lambda d: f"{d.x(1, ok=lambda v: 1 in v.shape)}.squeeze({d.one_of('', d.dim(lambda size: size == 1))})",
    "expand": lambda d: f"{d.x(0, 3)}.expand({(d.upto(3, 1), *d.now.shape)})",
    "expand one": lambda d: f"{d.x(1, ok=lambda v: 1 in v.shape)}.expand({tuple(d.upto(4, 2) if n == 1 else -1 for n in d.now.shape)})",
    "slices": lambda d: f"{d.x(1)}[{d.key()}]",
    "slices again": lambda d: f"{d.x(1)}[{d.key()}]",
    "row": lambda d: f"{d.x(1, ok=nonempty)}.select({(dim := d.dim())}, {d.upto(d.size(dim) - 1)})",
    "part": lambda d: f"{d.x(1)}.chunk({d.upto(3, 2)}, {d.dim()})[-1]",
    "diagonal": lambda d: f"{d.x(2)}.{d.one_of('diagonal()', 'tril()', 'triu(1)', 'diagonal(-1, -1, 0)')}",
    "windows": lambda d: f"{d.x(1)}.unfold({(dim := d.dim(lambda n: n > 1))}, {(width := d.upto(d.size(dim), 1))}, {d.upto(width, 1)})",
    "cat": _cat,
    "cat again": _cat,
    "stack": lambda d: f"torch.stack([{d.x()}, {d.same()}], {d.upto(d.now.ndim)})",
    "swapped halves": lambda d: f"torch.cat({d.x(1)}.chunk(2, {(dim := d.dim())})[::-1], {dim})",
    "roll": lambda d: f"{d.x(1)}.{d.one_of(f'roll({d.upto(3, -2)}, {d.dim()})', f'flip({d.dim()})', 'roll(2)')}",
    "repeat": lambda d: f"{d.x(1)}.repeat({(2, *[1] * (d.now.ndim - 1))})",
    "repeat rows": lambda d: f"{d.x(1)}.{d.one_of(f'repeat_interleave(2, {d.dim()})', f'tile({(d.upto(2, 1), 2)})')}",
    "pad": _pad,
    "take along": _gather,
    "index": _rows_by_index,
    "index again": _rows_by_index,
    "two indices": _two_indices,
    "index add": _summed_rows,
    "scatter": _scattered,
    "masked": lambda d: f"{d.x(1)}[{d.mask(d.one_of(None, 1))}]",
    "masked select": lambda d: f"{d.x(1)}.masked_select({d.mask()})",
    "masked fill": lambda d: f"{d.x(1)}.masked_fill({d.mask()}, {d.constant()})",
    "compare": lambda d: f"{d.x(1, apart=True)} {d.one_of('>', '<')} {d.one_of(0, 0.2, -0.3)}",
    "compare rows": lambda d: f"{d.x(2, apart=True, ok=nonempty)}.flatten(1).sum(1) > 0.1",
    "nonzero": lambda d: f"{d.x(1, apart=True)}.gt({d.one_of(0, 0.3)}).nonzero(){d.one_of('', '[:, 0]', '[:, -1]')}",
    "argsort": lambda d: f"{d.x(1, apart=True)}.argsort({d.dim()}, descending={d.yes()})",
    "argmax": lambda d: f"{d.x(1, apart=True, ok=nonempty)}.argmax({d.dim()})",
    "integers": lambda d: f"torch.arange({d.x(1)}.shape[0])",
    "integers on": lambda d: f"{d.integers(1, 3)} * {d.upto(3, 1)} + {d.upto(2)}",
    "integers in order": lambda d: f"{d.integers(1, 3)}.{d.one_of('flatten()', 'unique()', 'sort().values', 'flip(0)')}",
    "to real": lambda d: f"{d.integers(1, 3)}.double() * 0.1",
    "one hot": lambda d: f"F.one_hot({d.integers(1, 2)} % 3, 3).double()",
    "unique": lambda d: f"{d.x(1, apart=True)}.unique()",
    "count": lambda d: f"torch.bincount({d.integers()} % 5, minlength=4).double() * 0.1",
    "by counts": lambda d: f"{d.x(1, ok=nonempty)}.repeat_interleave({d.counts()} % 3, 0)",
    "number": lambda d: f"{d.x()} * {d.x(ok=nonempty)}.mean().item()",
    "choice": lambda d: f"{d.x()} * (0.5 if {d.x(apart=True, ok=nonempty)}.sum() > 0.05 else -0.5)",
    "rows in a loop": lambda d: f"sum(row.sin() for row in {d.x(1, ok=nonempty)})",
    "rows in a list": lambda d: f"torch.stack([row * i for i, row in enumerate({d.x(1, ok=nonempty)})])",
    "detach": lambda d: f"{d.x()}.detach()",
    "no_grad": lambda d: f"torch.no_grad()(lambda: {d.x()} * {d.same()})()",
    "filled": lambda d: f"torch.{d.one_of('zeros_like', 'ones_like')}({d.x()})",
    "new": lambda d: f"{d.x(1)}.new_{d.one_of('zeros', 'ones')}({tuple(d.now.shape)})",
    "relay": lambda d: f"relay({d.x(1, split=True)}, '{d.placements()}')",
    "whole tensor": lambda d: f"whole({d.x(split=True)})",
    "single": lambda d: f"{d.x()}.float()",
    "double": lambda d: f"{d.find(lambda v: v.dtype is torch.float32)}.double()",
    "autocast": lambda d: f"autocast(lambda: {d.x(2)} @ {d.same()}.mT).double() * 0.2",
    "transform": _transform,
    "same": lambda d: d.x(),
}  # fmt: skip

# Expressions with several results.
SEVERAL: dict[str, Callable[[Draw], tuple[str, int]]] = {
    "sort": lambda d: (f"{d.x(1, apart=True)}.sort({d.dim()})", 2),
    "topk": lambda d: (f"{d.x(1, apart=True)}.topk({d.upto(d.size(dim := d.dim()), 1)}, {dim})", 2),
    "max": lambda d: (
        f"{d.x(1, apart=True, ok=nonempty)}.{d.one_of('max', 'min', 'median')}({d.dim()}, keepdim={d.yes()})",
        2,
    ),
    "unbind": lambda d: (f"{d.x(1, ok=lambda v: 1 < v.shape[0] < 4)}.unbind()", d.size(0)),
    "split": lambda d: (f"{d.x(1)}.split([{(first := d.upto(d.size(dim := d.dim())))}, {d.size(dim) - first}], {dim})", 2),
    "split again": lambda d: (f"{d.x(1)}.tensor_split(2, {d.dim()})", 2),
    "unique with counts": lambda d: (f"{d.x(1, apart=True)}.unique(return_inverse=True)", 2),
    "meshgrid": lambda d: (f"torch.meshgrid({d.x(1, 1)}, {d.x(1, 1)}, indexing='ij')", 2),
    "var_mean": lambda d: (f"torch.var_mean({d.x(1, ok=nonempty)}, {d.dim()}, correction=0)", 2),
}

# Statements: writes in place.
WRITES: dict[str, Callable[[Draw], str]] = {
    "scalar": lambda d: f"{d.x()}.{d.one_of('mul_(0.5)', 'add_(0.3)', 'tanh_()', 'neg_()', 'zero_()', 'fill_(0.7)', 'sigmoid_()')}",
    "other": lambda d: f"{d.x()}.{d.one_of('mul_', 'add_', 'sub_', 'copy_')}({d.into()})",
    "operator": lambda d: f"{d.x()} {d.one_of('+=', '*=', '-=')} {d.into()}",
    "rows": _write_rows,
    "rows again": _write_rows,
    "view": _write_view,
    "view again": _write_view,
    "masked": lambda d: f"{d.x(1)}[{d.mask(d.one_of(None, 1))}] = {d.constant()}",
    "masked fill": lambda d: f"{d.x(1)}.masked_fill_({d.mask()}, {d.constant()})",
    "index": _write_index,
    "index put": lambda d: f"{d.x(1, ok=nonempty)}[{d.integers()} % {d.size(0)}] = {d.constant()}",
    "data": lambda d: d.one_of(f"with torch.no_grad(): {d.x()}.mul_({d.constant()})", f"{d.x()}.detach().zero_()"),
    "hook": lambda d: f"{d.x(ok=lambda v: v.requires_grad and v._base is None)}.register_hook(lambda g: g * 0.5)",
    "backward": lambda d: f"{d.x(ok=lambda v: v.requires_grad)}.sum().backward(retain_graph=True)",
    "shape": lambda d: f"{d.x(2)}.{d.one_of('transpose_(0, 1)', 'unsqueeze_(0)')}",
}  # fmt: skip
